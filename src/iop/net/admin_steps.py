"""Admin records to and from the bytes that the wire carries undecoded (EN-120, AD-36).

Both ends use this one translation: the Edge's participant driver writes requests and reads what comes back, the Node's
step runner does the reverse. ``wire`` knows the messages and ``admin`` the types; here they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from iop.admin import requests, steps
from iop.admin.profile import ParticipantInfo
from iop.core.errors import InvalidRequest
from iop.wire.codec_admin import admin_record
from iop.wire.codec_records import Record

_ARMS: Final[dict[type, str]] = {
    steps.PauseStep: "pause",
    steps.ResumeStep: "resume",
    steps.FlushStep: "flush",
    steps.ReleaseStep: "release",
    steps.RestoreStep: "restore",
    steps.PrepareWeightsStep: "prepare_weights",
    steps.ApplyWeightsStep: "apply_weights",
    steps.VerifyWeightsStep: "verify_weights",
    steps.CommitWeightsStep: "commit_weights",
    steps.UndoWeightsStep: "undo_weights",
    steps.StartProfileStep: "start_profile",
    steps.StopProfileStep: "stop_profile",
    steps.JudgeReconfigureStep: "judge_reconfigure",
    steps.ReconfigureStep: "reconfigure",
    requests.DiskSource: "disk",
    requests.InlineTensorSource: "inline_tensors",
    requests.DistributedSource: "distributed",
    requests.IpcSource: "ipc",
}

_BYTES_PER_ELEMENT: Final = {
    "FLOAT32": 4,
    "FLOAT16": 2,
    "BFLOAT16": 2,
    "FLOAT8_E4M3": 1,
    "FLOAT8_E5M2": 1,
    "INT8": 1,
    "UINT8": 1,
    "INT32": 4,
    "INT64": 8,
}

StepT = TypeVar("StepT")


class AdminStepCodec:
    """Translates every admin record of the wire. Stateless; one per process is enough.

    Tensor bytes of an inline source do not travel inside the request but as the step's payload, in the order of the
    tensors, so that they interleave with everything else on the connection (AD-104).
    """

    def __init__(self) -> None:
        self._step = admin_record("AdminStepRequest", steps.Step, arms=_ARMS)
        self._progress: Record[steps.StepProgress] = admin_record("AdminStepProgress", steps.StepProgress)
        self._result: Record[steps.StepResult] = admin_record("AdminStepOutcome", steps.StepResult)
        self._info: Record[ParticipantInfo] = admin_record("ParticipantInfo", ParticipantInfo, arms=_ARMS)
        self._read_back: Record[steps.ParticipantReadBack] = admin_record(
            "ParticipantReadBack", steps.ParticipantReadBack
        )

    def encode_step(self, step: steps.Step) -> tuple[bytes, Sequence[bytes]]:
        """The request, and the tensor bytes that follow it."""
        bare, payload = _without_tensors(step)
        return self._step.encode(bare), payload

    def decode_step(self, request: bytes, payload: Sequence[bytes] = ()) -> steps.Step:
        """What :meth:`encode_step` made; ``payload`` may be cut in any way.

        Raises:
            RemoteProtocolError: undecodable, or a value that has no meaning here.
            InvalidRequest: the tensor bytes are not those that the request announces.
        """
        return _with_tensors(cast("steps.Step", self._step.decode(request)), b"".join(payload))

    def encode_progress(self, progress: steps.StepProgress) -> bytes:
        """A progress report."""
        return self._progress.encode(progress)

    def decode_progress(self, data: bytes) -> steps.StepProgress:
        """Raises RemoteProtocolError."""
        return self._progress.decode(data)

    def encode_result(self, result: steps.StepResult) -> bytes:
        """A step's result."""
        return self._result.encode(result)

    def decode_result(self, data: bytes) -> steps.StepResult:
        """Raises RemoteProtocolError."""
        return self._result.decode(data)

    def encode_info(self, info: ParticipantInfo) -> bytes:
        """What a participant is."""
        return self._info.encode(info)

    def decode_info(self, data: bytes) -> ParticipantInfo:
        """Raises RemoteProtocolError."""
        return self._info.decode(data)

    def encode_read_back(self, read_back: steps.ParticipantReadBack) -> bytes:
        """How a participant stands."""
        return self._read_back.encode(read_back)

    def decode_read_back(self, data: bytes) -> steps.ParticipantReadBack:
        """Raises RemoteProtocolError."""
        return self._read_back.decode(data)


_SOURCE_FIELDS: Final = ("source", "weight_source", "previous_source")


def _inline_source(step: steps.Step) -> tuple[str, requests.InlineTensorSource] | None:
    for name in _SOURCE_FIELDS:
        source = getattr(step, name, None)
        if isinstance(source, requests.InlineTensorSource):
            return name, source
    return None


def _with_source(step: StepT, name: str, tensors: list[requests.InlineTensor]) -> StepT:
    changes: dict[str, Any] = {name: requests.InlineTensorSource(tensors=tuple(tensors))}
    return cast("StepT", replace(cast("Any", step), **changes))


def _without_tensors(step: steps.Step) -> tuple[steps.Step, list[bytes]]:
    found = _inline_source(step)
    if found is None:
        return step, []
    name, source = found
    bare = _with_source(step, name, [replace(tensor, data=b"") for tensor in source.tensors])
    return bare, [tensor.data for tensor in source.tensors]


def _with_tensors(step: steps.Step, payload: bytes) -> steps.Step:
    found = _inline_source(step)
    if found is None:
        if payload:
            raise InvalidRequest(
                "Tensor bytes came for a step that has no inline tensors.", reason="PAYLOAD_SIZE"
            )
        return step
    name, source = found
    at = 0
    tensors = []
    for tensor in source.tensors:
        size = _size_of(tensor.spec)
        tensors.append(replace(tensor, data=payload[at : at + size]))
        at += size
    if at != len(payload):
        raise InvalidRequest(
            f"The inline tensors have {at} bytes by their shapes; {len(payload)} came.", reason="PAYLOAD_SIZE"
        )
    return _with_source(step, name, tensors)


def _size_of(spec: requests.TensorSpec) -> int:
    size = _BYTES_PER_ELEMENT[spec.dtype.name]
    for length in spec.shape:
        size *= length
    return size
