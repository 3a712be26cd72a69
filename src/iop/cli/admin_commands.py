"""``iop admin``: the verbs that operate any OpenEngineAdmin server."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import IntEnum
from typing import Annotated, TypeVar

import typer

from iop.admin.enums import (
    AdminOperationKind,
    AdminOperationState,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CachePolicy,
    DrainTimeoutAction,
    EngineRole,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightFormat,
    WeightRetention,
)
from iop.admin.requests import (
    DiskSource,
    FlushCachesRequest,
    ListOperationsRequest,
    PauseRequest,
    PauseSpec,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    ServingChange,
    StartProfileRequest,
    StopProfileRequest,
    UpdateWeightsRequest,
)
from iop.admin.results import AdminOperation
from iop.cli.admin_call import Call, mutation, query
from iop.cli.admin_progress import observe
from iop.cli.output import data, exit_with, print_json, print_rows
from iop.cli.records import describe_result, to_json
from iop.core.errors import InvalidRequest

__all__ = ["admin_app"]

admin_app = typer.Typer(
    help="Operate any OpenEngineAdmin server: the Edge, or one engine by itself.\n\n"
    "Without --target it is the one that iop up or iop engine started here, with its development token. "
    "Verbs that act on participants need --all, --model or --participant.",
    no_args_is_help=True,
)

Member = TypeVar("Member", bound=IntEnum)


def _word(member: IntEnum) -> str:
    return member.name.lower().replace("_", "-")


def _member(members: type[Member], word: str, option: str) -> Member:
    """The member that ``word`` names.

    Raises:
        InvalidRequest: none; the message lists them.
    """
    for member in members:
        if _word(member) == word.lower().replace("_", "-"):
            return member
    known = ", ".join(_word(member) for member in members)
    raise InvalidRequest(f"{option} {word!r} is unknown: it is one of {known}.", reason="UNKNOWN_CHOICE")


def _members(members: type[Member], words: list[str], option: str) -> tuple[Member, ...]:
    return tuple(_member(members, word, option) for word in words)


def _pause_spec(
    mode: str, admission: str, drain_timeout_ms: int | None = None, on_drain_timeout: str | None = None
) -> PauseSpec:
    return PauseSpec(
        mode=_member(PauseMode, mode, "--mode"),
        admission=_member(AdmissionPolicy, admission, "--admission"),
        drain_timeout_ms=drain_timeout_ms,
        on_drain_timeout=(
            None
            if on_drain_timeout is None
            else _member(DrainTimeoutAction, on_drain_timeout, "--on-drain-timeout")
        ),
    )


Epoch = Annotated[int, typer.Option("--epoch", min=1, help="The epoch that pause or release returned.")]
Mode = Annotated[str, typer.Option("--mode", help="drain: finish what runs. abort: end it. keep: freeze it.")]
Admission = Annotated[str, typer.Option("--admission", help="New requests meanwhile: queue or reject.")]


# --- asking -----------------------------------------------------------------------------------------------------------


@query(admin_app, "profile", role="viewer")
async def profile(call: Call) -> None:
    """What the server offers and how it stands: participants, epochs, revision, capabilities.

    Example: iop admin profile
    """
    shown = await call.client.profile()
    if call.as_json:
        print_json(to_json(shown))
        return
    data.print(f"revision {shown.revision}; operations: {_words(shown.capabilities.operations)}")
    for pause in shown.pauses:
        data.print(
            f"paused: epoch {pause.pause_epoch}, {_word(pause.mode)}, {_word(pause.admission)},"
            f" by {pause.principal}: {', '.join(pause.participant_ids)}"
        )
    for release in shown.releases:
        data.print(
            f"released: epoch {release.resource_epoch}, {_words(release.kinds)}: {', '.join(release.participant_ids)}"
        )
    rows = [
        (
            participant.info.participant_id,
            participant.state.name,
            ", ".join(participant.info.models),
            participant.weight_version,
            f"{participant.info.engine_name} {participant.info.engine_version}".strip(),
            participant.quarantine_reason,
        )
        for participant in shown.participants
    ]
    print_rows(("participant", "state", "models", "weights", "engine", "why"), rows, empty="no participants")


def _words(members: object) -> str:
    assert isinstance(members, tuple | frozenset)
    return ", ".join(sorted(_word(member) for member in members)) or "none"


@query(admin_app, "get", role="viewer")
async def get(call: Call, operation: Annotated[str, typer.Argument(help="The operation's id.")]) -> None:
    """The whole state of one operation.

    Example: iop admin get op-4f2a
    """
    shown = await call.client.get(operation)
    if call.as_json:
        print_json(to_json(shown))
    else:
        _print_operation(shown)


def _when(operation: AdminOperation) -> str:
    """When it was accepted, by the server's clock."""
    at = datetime.fromtimestamp(operation.accepted_at_unix_nanos / 1e9, tz=UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}Z"


