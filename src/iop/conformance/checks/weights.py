"""Weight updates (AD-32, AD-38, AD-45)."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from iop.conformance.bench import SETTLE_TIMEOUT_S, Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckNotRun, CheckSkipped, check, require
from iop.conformance.offer import MISSING_PATH, Offer

Status = grpc.StatusCode
ROUNDS = 6


def _checkpoints(bench: Bench, offer: Offer) -> tuple[str, str]:
    offer.need("UpdateWeights")
    if "UpdateWeights" not in offer.samples:
        raise CheckSkipped("updates from disk are not offered")
    if bench.target.checkpoints is None:
        raise CheckNotRun("needs --checkpoint-a PATH and --checkpoint-b PATH")
    return bench.target.checkpoints


async def _update(bench: Bench, offer: Offer, path: str) -> tuple[str, Any]:
    version = f"conformance-{bench.key()}"
    answer = await bench.call(
        "UpdateWeights", offer.update(bench.key(), version=version, path=path), timeout_s=SETTLE_TIMEOUT_S
    )
    return version, answer


async def _versions(bench: Bench, model: str) -> tuple[str, set[str], Any]:
    """The published version, those that participants report, and the published record."""
    profile = await bench.profile()
    published = next((w for w in profile.weights if w.model == model), None)
    reported = {p.weight_version for p in profile.participants if model in p.models and p.connected}
    return (published.weight_version if published is not None else "", reported, published)


@check("AD-45-needs-quiesce")
async def an_update_says_how_to_quiesce(bench: Bench) -> None:
    """UpdateWeights of active participants without quiesce is FAILED_PRECONDITION."""
    offer = await bench.offer()
    offer.need("UpdateWeights")
    request = offer.update(bench.key(), version="conformance-never")
    request.ClearField("quiesce")
    answer = await bench.call("UpdateWeights", request)
    answer.refused(Status.FAILED_PRECONDITION, where="active participants and no quiesce")


@check("AD-45-expected-version")
async def the_expected_version_is_compared(bench: Bench) -> None:
    """A wrong expected_weight_version is ABORTED."""
    offer = await bench.offer()
    offer.need("UpdateWeights")
    request = offer.update(bench.key(), version="conformance-never")
    request.expected_weight_version = "no-such-version"
    (await bench.call("UpdateWeights", request)).refused(
        Status.ABORTED, where="a wrong expected_weight_version"
    )


@check("AD-45-unknown-model")
async def unknown_models_are_not_updated(bench: Bench) -> None:
    """UpdateWeights of an unknown model is NOT_FOUND."""
    offer = await bench.offer()
    offer.need("UpdateWeights")
    request = offer.update(bench.key(), version="conformance-never")
    request.model = "no-such-model"
    (await bench.call("UpdateWeights", request)).refused(Status.NOT_FOUND, where="an unknown model")


@check("AD-38-failed-update", clauses=["AD-32"], timeout_s=120.0)
async def a_failed_update_leaves_the_version(bench: Bench) -> None:
    """An update from a path that nobody sees fails, and version and state are as before."""
    offer = await bench.offer()
    offer.need("UpdateWeights")
    model = offer.model
    before = await _versions(bench, model)
    revision = (await bench.profile()).revision
    _, answer = await _update(bench, offer, MISSING_PATH)
    if answer.is_ok:
        end = answer.terminal
        require(
            end.HasField("failed"),
            saw=f"an update from nowhere end {end.WhichOneof('event')}",
            wants="failed (SOURCE_UNAVAILABLE)",
        )
        require(
            end.failed.error.participants, saw="nobody named", wants="the participants that failed (AD-31)"
        )
        if end.failed.error.rolled_back:
            now = (await bench.profile()).revision
            require(
                now == revision, saw="a revision risen by what was rolled back", wants="no change (AD-13)"
            )
    else:
        require(
            answer.code in {Status.FAILED_PRECONDITION, Status.INVALID_ARGUMENT, Status.NOT_FOUND},
            saw=answer.told(),
            wants="a failed operation, or a refusal",
        )
    after = await _versions(bench, model)
    require(after[:2] == before[:2], saw=f"versions {after[:2]}", wants=f"{before[:2]}, as before")
    held = [p.participant_id for p in (await bench.profile()).participants if p.paused or p.quarantined]
    require(not held, saw=f"{held} paused or quarantined", wants="the state before it")


@check("AD-45-update", clauses=["AD-30", "AD-37", "AD-38"], timeout_s=180.0)
async def an_update_is_published(bench: Bench) -> None:
    """An update from disk reaches every rank, is verified, and publishes its version with its operation."""
    offer = await bench.offer()
    first, second = _checkpoints(bench, offer)
    model = offer.model
    previous = (await _versions(bench, model))[0]
    for path in (second, first):
        version, answer = await _update(bench, offer, path)
        result = answer.completed.result.update_weights
        require(result.weight_version == version, saw=f"version {result.weight_version}", wants=version)
        require(
            result.previous_weight_version == previous,
            saw=f"previous version {result.previous_weight_version!r}",
            wants=f"{previous!r}",
        )
        published, reported, record = await _versions(bench, model)
        require(published == version, saw=f"{published} published", wants=version)
        require(reported == {version}, saw=f"participants at {sorted(reported)}", wants=f"all at {version}")
        require(
            record.operation_id == answer.operation_id,
            saw="another operation named",
            wants="the publishing one",
        )
        operation = await bench.get(answer.operation_id)
        require(operation.committed, saw="committed not set", wants="the point of no return told")
        blind = [p.participant_id for p in operation.participants if not p.verified_by]
        require(not blind, saw=f"{blind} without verified_by", wants="what each read-back rested on (AD-37)")
        previous = version
    same = offer.update(bench.key(), version=previous, path=second)
    again = await bench.call("UpdateWeights", same)
    again.refused(Status.FAILED_PRECONDITION, where="the version that is published already")


@check("AD-32-cancel-or-commit", clauses=["AD-24"], timeout_s=240.0)
async def cancel_respects_the_commit(bench: Bench) -> None:
    """Cancels at any time of an update: before its commit it ends cancelled and old, after it completed and new."""
    offer = await bench.offer()
    first, second = _checkpoints(bench, offer)
    model = offer.model
    try:
        for turn in range(ROUNDS):
            await _cancelled_update(bench, offer, model, second if turn % 2 == 0 else first, turn)
    finally:
        await _update(bench, await bench.offer(), first)


async def _cancelled_update(bench: Bench, offer: Offer, model: str, path: str, turn: int) -> None:
    before = (await _versions(bench, model))[0]
    version = f"conformance-{bench.key()}"
    stream = bench.open("UpdateWeights", offer.update(bench.key(), version=version, path=path))
    operation_id = (await stream.first()).operation_id
    was_committed = False
    if turn % 3 == 0:
        await _until_phase(bench, operation_id)
        was_committed = (await bench.get(operation_id)).committed
    else:
        await asyncio.sleep(0.02 * turn)
    answer = (await bench.cancel(operation_id)).message
    end = (await stream.rest(timeout_s=SETTLE_TIMEOUT_S)).terminal.WhichOneof("event")
    operation = await bench.get(operation_id)
    now = (await _versions(bench, model))[0]
    name = pb.CancelDisposition.Name(answer.disposition)
    told = f"{name}{' after the commit' if was_committed else ''}, then {end}, then version {now}"
    if answer.disposition == pb.CANCEL_DISPOSITION_CANCELLING:
        require(
            not was_committed and end == "cancelled" and not operation.committed and now == before,
            saw=told,
            wants=f"TOO_LATE after the commit; before it the end cancelled and version {before}",
        )
    else:
        require(
            end == "completed" and now == version and operation.committed,
            saw=told,
            wants=f"a committed update to complete with version {version}",
        )


async def _until_phase(bench: Bench, operation_id: str) -> None:
    """Wait until the update is committed or over."""
    while True:
        operation = await bench.get(operation_id)
        if operation.committed or operation.HasField("ended_at_unix_nanos"):
            return
        await asyncio.sleep(0.001)
