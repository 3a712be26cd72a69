"""The shape of requests: what is refused without a look at the fleet (AD-10, AD-11 and the field rules)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckFailed, CheckSkipped, check, require
from iop.conformance.offer import Offer
from iop.conformance.wire import Answer

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNKNOWN_NUMBER: Final = 9_999

Change = Callable[[Any], object]


async def _refuses(
    bench: Bench, offer: Offer, cases: Sequence[tuple[str, str, Change]], *, wants: str
) -> None:
    """Each changed sample is INVALID_ARGUMENT.

    A case is an RPC, what is wrong in words, and what makes a right sample wrong; `wants` is the rule, for the report.
    """
    tried = 0
    accepted: list[str] = []
    for rpc, words, change in cases:
        if rpc not in offer.samples:
            continue
        request = offer.sample(rpc, bench.key())
        change(request)
        answer = await bench.call(rpc, request)
        tried += 1
        if answer.code is not INVALID:
            accepted.append(f"{rpc} with {words}: {answer.told()}")
        else:
            answer.refused(INVALID, where=words)
    if not tried:
        raise CheckSkipped("no kind of operation with such a field is offered")
    require(not accepted, saw="; ".join(accepted), wants=f"INVALID_ARGUMENT: {wants}")


def _enum_cases(number: int) -> list[tuple[str, str, Change]]:
    def put(*path: str) -> Change:
        def change(request: Any) -> None:
            holder = request
            for name in path[:-1]:
                holder = getattr(holder, name)
            if holder.DESCRIPTOR.fields_by_name[path[-1]].is_repeated:
                getattr(holder, path[-1])[:] = [number]
            else:
                setattr(holder, path[-1], number)

        return change

    def release_weights(request: Any) -> None:
        request.kinds[:] = [pb.RESOURCE_KIND_WEIGHTS]
        request.weight_retention = number

    def drain_action(request: Any) -> None:
        request.pause.mode = pb.PAUSE_MODE_DRAIN
        request.pause.drain_timeout_ms = 1000
        request.pause.on_drain_timeout = number

    return [
        ("FlushCaches", "kinds", put("kinds")),
        ("FlushCaches", "busy_policy", put("busy_policy")),
        ("Pause", "pause.mode", put("pause", "mode")),
        ("Pause", "pause.admission", put("pause", "admission")),
        ("Pause", "pause.on_drain_timeout", drain_action),
        ("ReleaseResources", "kinds", put("kinds")),
        ("ReleaseResources", "weight_retention", release_weights),
        ("RestoreResources", "kinds", put("kinds")),
        ("UpdateWeights", "disk.format", put("disk", "format")),
        ("UpdateWeights", "quiesce.mode", put("quiesce", "mode")),
        ("UpdateWeights", "cache_policy", put("cache_policy")),
        ("StartProfile", "kinds", put("kinds")),
    ]


@check("AD-10-unspecified")
async def unspecified_is_refused(bench: Bench) -> None:
    """An enum left UNSPECIFIED is INVALID_ARGUMENT, wherever one is required."""
    cases = [(rpc, f"{words} UNSPECIFIED", change) for rpc, words, change in _enum_cases(0)]
    await _refuses(bench, await bench.offer(), cases, wants="an enum is always said")


@check("AD-10-unknown-enum")
async def unknown_numbers_are_refused(bench: Bench) -> None:
    """An enum number that is not in the schema is INVALID_ARGUMENT."""
    cases = [(rpc, f"{words} {UNKNOWN_NUMBER}", change) for rpc, words, change in _enum_cases(UNKNOWN_NUMBER)]
    await _refuses(bench, await bench.offer(), cases, wants="an unknown number is never guessed at")


@check("AD-10-list-filters")
async def filters_are_checked(bench: Bench) -> None:
    """UNSPECIFIED and unknown numbers in the filters of ListOperations are INVALID_ARGUMENT."""
    for number in (0, UNKNOWN_NUMBER):
        for name in ("kinds", "states"):
            request = pb.ListAdminOperationsRequest()
            getattr(request, name).append(number)
            answer = await bench.call("ListOperations", request)
            answer.refused(INVALID, where=f"{name} {number}")


@check("AD-10-empty-selector")
async def empty_selectors_are_refused(bench: Bench) -> None:
    """An empty selector never means everybody: no scope, no models, no participants, no kinds."""

    def no_scope(request: Any) -> None:
        request.target.Clear()

    def no_target(request: Any) -> None:
        request.ClearField("target")

    def no_models(request: Any) -> None:
        request.target.models.SetInParent()

    def no_participants(request: Any) -> None:
        request.target.participants.SetInParent()

    def empty_name(request: Any) -> None:
        request.target.models.models.append("")

    selecting = ("FlushCaches", "Pause", "ReleaseResources", "StartProfile", "ReconfigureServing")
    cases: list[tuple[str, str, Change]] = [
        (rpc, words, change)
        for rpc in selecting
        for words, change in (
            ("a target without scope", no_scope),
            ("no target", no_target),
            ("models {}", no_models),
            ("participants {}", no_participants),
            ("the empty model name", empty_name),
        )
    ]
    cases += [
        (rpc, "no kinds", lambda request: request.ClearField("kinds"))
        for rpc in ("FlushCaches", "ReleaseResources", "RestoreResources", "StartProfile")
    ]
    cases.append(("ReconfigureServing", "no changes", lambda request: request.ClearField("changes")))
    cases.append(("ReconfigureServing", "an empty change", lambda request: request.changes.add()))
    cases.append(("UpdateWeights", "no source", lambda request: request.ClearField("disk")))
    await _refuses(bench, await bench.offer(), cases, wants="everything is said by all {} only")


@check("AD-10-duplicates")
async def duplicates_are_refused(bench: Bench) -> None:
    """A name, kind or field that is given twice is INVALID_ARGUMENT."""

    def twice(name: str) -> Change:
        def change(request: Any) -> None:
            values = getattr(request, name)
            values.append(values[0])

        return change

    def models(request: Any) -> None:
        request.target.models.models.extend(["m", "m"])

    def participants(request: Any) -> None:
        request.target.participants.participant_ids.extend(["p", "p"])

    offer = await bench.offer()
    cases: list[tuple[str, str, Change]] = [
        ("FlushCaches", "kinds twice", twice("kinds")),
        ("ReleaseResources", "kinds twice", twice("kinds")),
        ("RestoreResources", "kinds twice", twice("kinds")),
        ("StartProfile", "kinds twice", twice("kinds")),
        ("ReconfigureServing", "a field twice", twice("changes")),
        ("FlushCaches", "a model twice", models),
        ("Pause", "a model twice", models),
        ("FlushCaches", "a participant twice", participants),
        ("Pause", "a participant twice", participants),
    ]
    await _refuses(bench, offer, cases, wants="no duplicates")


def _keyed(key: str) -> Change:
    def change(request: Any) -> None:
        request.options.idempotency_key = key

    return change


@check("AD-11-key-missing")
async def keys_are_required(bench: Bench) -> None:
    """Every mutation needs an idempotency key."""
    offer = await bench.offer()
    cases: list[tuple[str, str, Change]] = [(rpc, "an empty key", _keyed("")) for rpc in offer.samples]
    cases += [(rpc, "no options", lambda request: request.ClearField("options")) for rpc in offer.samples]
    await _refuses(bench, offer, cases, wants="a non-empty key")


@check("AD-11-key-length")
async def keys_are_bounded(bench: Bench) -> None:
    """A key of 128 bytes is taken, one of 129 is INVALID_ARGUMENT."""
    offer = await bench.offer()
    cases = [(rpc, "a key of 129 bytes", _keyed("k" * 129)) for rpc in offer.samples]
    await _refuses(bench, offer, cases, wants="at most 128 bytes")
    offer.need("FlushCaches")
    longest = bench.key().ljust(128, "x")
    answer = await bench.call("FlushCaches", offer.flush(longest))
    require(answer.is_ok, saw=f"a key of 128 bytes refused: {answer.told()}", wants="1..128 bytes")


@check("AD-11-key-ascii")
async def keys_are_printable_ascii(bench: Bench) -> None:
    """A key with a control character, a line break or anything beyond ASCII is INVALID_ARGUMENT."""
    offer = await bench.offer()
    rpcs = offer.samples[:2]
    cases = [
        (rpc, f"the key {key!r}", _keyed(key))
        for rpc in rpcs
        for key in ("schlüssel", "a\nb", "a\tb", "a\x7fb", "鍵")
    ]
    await _refuses(bench, offer, cases, wants="printable ASCII")


@check("AD-25-deadline-range")
async def deadlines_are_checked(bench: Bench) -> None:
    """An operation deadline of zero, or beyond limits.max_deadline_ms, is INVALID_ARGUMENT."""
    offer = await bench.offer()
    over = offer.profile.limits.max_deadline_ms + 1

    def deadline(milliseconds: int) -> Change:
        def change(request: Any) -> None:
            request.options.deadline_ms = milliseconds

        return change

    cases = [(rpc, "deadline_ms 0", deadline(0)) for rpc in offer.samples]
    if 1 < over < 2**32:
        cases += [(rpc, f"deadline_ms {over}", deadline(over)) for rpc in offer.samples[:2]]
    await _refuses(bench, offer, cases, wants="a deadline between one millisecond and the limit")


@check("AD-14-zero-epoch")
async def epochs_are_required(bench: Bench) -> None:
    """Resume and RestoreResources without an epoch are INVALID_ARGUMENT."""
    cases: list[tuple[str, str, Change]] = [
        ("Resume", "pause_epoch 0", lambda request: request.ClearField("pause_epoch")),
        ("RestoreResources", "resource_epoch 0", lambda request: request.ClearField("resource_epoch")),
    ]
    await _refuses(bench, await bench.offer(), cases, wants="the epoch that it answers")


@check("AD-41-pause-shape")
async def pause_options_fit_together(bench: Bench) -> None:
    """A pause without its spec, or with drain options that do not fit together, is INVALID_ARGUMENT."""

    def timeout_without_action(request: Any) -> None:
        request.pause.mode = pb.PAUSE_MODE_DRAIN
        request.pause.drain_timeout_ms = 1000

    def action_without_timeout(request: Any) -> None:
        request.pause.mode = pb.PAUSE_MODE_DRAIN
        request.pause.on_drain_timeout = pb.DRAIN_TIMEOUT_ACTION_FAIL

    def timeout_of_abort(request: Any) -> None:
        request.pause.mode = pb.PAUSE_MODE_ABORT
        request.pause.drain_timeout_ms = 1000
        request.pause.on_drain_timeout = pb.DRAIN_TIMEOUT_ACTION_FAIL

    cases: list[tuple[str, str, Change]] = [
        ("Pause", "no pause spec", lambda request: request.ClearField("pause")),
        ("Pause", "drain_timeout_ms without on_drain_timeout", timeout_without_action),
        ("Pause", "on_drain_timeout without drain_timeout_ms", action_without_timeout),
        ("Pause", "drain_timeout_ms with ABORT", timeout_of_abort),
    ]
    await _refuses(
        bench, await bench.offer(), cases, wants="drain_timeout_ms and on_drain_timeout together, for DRAIN"
    )


@check("AD-43-retention-shape")
async def retention_goes_with_weights(bench: Bench) -> None:
    """weight_retention is required with WEIGHTS and refused without."""

    def weights_alone(request: Any) -> None:
        request.kinds[:] = [pb.RESOURCE_KIND_WEIGHTS]
        request.ClearField("weight_retention")

    def retention_alone(request: Any) -> None:
        request.kinds[:] = [pb.RESOURCE_KIND_KV_CACHE]
        request.weight_retention = pb.WEIGHT_RETENTION_OFFLOAD_TO_HOST

    cases: list[tuple[str, str, Change]] = [
        ("ReleaseResources", "WEIGHTS without weight_retention", weights_alone),
        ("ReleaseResources", "weight_retention without WEIGHTS", retention_alone),
    ]
    await _refuses(bench, await bench.offer(), cases, wants="weight_retention exactly with WEIGHTS")


@check("AD-45-source-shape")
async def sources_are_checked(bench: Bench) -> None:
    """A weight source that contradicts itself is INVALID_ARGUMENT."""

    def digest(size: int) -> Change:
        def change(request: Any) -> None:
            request.disk.digests.add(name="model.safetensors", sha256=bytes(size))

        return change

    def inline(*, data: bytes, sha256: bytes = b"") -> Change:
        def change(request: Any) -> None:
            spec = pb.TensorSpec(name="w", dtype=pb.TENSOR_DTYPE_FLOAT32, shape=[2])
            request.inline_tensors.tensors.add(spec=spec, data=data, sha256=sha256)

        return change

    def relative(request: Any) -> None:
        request.disk.path = "relative/path"

    cases: list[tuple[str, str, Change]] = [
        ("UpdateWeights", "no model", lambda request: request.ClearField("model")),
        ("UpdateWeights", "no weight_version", lambda request: request.ClearField("weight_version")),
        ("UpdateWeights", "a relative path", relative),
        ("UpdateWeights", "a digest of 31 bytes", digest(31)),
        ("UpdateWeights", "data that is too short for its shape", inline(data=bytes(7))),
        ("UpdateWeights", "a tensor digest of 5 bytes", inline(data=bytes(8), sha256=bytes(5))),
        ("UpdateWeights", "no tensors", lambda request: request.inline_tensors.SetInParent()),
        ("UpdateWeights", "an empty distributed group", lambda request: request.distributed.SetInParent()),
        ("UpdateWeights", "no IPC tensors", lambda request: request.ipc.SetInParent()),
    ]
    await _refuses(bench, await bench.offer(), cases, wants="a source that fits together")


@check("AD-46-profile-shape")
async def profile_requests_are_checked(bench: Bench) -> None:
    """A label beyond 128 bytes, and StopProfile without an id, are INVALID_ARGUMENT."""

    def label(request: Any) -> None:
        request.label = "l" * 129

    cases: list[tuple[str, str, Change]] = [
        ("StartProfile", "a label of 129 bytes", label),
        ("StopProfile", "no profile_id", lambda request: request.ClearField("profile_id")),
    ]
    await _refuses(bench, await bench.offer(), cases, wants="the field rules")


@check("AD-11-reason-length")
async def reasons_are_bounded(bench: Bench) -> None:
    """A reason beyond 1024 bytes is INVALID_ARGUMENT."""
    offer = await bench.offer()

    def reason(request: Any) -> None:
        request.options.reason = "r" * 1025

    await _refuses(
        bench, offer, [(rpc, "a reason of 1025 bytes", reason) for rpc in offer.samples[:2]], wants="1024"
    )


@check("AD-23-ids-required")
async def ids_are_required(bench: Bench) -> None:
    """GetOperation, CancelOperation and WatchOperation without an id are INVALID_ARGUMENT."""
    answers: list[Answer] = [
        await bench.call("GetOperation", pb.GetAdminOperationRequest()),
        await bench.call("CancelOperation", pb.CancelAdminOperationRequest()),
        await bench.call("WatchOperation", pb.WatchAdminOperationRequest()),
    ]
    for answer in answers:
        answer.refused(INVALID, where="an empty operation_id")


@check("AD-10-garbage")
async def garbage_is_refused(bench: Bench) -> None:
    """Bytes that are no message are refused, and the server goes on serving."""
    for rpc in ("Pause", "FlushCaches"):
        answer = await bench.call(rpc, b"\xff\xff\xff\xff\x07garbage")
        if answer.is_ok:
            raise CheckFailed(saw=f"{rpc} accept bytes that are no message", wants="a refusal")
    await bench.profile()