def _took(operation: AdminOperation) -> str:
    """How long after that it ended."""
    if operation.ended_at_unix_nanos is None:
        return "not ended"
    return f"after {(operation.ended_at_unix_nanos - operation.accepted_at_unix_nanos) / 1e9:.1f} s"


def _revisions(operation: AdminOperation) -> str:
    """The server's revision before it, and after."""
    after = "" if operation.revision_after is None else f" to {operation.revision_after}"
    return f"{operation.revision_before}{after}"


def _print_operation(operation: AdminOperation) -> None:
    data.print(
        f"{operation.operation_id}: {_word(operation.kind)}, {operation.state.name}, by {operation.principal}"
    )
    data.print(f"  accepted {_when(operation)}, {_took(operation)}")
    data.print(f"  revision {_revisions(operation)}")
    for status in operation.participants:
        error = f" {status.error.code.name}: {status.error.message}" if status.error else ""
        data.print(f"  {status.participant_id}: {status.phase.name}{error}")
    for line in describe_result(operation):
        data.print(f"  {line}")
    if operation.error is not None:
        data.print(f"  {operation.error.code.name}: {operation.error.message}")


@query(admin_app, "list", role="viewer")
async def list_operations(
    call: Call,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only these kinds: pause, flush-caches, ...")
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Only these states: running, failed, ...")
    ] = None,
    page_size: Annotated[int, typer.Option("--page-size", min=1, max=1000, help="How many.")] = 20,
    page_token: Annotated[str, typer.Option("--page-token", help="Where the previous page ended.")] = "",
) -> None:
    """Operations, newest first.

    Example: iop admin list --kind pause --state failed
    """
    page = await call.client.list_operations(
        ListOperationsRequest(
            page_size=page_size,
            page_token=page_token,
            kinds=_members(AdminOperationKind, kind or [], "--kind"),
            states=_members(AdminOperationState, state or [], "--state"),
        )
    )
    if call.as_json:
        print_json(to_json(page))
        return
    rows = [
        (
            item.operation_id,
            _word(item.kind),
            item.state.name,
            item.principal,
            _when(item),
            _took(item),
            _revisions(item),
        )
        for item in page.operations
    ]
    print_rows(
        ("operation", "kind", "state", "by", "accepted", "ended", "revision"), rows, empty="no operations"
    )
    if page.next_page_token:
        data.print(f"more: --page-token {page.next_page_token}")


@query(admin_app, "attach", role="viewer")
async def attach(
    call: Call,
    operation: Annotated[str, typer.Argument(help="The operation's id.")],
    after: Annotated[int, typer.Option("--after", min=0, help="Only events after this sequence.")] = 0,
) -> None:
    """Watch an operation to its end, from its first event on.

    Example: iop admin attach op-4f2a
    """
    ended = await observe(
        call.client,
        call.client.watch(operation, after_sequence=after),
        as_json=call.as_json,
        as_events=False,
    )
    if ended.operation is not None and not call.as_json:
        _print_operation(ended.operation)
    exit_with(ended.exit_code)


@query(admin_app, "cancel", role="admin")
async def cancel(
    call: Call,
    operation: Annotated[str, typer.Argument(help="The operation's id.")],
    reason: Annotated[str, typer.Option("--reason", help="Why, for the audit.")] = "",
) -> None:
    """Call a running operation off, if it is not too late.

    Example: iop admin cancel op-4f2a --reason "wrong model"
    """
    answer = await call.client.cancel(operation, reason=reason)
    if call.as_json:
        print_json(to_json(answer))
    else:
        data.print(f"{operation}: {_word(answer.disposition)}")


