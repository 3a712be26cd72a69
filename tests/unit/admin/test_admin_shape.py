"""The shape of requests, on both sides of every boundary (AD-10, AD-11)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from admin_requests import (
    DRAIN,
    flush,
    pause,
    reconfigure,
    release,
    restore,
    resume,
    start_profile,
    stop_profile,
    update,
)

from iop.admin.enums import (
    CacheKind,
    DrainTimeoutAction,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    TensorDtype,
    WeightFormat,
    WeightRetention,
)
from iop.admin.profile import AdminLimits
from iop.admin.requests import (
    DiskSource,
    FileDigest,
    InlineTensor,
    InlineTensorSource,
    ModelTargets,
    MutationRequest,
    ParticipantTargets,
    ServingChange,
    TensorSpec,
)
from iop.admin.shape import check_shape
from iop.core.errors import InvalidRequest

LIMITS = AdminLimits(max_inline_tensor_bytes=64)
replace = dataclasses.replace


def tensor(count: int, *, size: int | None = None, name: str = "w") -> InlineTensor:
    spec = TensorSpec(name=name, dtype=TensorDtype.FLOAT32, shape=(count,))
    return InlineTensor(spec=spec, data=bytes(4 * count if size is None else size))


def inline(*tensors: InlineTensor) -> MutationRequest:
    return update("v1", source=InlineTensorSource(tensors=tensors))


def shaped(dimensions: int) -> InlineTensor:
    spec = TensorSpec(name="w", dtype=TensorDtype.FLOAT32, shape=(1,) * dimensions)
    return InlineTensor(spec=spec, data=bytes(4))


def aliases(*names: str) -> MutationRequest:
    change = ServingChange(field=ReconfigurableField.SERVED_ALIASES, value=names)
    return replace(reconfigure(1), changes=(change,))


def disk(path: str, *digests: FileDigest) -> MutationRequest:
    return update("v1", source=DiskSource(path=path, format=WeightFormat.SAFETENSORS, digests=digests))


GOOD: dict[str, Callable[[], MutationRequest]] = {
    "flush": flush,
    "pause": pause,
    "resume": lambda: resume(1),
    "release": lambda: release("r", ResourceKind.WEIGHTS),
    "restore": lambda: restore(1),
    "update": lambda: update("v1"),
    "start": start_profile,
    "stop": lambda: stop_profile("p"),
    "reconfigure": lambda: reconfigure(1),
    "longest key": lambda: flush("k" * 128),
    "every printable key": lambda: flush("".join(map(chr, range(32, 127)))),
    "revision zero": lambda: flush("k", expected_revision=0),
    "largest deadline": lambda: flush("k", deadline_ms=LIMITS.max_deadline_ms),
    "longest reason": lambda: flush("k", reason="r" * 1024),
    "inline at the limit": lambda: inline(tensor(16)),
    "disk with digest": lambda: disk("/w", FileDigest(name="a/b", sha256=bytes(32))),
    "drain with timeout": lambda: pause(
        spec=replace(DRAIN, drain_timeout_ms=0, on_drain_timeout=DrainTimeoutAction.FAIL)
    ),
    "longest path": lambda: disk("/" + "w" * 4095),
    "most dimensions": lambda: inline(shaped(16)),
    "no alias": aliases,
    "aliases": lambda: aliases("a", "b"),
    "no key in a dry run": lambda: flush("", validate_only=True),
}

BAD: dict[str, tuple[Callable[[], MutationRequest], str]] = {
    "no key": (lambda: flush(""), "options.idempotency_key"),
    "long key": (lambda: flush("k" * 129), "options.idempotency_key"),
    "unprintable key": (lambda: flush("a\nb"), "options.idempotency_key"),
    "non-ascii key": (lambda: flush("k\u00e9"), "options.idempotency_key"),
    "deadline zero": (lambda: flush("k", deadline_ms=0), "options.deadline_ms"),
    "long deadline": (
        lambda: flush("k", deadline_ms=LIMITS.max_deadline_ms + 1),
        "options.deadline_ms",
    ),
    "long reason": (lambda: flush("k", reason="\u00e9" * 513), "options.reason"),
    "no target": (lambda: replace(flush(), target=None), "target"),  # type: ignore[arg-type]
    "no models": (lambda: flush(target=ModelTargets(models=())), "target.models"),
    "a model twice": (lambda: flush(target=ModelTargets(models=("m", "m"))), "target.models"),
    "an empty participant": (
        lambda: flush(target=ParticipantTargets(participant_ids=("",))),
        "target.participants",
    ),
    "no kinds": (lambda: replace(flush(), kinds=()), "kinds"),
    "a kind twice": (lambda: replace(flush(), kinds=(CacheKind.PREFIX,) * 2), "kinds"),
    "no pause": (lambda: replace(pause(), pause=None), "pause"),  # type: ignore[arg-type]
    "abort with timeout": (
        lambda: pause(
            spec=replace(
                DRAIN,
                mode=PauseMode.ABORT,
                drain_timeout_ms=1,
                on_drain_timeout=DrainTimeoutAction.FAIL,
            )
        ),
        "pause.drain_timeout_ms",
    ),
    "timeout without action": (
        lambda: pause(spec=replace(DRAIN, drain_timeout_ms=1)),
        "pause.on_drain_timeout",
    ),
    "action without timeout": (
        lambda: pause(spec=replace(DRAIN, on_drain_timeout=DrainTimeoutAction.ABORT)),
        "pause.on_drain_timeout",
    ),
    "epoch zero": (lambda: resume(0), "pause_epoch"),
    "resource epoch zero": (lambda: restore(0), "resource_epoch"),
    "weights without retention": (
        lambda: replace(release("r", ResourceKind.WEIGHTS), weight_retention=None),
        "weight_retention",
    ),
    "retention without weights": (
        lambda: replace(release(), weight_retention=WeightRetention.DISCARD),
        "weight_retention",
    ),
    "no model": (lambda: update("v1", model=""), "model"),
    "no version": (lambda: update("", "k"), "weight_version"),
    "version of two lines": (lambda: update("v\nx: y", "k"), "weight_version"),
    "version beyond ASCII": (lambda: update("v\u00e9", "k"), "weight_version"),
    "version with blanks around it": (lambda: update("v1 ", "k"), "weight_version"),
    "a path with a zero byte": (lambda: disk("/w\0"), "disk.path"),
    "a path that no system takes": (lambda: disk("/" + "w" * 4096), "disk.path"),
    "a digest of no file": (lambda: disk("/w", FileDigest(name="a\0", sha256=bytes(32))), "disk.digests"),
    "too many dimensions": (lambda: inline(shaped(17)), "inline_tensors.tensors.shape"),
    "an alias twice": (lambda: aliases("a", "a"), "changes.served_aliases"),
    "an empty alias": (lambda: aliases(""), "changes.served_aliases"),
    "relative path": (lambda: disk("w"), "disk.path"),
    "short digest": (lambda: disk("/w", FileDigest(name="a", sha256=b"1")), "disk.digests"),
    "escaping digest": (
        lambda: disk("/w", FileDigest(name="../a", sha256=bytes(32))),
        "disk.digests",
    ),
    "no tensors": (inline, "inline_tensors.tensors"),
    "short tensor": (lambda: inline(tensor(2, size=7)), "inline_tensors.tensors.data"),
    "too many bytes": (lambda: inline(tensor(17)), "inline_tensors"),
    "a tensor twice": (lambda: inline(tensor(1), tensor(1)), "inline_tensors.tensors"),
    "no profilers": (lambda: replace(start_profile(), kinds=()), "kinds"),
    "zero steps": (lambda: replace(start_profile(), max_steps=0), "max_steps"),
    "long label": (lambda: replace(start_profile(), label="l" * 129), "label"),
    "no profile": (lambda: stop_profile(""), "profile_id"),
    "no changes": (lambda: replace(reconfigure(1), changes=()), "changes"),
    "a change twice": (
        lambda: replace(reconfigure(1), changes=reconfigure(1).changes * 2),
        "changes",
    ),
}


@pytest.mark.clause("AD-10", "AD-11")
@pytest.mark.parametrize("name", GOOD)
def test_a_well_formed_request_passes(name: str) -> None:
    check_shape(GOOD[name](), LIMITS)


@pytest.mark.clause("AD-10", "AD-11")
@pytest.mark.parametrize("name", BAD)
def test_a_malformed_request_names_its_field(name: str) -> None:
    make, field = BAD[name]
    with pytest.raises(InvalidRequest) as refusal:
        check_shape(make(), LIMITS)
    assert refusal.value.details["field"] == field
    assert refusal.value.reason == "INVALID_FIELD"


def test_each_profiler_kind_is_a_value() -> None:
    check_shape(replace(start_profile(), kinds=tuple(ProfilerKind)), LIMITS)
