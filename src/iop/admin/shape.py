"""The shape of requests: everything that can be refused without looking at the fleet (AD-10, AD-11). Pure.

Enum numbers are already members here: the codec refuses UNSPECIFIED and unknown ones. Unknown protobuf fields are the
surface's to refuse too (AD-16).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, assert_never

from iop.admin.enums import PauseMode, ResourceKind, TensorDtype
from iop.admin.profile import AdminLimits
from iop.admin.requests import (
    AllTargets,
    DiskSource,
    DistributedSource,
    FlushCachesRequest,
    InlineTensorSource,
    IpcSource,
    ModelTargets,
    MutationOptions,
    MutationRequest,
    ParticipantTargets,
    PauseRequest,
    PauseSpec,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    StartProfileRequest,
    StopProfileRequest,
    Target,
    TensorSpec,
    UpdateWeightsRequest,
    WeightSource,
)
from iop.core.errors import InvalidRequest

__all__ = ["DTYPE_BYTES", "REASON_BYTES_MAX", "check_shape"]

REASON_BYTES_MAX: Final = 1024
"""Longest free text of a caller; it goes into every copy of the operation."""

LABEL_BYTES_MAX: Final = 128
"""Longest name of a model or profile, profile label and weight version; headers and metrics carry some of them."""

PATH_BYTES_MAX: Final = 4096
"""Longest path or file name; no file system takes a longer one."""

DIMENSIONS_MAX: Final = 16
"""Most dimensions of a tensor; bounds the size of the number that their product is."""

NAMES_MAX: Final = 65_536
"""Most names in one selector or list; bounds the work that one refusal costs."""

DTYPE_BYTES: Final = {
    TensorDtype.FLOAT32: 4,
    TensorDtype.FLOAT16: 2,
    TensorDtype.BFLOAT16: 2,
    TensorDtype.FLOAT8_E4M3: 1,
    TensorDtype.FLOAT8_E5M2: 1,
    TensorDtype.INT8: 1,
    TensorDtype.UINT8: 1,
    TensorDtype.INT32: 4,
    TensorDtype.INT64: 8,
}


def _fail(field: str, fix: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {fix}", reason="INVALID_FIELD", details={"field": field})


def check_shape(request: MutationRequest, limits: AdminLimits) -> None:
    """Refuse a request that is malformed whatever the fleet is like.

    Raises:
        InvalidRequest: INVALID_FIELD, naming the field and the fix.
    """
    _check_options(request.options, limits)
    match request:
        case FlushCachesRequest():
            _check_target(request.target)
            _check_set("kinds", request.kinds)
        case PauseRequest():
            _check_target(request.target)
            _check_pause("pause", request.pause)
        case ResumeRequest():
            _check_positive("pause_epoch", request.pause_epoch)
        case ReleaseResourcesRequest():
            _check_release(request)
        case RestoreResourcesRequest():
            _check_positive("resource_epoch", request.resource_epoch)
            _check_set("kinds", request.kinds)
        case UpdateWeightsRequest():
            _check_update(request, limits)
        case StartProfileRequest():
            _check_start_profile(request)
        case StopProfileRequest():
            _check_text("profile_id", request.profile_id)
        case ReconfigureServingRequest():
            _check_target(request.target)
            _check_reconfigure(request)
        case _:
            assert_never(request)


def _check_options(options: MutationOptions, limits: AdminLimits) -> None:
    key = options.idempotency_key
    # A dry run journals nothing and ignores keys (AD-105), so it needs none.
    if not options.validate_only or key:
        if not key:
            raise _fail("options.idempotency_key", "required; give every mutation a key of its own")
        if len(key) > limits.max_idempotency_key_bytes:
            raise _fail("options.idempotency_key", f"at most {limits.max_idempotency_key_bytes} bytes")
        if not all(" " <= c <= "~" for c in key):
            raise _fail("options.idempotency_key", "printable ASCII only")
    if options.deadline_ms is not None and not 0 < options.deadline_ms <= limits.max_deadline_ms:
        raise _fail("options.deadline_ms", f"between 1 and {limits.max_deadline_ms}")
    if options.expected_revision is not None and options.expected_revision < 0:
        raise _fail("options.expected_revision", "not negative")
    if len(options.reason.encode()) > REASON_BYTES_MAX:
        raise _fail("options.reason", f"at most {REASON_BYTES_MAX} bytes")


def _check_target(target: Target | None) -> None:
    match target:
        case AllTargets():
            return
        case ModelTargets():
            _check_names("target.models", target.models)
        case ParticipantTargets():
            _check_names("target.participants", target.participant_ids)
        case None:
            raise _fail("target", "required; say all, models or participants")
        case _:
            assert_never(target)


def _check_names(field: str, names: Sequence[str]) -> None:
    _check_set(field, names)
    if any(not name for name in names):
        raise _fail(field, "no empty name")


def _check_set(field: str, values: Sequence[object]) -> None:
    if not values:
        raise _fail(field, "must not be empty")
    if len(values) > NAMES_MAX:
        raise _fail(field, f"at most {NAMES_MAX} entries")
    if len(set(values)) != len(values):
        raise _fail(field, "no duplicates")


def _check_positive(field: str, value: int) -> None:
    if value <= 0:
        raise _fail(field, "required, not zero")


def _check_text(field: str, text: str) -> None:
    if not text:
        raise _fail(field, "required")
    if len(text.encode()) > LABEL_BYTES_MAX:
        raise _fail(field, f"at most {LABEL_BYTES_MAX} bytes")


def _check_label(field: str, text: str) -> None:
    """A text that goes into HTTP headers and gRPC metadata as it is (AD-33)."""
    _check_text(field, text)
    if not all(" " <= c <= "~" for c in text) or text != text.strip():
        raise _fail(field, "printable ASCII only, no blanks around it")


def _check_path(field: str, path: str) -> None:
    if "\0" in path or len(path.encode()) > PATH_BYTES_MAX:
        raise _fail(field, f"at most {PATH_BYTES_MAX} bytes, none of them zero")


def _check_pause(field: str, pause: PauseSpec | None) -> None:
    if pause is None:
        raise _fail(field, "required")
    has_timeout = pause.drain_timeout_ms is not None
    if has_timeout and pause.mode is not PauseMode.DRAIN:
        raise _fail(f"{field}.drain_timeout_ms", "only with mode DRAIN")
    if has_timeout and pause.on_drain_timeout is None:
        raise _fail(f"{field}.on_drain_timeout", "required with drain_timeout_ms")
    if not has_timeout and pause.on_drain_timeout is not None:
        raise _fail(f"{field}.on_drain_timeout", "only with drain_timeout_ms")


def _check_release(request: ReleaseResourcesRequest) -> None:
    _check_target(request.target)
    _check_set("kinds", request.kinds)
    has_weights = ResourceKind.WEIGHTS in request.kinds
    if has_weights and request.weight_retention is None:
        raise _fail("weight_retention", "required when kinds hold WEIGHTS")
    if not has_weights and request.weight_retention is not None:
        raise _fail("weight_retention", "only when kinds hold WEIGHTS")
    if request.pause is not None:
        _check_pause("pause", request.pause)


def _check_start_profile(request: StartProfileRequest) -> None:
    _check_target(request.target)
    _check_set("kinds", request.kinds)
    if len(request.label.encode()) > LABEL_BYTES_MAX:
        raise _fail("label", f"at most {LABEL_BYTES_MAX} bytes")
    if request.max_steps is not None:
        _check_positive("max_steps", request.max_steps)
    if request.max_duration_ms is not None:
        _check_positive("max_duration_ms", request.max_duration_ms)


def _check_reconfigure(request: ReconfigureServingRequest) -> None:
    _check_set("changes", [change.field for change in request.changes])
    for change in request.changes:
        if isinstance(change.value, tuple) and change.value:  # an empty list says: no further name
            _check_names(f"changes.{change.field.name.lower()}", change.value)


def _check_update(request: UpdateWeightsRequest, limits: AdminLimits) -> None:
    _check_text("model", request.model)
    _check_label("weight_version", request.weight_version)
    if request.quiesce is not None:
        _check_pause("quiesce", request.quiesce)
    _check_source(request.source, limits)


def _check_source(source: WeightSource, limits: AdminLimits) -> None:
    match source:
        case DiskSource():
            if not source.path.startswith("/"):
                raise _fail("disk.path", "absolute, and visible to every participant")
            _check_path("disk.path", source.path)
            for digest in source.digests:
                _check_digest("disk.digests", digest.sha256)
                _check_path("disk.digests", digest.name)
                if not digest.name or digest.name.startswith("/") or ".." in digest.name.split("/"):
                    raise _fail("disk.digests", "names are relative to the path")
            if len({d.name for d in source.digests}) != len(source.digests):
                raise _fail("disk.digests", "no duplicates")
        case InlineTensorSource():
            _check_inline(source, limits)
        case DistributedSource():
            _check_distributed(source)
        case IpcSource():
            _check_tensors("ipc.tensors", [t.spec for t in source.tensors])
            if any(not t.handle for t in source.tensors):
                raise _fail("ipc.tensors.handle", "required")
        case _:
            assert_never(source)


def _check_digest(field: str, digest: bytes) -> None:
    if len(digest) != 32:
        raise _fail(field, "a SHA-256 has 32 bytes")


def _check_tensors(field: str, specs: Sequence[TensorSpec]) -> None:
    _check_names(field, [spec.name for spec in specs])
    if any(len(spec.shape) > DIMENSIONS_MAX for spec in specs):
        raise _fail(f"{field}.shape", f"at most {DIMENSIONS_MAX} dimensions")


def _check_inline(source: InlineTensorSource, limits: AdminLimits) -> None:
    _check_tensors("inline_tensors.tensors", [t.spec for t in source.tensors])
    total = 0
    for tensor in source.tensors:
        expected = math.prod(tensor.spec.shape) * DTYPE_BYTES[tensor.spec.dtype]
        if len(tensor.data) != expected:
            raise _fail("inline_tensors.tensors.data", f"{tensor.spec.name!r} needs {expected} bytes")
        if tensor.sha256:
            _check_digest("inline_tensors.tensors.sha256", tensor.sha256)
        total += len(tensor.data)
    if total > limits.max_inline_tensor_bytes:
        raise _fail("inline_tensors", f"at most {limits.max_inline_tensor_bytes} bytes in all")


def _check_distributed(source: DistributedSource) -> None:
    _check_tensors("distributed.tensors", source.tensors)
    _check_text("distributed.master_host", source.master_host)
    _check_text("distributed.group_name", source.group_name)
    if not 0 < source.master_port < 65_536:
        raise _fail("distributed.master_port", "between 1 and 65535")
    if source.world_size < 1 or source.rank_offset >= source.world_size:
        raise _fail("distributed.rank_offset", "below world_size")