# --- changing ---------------------------------------------------------------------------------------------------------


@mutation(admin_app, "flush", role="operator", selects=True)
def flush(
    call: Call,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="prefix (KV), multimodal, encoder.")
    ] = None,
    busy: Annotated[str, typer.Option("--busy", help="A busy engine: fail, wait, preempt.")] = "wait",
) -> FlushCachesRequest:
    """Empty caches, and prove that they are empty.

    Example: iop admin flush --all --kind prefix --busy wait
    """
    return FlushCachesRequest(
        options=call.required_options,
        target=call.required_target,
        kinds=_members(CacheKind, kind or ["prefix"], "--kind"),
        busy_policy=_member(BusyPolicy, busy, "--busy"),
    )


@mutation(admin_app, "pause", role="operator", selects=True)
def pause(
    call: Call,
    mode: Mode,
    admission: Admission = "queue",
    drain_timeout_ms: Annotated[
        int | None, typer.Option("--drain-timeout-ms", min=1, help="Longest drain.")
    ] = None,
    on_drain_timeout: Annotated[
        str | None, typer.Option("--on-drain-timeout", help="Then: fail or abort.")
    ] = None,
) -> PauseRequest:
    """Stop inference; the answer has the epoch that resume needs.

    Example: iop admin pause --all --mode drain --admission queue
    """
    if drain_timeout_ms is not None and on_drain_timeout is None:
        on_drain_timeout = "fail"
    return PauseRequest(
        options=call.required_options,
        target=call.required_target,
        pause=_pause_spec(mode, admission, drain_timeout_ms, on_drain_timeout),
    )


@mutation(admin_app, "resume", role="operator", selects=False)
def resume(call: Call, epoch: Epoch) -> ResumeRequest:
    """End one pause, by the epoch that it returned; a stale epoch is refused.

    Example: iop admin resume --epoch 1
    """
    return ResumeRequest(options=call.required_options, pause_epoch=epoch)


@mutation(admin_app, "release", role="admin", selects=True)
def release(
    call: Call,
    kind: Annotated[list[str], typer.Option("--kind", help="weights, kv-cache, graphs.")],
    retention: Annotated[
        str | None, typer.Option("--retention", help="Weights: offload (to host memory) or discard.")
    ] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="Pause first, in this mode.")] = None,
    admission: Admission = "queue",
) -> ReleaseResourcesRequest:
    """Give memory back while paused; the answer has the bytes measured and the epoch that restore needs.

    Example: iop admin release --all --kind kv-cache --mode drain
    """
    words = {"offload": "offload-to-host"}
    return ReleaseResourcesRequest(
        options=call.required_options,
        target=call.required_target,
        kinds=_members(ResourceKind, ["kv-cache" if word == "kv" else word for word in kind], "--kind"),
        weight_retention=(
            None
            if retention is None
            else _member(WeightRetention, words.get(retention, retention), "--retention")
        ),
        pause=None if mode is None else _pause_spec(mode, admission),
    )


@mutation(admin_app, "restore", role="admin", selects=False)
def restore(
    call: Call,
    epoch: Epoch,
    kind: Annotated[list[str], typer.Option("--kind", help="weights, kv-cache, graphs.")],
) -> RestoreResourcesRequest:
    """Take back what was released, by the epoch of the release.

    Example: iop admin restore --epoch 2 --kind kv-cache
    """
    return RestoreResourcesRequest(
        options=call.required_options,
        resource_epoch=epoch,
        kinds=_members(ResourceKind, ["kv-cache" if word == "kv" else word for word in kind], "--kind"),
    )


