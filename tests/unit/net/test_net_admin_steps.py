"""Every admin record survives the wire, and a drift between the schema and our types shows at once."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from iop.admin import enums, requests, results, steps
from iop.admin.profile import Capabilities, Lacking, ParticipantInfo
from iop.core.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from iop.net.admin_steps import _ARMS, _BYTES_PER_ELEMENT, AdminStepCodec
from iop.pb.iop import runtime_pb2 as pb
from iop.testing import packets as make
from iop.wire import codec
from iop.wire import packets as p
from iop.wire.codec_records import Record

SUBJECT = AdminStepCodec()
SPEC = requests.TensorSpec(name="layer.0", dtype=enums.TensorDtype.FLOAT32, shape=(2, 3))
SCALAR = requests.TensorSpec(name="scale", dtype=enums.TensorDtype.BFLOAT16, shape=())
INLINE = requests.InlineTensorSource(
    tensors=(
        requests.InlineTensor(spec=SPEC, data=bytes(range(24)), sha256=bytes(32)),
        requests.InlineTensor(spec=SCALAR, data=b"ab"),
    )
)
DISK = requests.DiskSource(
    path="/weights",
    format=enums.WeightFormat.SAFETENSORS,
    digests=(requests.FileDigest(name="a", sha256=bytes(32)),),
)
DISTRIBUTED = requests.DistributedSource(
    backend=enums.DistributedBackend.GLOO,
    master_host="trainer",
    master_port=29500,
    world_size=3,
    rank_offset=1,
    group_name="weights",
    tensors=(SPEC, SCALAR),
)
IPC = requests.IpcSource(tensors=(requests.IpcTensor(spec=SPEC, handle=b"h", device=2),))
CHANGES = (
    requests.ServingChange(field=enums.ReconfigurableField.CAPACITY, value=0),
    requests.ServingChange(field=enums.ReconfigurableField.LONG_CONTEXT_CAPACITY, value=3),
    requests.ServingChange(field=enums.ReconfigurableField.ROLE, value=enums.EngineRole.DECODE),
    requests.ServingChange(field=enums.ReconfigurableField.DATA_PARALLEL_SIZE, value=2),
    requests.ServingChange(field=enums.ReconfigurableField.ENABLED, value=False),
    requests.ServingChange(field=enums.ReconfigurableField.SERVED_ALIASES, value=("a", "b")),
)
STEPS: list[steps.Step] = [
    steps.PauseStep(
        pause=requests.PauseSpec(
            mode=enums.PauseMode.DRAIN,
            admission=enums.AdmissionPolicy.QUEUE,
            drain_timeout_ms=0,
            on_drain_timeout=enums.DrainTimeoutAction.ABORT,
        )
    ),
    steps.PauseStep(
        pause=requests.PauseSpec(mode=enums.PauseMode.KEEP, admission=enums.AdmissionPolicy.REJECT)
    ),
    steps.ResumeStep(),
    steps.FlushStep(kinds=tuple(enums.CacheKind), busy_policy=enums.BusyPolicy.PREEMPT),
    steps.ReleaseStep(kinds=(enums.ResourceKind.WEIGHTS,), weight_retention=enums.WeightRetention.DISCARD),
    steps.ReleaseStep(kinds=(enums.ResourceKind.KV_CACHE,)),
    steps.RestoreStep(kinds=(enums.ResourceKind.WEIGHTS,), weight_source=DISK, weight_version="v1"),
    steps.RestoreStep(kinds=(enums.ResourceKind.GRAPHS,)),
    steps.PrepareWeightsStep(model="m", source=INLINE, weight_version="v2", hold_previous=True),
    steps.ApplyWeightsStep(model="m", source=DISTRIBUTED, weight_version="v2", restores_weights=True),
    steps.ApplyWeightsStep(model="m", source=IPC, weight_version="v2"),
    steps.VerifyWeightsStep(model="m", weight_version="v2"),
    steps.CommitWeightsStep(model="m", weight_version="v2"),
    steps.UndoWeightsStep(model="m", previous_source=None, previous_weight_version="v1"),
    steps.UndoWeightsStep(model="m", previous_source=DISK, previous_weight_version="v1"),
    steps.StartProfileStep(profile_id="p", kinds=(enums.ProfilerKind.CPU,), max_steps=0, label="l"),
    steps.StopProfileStep(profile_id="p"),
    steps.JudgeReconfigureStep(changes=CHANGES),
    steps.ReconfigureStep(changes=CHANGES),
]


@pytest.mark.clause("EN-120", "AD-36")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_every_step_survives_the_wire(step: steps.Step) -> None:
    request, payload = SUBJECT.encode_step(step)
    carried = p.OpenStep(step=make.admin_step(request=request))
    _, message = codec.decode(codec.encode(carried))
    assert isinstance(message, p.OpenStep)
    assert SUBJECT.decode_step(message.step.request, payload) == step


@pytest.mark.clause("EN-120")
def test_every_kind_of_step_and_source_is_covered() -> None:
    assert {type(step) for step in STEPS} == set(typing.get_args(steps.Step))
    assert set(_ARMS) == set(typing.get_args(steps.Step)) | set(typing.get_args(requests.WeightSource))
    assert set(_BYTES_PER_ELEMENT) == {dtype.name for dtype in enums.TensorDtype}


@pytest.mark.clause("AD-104")
def test_tensor_bytes_travel_as_payload_however_it_is_cut() -> None:
    step = steps.PrepareWeightsStep(model="m", source=INLINE, weight_version="v")
    request, payload = SUBJECT.encode_step(step)
    whole = b"".join(payload)
    assert whole == bytes(range(24)) + b"ab"
    assert bytes(range(24)) not in request
    assert SUBJECT.decode_step(request, [whole[:5], whole[5:25], whole[25:]]) == step


@pytest.mark.clause("AD-104")
@pytest.mark.parametrize("payload", [b"", bytes(25), bytes(27)])
def test_tensor_bytes_that_do_not_fit_the_shapes_are_refused(payload: bytes) -> None:
    request, _ = SUBJECT.encode_step(steps.PrepareWeightsStep(model="m", source=INLINE, weight_version="v"))
    with pytest.raises(InvalidRequest) as caught:
        SUBJECT.decode_step(request, [payload])
    assert caught.value.reason == "PAYLOAD_SIZE"


def test_payload_for_a_step_without_tensors_is_refused() -> None:
    request, _ = SUBJECT.encode_step(steps.ResumeStep())
    with pytest.raises(InvalidRequest):
        SUBJECT.decode_step(request, [b"x"])


@pytest.mark.clause("EN-120")
@pytest.mark.parametrize("data", [b"", b"\xff", b"\x0a\x02\x08\x00"])
def test_a_request_that_means_nothing_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        SUBJECT.decode_step(data)


@pytest.mark.clause("AD-23", "AD-37")
def test_progress_results_and_read_backs_survive_the_wire() -> None:
    progress = steps.StepProgress(
        participant_id=make_id("rank-0"), phase=enums.ParticipantPhase.APPLYING, done=3, total=9, unit="bytes"
    )
    assert SUBJECT.decode_progress(SUBJECT.encode_progress(progress)) == progress
    outcome = steps.ParticipantOutcome(
        participant_id=make_id("rank-0"),
        error=results.ParticipantError(
            code=next(iter(enums.AdminErrorCode)),
            message="no",
            step=enums.ParticipantPhase.APPLYING,
            retryable=True,
        ),
        changed=False,
        caches=(
            results.CacheResult(
                participant_id=make_id("rank-0"),
                kind=enums.CacheKind.PREFIX,
                outcome=enums.CacheOutcome.CLEARED,
            ),
        ),
        amounts=(
            results.ResourceAmount(
                participant_id=make_id("rank-0"), kind=enums.ResourceKind.WEIGHTS, bytes=1 << 40
            ),
        ),
        changes=(
            results.ChangeResult(
                participant_id=make_id("rank-0"),
                field=enums.ReconfigurableField.ENABLED,
                disposition=enums.ChangeDisposition.APPLIED,
                effective_value="true",
            ),
        ),
        artifacts=(
            results.ProfileArtifact(
                participant_id=make_id("rank-0"),
                kind=enums.ProfilerKind.CPU,
                uri="artifact:1",
                media_type="text/plain",
                size_bytes=5,
                sha256=bytes(32),
            ),
        ),
        weight_version="v",
        content_digest=b"d",
        verified_by=enums.VerificationMethod.DIGEST,
    )
    result = steps.StepResult(
        participants=(outcome,), work=steps.WorkCounts(drained=1, aborted=2, kept=3, resumed=4)
    )
    assert SUBJECT.decode_result(SUBJECT.encode_result(result)) == result


@pytest.mark.clause("AD-37")
def test_what_could_not_be_told_is_not_taken_for_no() -> None:
    unknown = steps.ParticipantReadBack(participant_id=make_id("rank-0"))
    known = dataclasses.replace(
        unknown,
        reachable=False,
        instance="i",
        paused=False,
        frozen=2,
        released=frozenset(),
        cached=((enums.CacheKind.PREFIX, 0),),
        weight_version="",
        profiles=frozenset(),
        serving=(
            (enums.ReconfigurableField.ROLE, enums.EngineRole.PREFILL),
            (enums.ReconfigurableField.CAPACITY, 0),
        ),
    )
    for read_back in (unknown, known):
        assert SUBJECT.decode_read_back(SUBJECT.encode_read_back(read_back)) == read_back


@pytest.mark.clause("AD-15")
def test_participants_survive_the_wire_with_every_capability() -> None:
    sets: dict[str, typing.Any] = {}
    for field in dataclasses.fields(Capabilities):
        hint = typing.get_type_hints(Capabilities)[field.name]
        if typing.get_origin(hint) is frozenset:
            sets[field.name] = frozenset(typing.get_args(hint)[0])
    everything = Capabilities(**sets, holds_previous_weights=True, capacity_max=0, data_parallel_size_max=4)
    for capabilities in (Capabilities(), everything):
        info = ParticipantInfo(
            participant_id=make_id("rank-0"),
            group_id=make_id("engine"),
            capabilities=capabilities,
            models=("m",),
            aliases=(("a", "m"),),
            connected=False,
            startup_source=DISK,
            rank=0,
            lacking=(Lacking(operation=enums.AdminOperationKind.FLUSH_CACHES, how="start it so"),),
        )
        assert SUBJECT.decode_info(SUBJECT.encode_info(info)) == info


def make_id(text: str) -> typing.Any:
    return text


def test_a_class_that_does_not_fit_its_message_is_refused_when_it_is_joined() -> None:
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Drifted:
        participant_id: str
        not_on_the_wire: int = 0

    with pytest.raises(TypeError, match="not_on_the_wire"):
        Record(Drifted, pb.AdminStepProgress)


def test_a_record_that_is_no_message_is_our_own_mistake() -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode(p.OpenStep(step=make.admin_step(request=b"\xff\xff")))