@mutation(admin_app, "update-weights", role="admin", selects=False)
def update_weights(
    call: Call,
    model: Annotated[str, typer.Option("--model", help="Whose weights.")],
    disk: Annotated[str, typer.Option("--disk", help="Absolute path that every participant sees.")],
    version: Annotated[str, typer.Option("--version", help="The label to publish.")],
    fmt: Annotated[
        str, typer.Option("--format", help="safetensors, pytorch, gguf, engine-native.")
    ] = "safetensors",
    cache: Annotated[
        str, typer.Option("--cache", help="Caches of the old weights: flush or keep.")
    ] = "flush",
    mode: Annotated[str | None, typer.Option("--mode", help="Pause for it: drain, abort or keep.")] = None,
    admission: Admission = "queue",
    expected_version: Annotated[
        str | None, typer.Option("--expected-version", help="Refuse if the current label differs.")
    ] = None,
    allow_irreversible: Annotated[
        bool, typer.Option("--allow-irreversible", help="Go on though the old weights cannot be put back.")
    ] = False,
) -> UpdateWeightsRequest:
    """Swap one model's weights on every participant, or on none.

    Example: iop admin update-weights --model tiny --disk /weights/v2 --version v2 --mode drain
    """
    return UpdateWeightsRequest(
        options=call.required_options,
        model=model,
        source=DiskSource(path=disk, format=_member(WeightFormat, fmt, "--format")),
        weight_version=version,
        cache_policy=_member(CachePolicy, cache, "--cache"),
        expected_weight_version=expected_version,
        quiesce=None if mode is None else _pause_spec(mode, admission),
        allow_irreversible=allow_irreversible,
    )


@mutation(admin_app, "profile-start", role="operator", selects=True)
def profile_start(
    call: Call,
    kind: Annotated[list[str], typer.Option("--kind", help="cpu, gpu, memory, scheduler.")],
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=1, help="Stop after so many steps.")
    ] = None,
    max_duration_ms: Annotated[
        int | None, typer.Option("--max-duration-ms", min=1, help="Stop after so long.")
    ] = None,
    label: Annotated[str, typer.Option("--label", help="A name for people.")] = "",
) -> StartProfileRequest:
    """Begin to record a profile; the answer has the id that profile-stop needs.

    Example: iop admin profile-start --all --kind scheduler --max-steps 100
    """
    return StartProfileRequest(
        options=call.required_options,
        target=call.required_target,
        kinds=_members(ProfilerKind, kind, "--kind"),
        max_steps=max_steps,
        max_duration_ms=max_duration_ms,
        label=label,
    )


@mutation(admin_app, "profile-stop", role="operator", selects=False)
def profile_stop(
    call: Call, profile_id: Annotated[str, typer.Argument(help="The profile's id.")]
) -> StopProfileRequest:
    """End a profile and name its files.

    Example: iop admin profile-stop profile-op-1
    """
    return StopProfileRequest(options=call.required_options, profile_id=profile_id)


@mutation(admin_app, "reconfigure", role="admin", selects=True)
def reconfigure(
    call: Call,
    capacity: Annotated[int | None, typer.Option("--capacity", min=0, help="Requests side by side.")] = None,
    long_context_capacity: Annotated[
        int | None, typer.Option("--long-context-capacity", min=0, help="How many may be long.")
    ] = None,
    role: Annotated[str | None, typer.Option("--role", help="aggregated, prefill, decode.")] = None,
    data_parallel_size: Annotated[
        int | None, typer.Option("--data-parallel-size", min=1, help="Replicas.")
    ] = None,
    enabled: Annotated[bool | None, typer.Option("--enabled/--disabled", help="Serve or not.")] = None,
    alias: Annotated[
        list[str] | None, typer.Option("--alias", help="Served names, replacing the old ones.")
    ] = None,
) -> ReconfigureServingRequest:
    """Change serving values, all or none; each field is judged before anything changes.

    Example: iop admin reconfigure --participant gpu-1/main/0 --capacity 4
    """
    wanted = {
        ReconfigurableField.CAPACITY: capacity,
        ReconfigurableField.LONG_CONTEXT_CAPACITY: long_context_capacity,
        ReconfigurableField.ROLE: None if role is None else _member(EngineRole, role, "--role"),
        ReconfigurableField.DATA_PARALLEL_SIZE: data_parallel_size,
        ReconfigurableField.ENABLED: enabled,
        ReconfigurableField.SERVED_ALIASES: None if alias is None else tuple(alias),
    }
    changes = tuple(
        ServingChange(field=field, value=value) for field, value in wanted.items() if value is not None
    )
    if not changes:
        raise InvalidRequest("Say what to change, as in --capacity 4.", reason="NO_CHANGE")
    return ReconfigureServingRequest(
        options=call.required_options, target=call.required_target, changes=changes
    )
