from __future__ import annotations

import pytest

from iop.core.errors import RemoteProtocolError
from iop.pb.iop import runtime_pb2 as pb
from iop.testing import packets as make
from iop.wire import codec
from iop.wire import messages as m
from iop.wire import packets as p

SAMPLES: list[p.Message] = [
    make.register_request(clock_unix_nanos=5),
    make.register_response(retry_after_ms=7, protocol_version_min=1, protocol_version_max=3),
    m.RegisterResponse(accepted=False, reason="no", reason_code="bad_token"),
    make.ready_request(adapters=(m.AdapterStatus(name="a", started=False, reason="no engine"),)),
    m.ReadyAck(ready=False, reason="stale", reason_code="superseded"),
    p.Heartbeat(sequence=3, clock_unix_nanos=1 << 60),
    p.Goodbye(reason_code="shutdown", reason="bye"),
    p.OpenTunnel(request=make.tunnel_request(metadata={"k": "v"}, long_context=True), body=b"{}"),
    p.OpenTunnel(request=make.tunnel_request(), body_continues=True, body_bytes_total=1 << 28),
    p.OpenRun(request=make.run_request(workspace="/w", traceparent="00-1", session_id="s")),
    p.RunFrame(
        run_id="r", sequence=1, event=m.RunEvent(type=m.RunEventType.START, metadata={"weight_version": "v"})
    ),
    p.RunFrame(
        run_id="r", sequence=2, event=m.RunEvent(type=m.RunEventType.DELTA, delta="hé", output_index=2)
    ),
    p.RunFrame(
        run_id="r",
        sequence=3,
        event=m.RunEvent(
            type=m.RunEventType.COMPLETE,
            finish_reasons=("stop", ""),
            usage=m.Usage(prompt_tokens=0, completion_tokens=4),
        ),
    ),
    p.RunFrame(
        run_id="r",
        sequence=4,
        event=m.RunEvent(type=m.RunEventType.ERROR, error=m.StreamError(code="busy", before_start=True)),
    ),
    p.BodyChunk(stream_id="r", offset=70_000, data=b"x", last=True),
    p.TunnelFrame(
        run_id="r",
        kind=p.FrameKind.RESPONSE_START,
        sequence=1,
        status=200,
        headers=((b"X-A", b"\xff"), (b"X-A", b"2")),
        framing=m.BodyFraming.CHUNKED,
    ),
    p.TunnelFrame(run_id="r", kind=p.FrameKind.USAGE, sequence=9, usage=m.Usage(cached_prompt_tokens=0)),
    p.StreamCredit(stream_id="r", bytes=131072),
    p.Cancel(kind=p.CancelKind.CANCEL_RUN, run_id="r", reason_code="client_gone", at_safe_point=True),
    m.CommandRequest(type=m.CommandType.PARTICIPANTS, adapter="a", timeout_ms=5),
    m.CommandResponse(
        type=m.CommandType.PROVIDERS,
        ok=True,
        figures={"runs": "3"},
        providers=(m.ProviderSnapshot(id="a", capacity=4, models=("x",), capabilities={"stream": "true"}),),
    ),
    m.ArtifactRequest(run_id=make.RunId("r"), adapter="a", uri="artifact:1"),
    p.ConfigRefresh(config=make.node_config(config_revision=9)),
    m.RefreshResponse(outcome=m.RefreshOutcome.FAILED, config_revision=8, reason="no"),
    p.OpenStep(step=make.admin_step(), payload_continues=True, payload_bytes_total=12),
    m.AdminStepEvent(operation_id="op", step=2, progress=pb.AdminStepProgress(done=1).SerializeToString()),
    m.AdminStepResult(operation_id="op", step=2, refused_code="stale_step", refused_reason="old"),
    m.ProviderReport(
        participants=(
            m.ParticipantReport(adapter="a", info=pb.ParticipantInfo(group_id="g").SerializeToString()),
        )
    ),
]


@pytest.mark.clause("EN-01")
@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: p.Message) -> None:
    assert codec.decode(codec.encode(message, 77)) == (77, message)


@pytest.mark.clause("EN-01")
def test_every_member_of_the_packet_has_a_message_of_ours() -> None:
    known = {codec.proto_of(codec.encode(message)).WhichOneof("message") for message in SAMPLES}  # type: ignore[attr-defined]
    assert known == {field.name for field in pb.Packet.DESCRIPTOR.oneofs_by_name["message"].fields}


@pytest.mark.clause("EN-51")
def test_operation_is_field_thirteen_of_a_tunnel_request() -> None:
    assert pb.ProviderTunnelRequest.DESCRIPTOR.fields_by_name["operation"].number == 13


@pytest.mark.clause("EN-54")
def test_a_tunnel_request_has_a_body_and_no_builder() -> None:
    names = set(pb.ProviderTunnelRequest.DESCRIPTOR.fields_by_name)
    assert "body" in names
    assert not any("build" in name for name in names)


@pytest.mark.clause("EN-55")
def test_the_protocol_profile_travels_in_the_adapter_config_only() -> None:
    assert "protocol_profile" in pb.OpenAICompatAdapterConfig.DESCRIPTOR.fields_by_name
    assert not any("profile" in name for name in pb.ProviderTunnelRequest.DESCRIPTOR.fields_by_name)


@pytest.mark.clause("EN-16")
def test_the_generation_is_on_no_message() -> None:
    def names(descriptor: object, seen: set[str]) -> set[str]:
        found: set[str] = set()
        for field in descriptor.fields:  # type: ignore[attr-defined]
            found.add(field.name)
            below = field.message_type
            if below is not None and below.full_name not in seen:
                seen.add(below.full_name)
                found |= names(below, seen)
        return found

    assert not any("generation" in name for name in names(pb.Packet.DESCRIPTOR, set()))


@pytest.mark.clause("EN-100")
@pytest.mark.parametrize("data", [b"\xff", b"\x52\x05abc", b"\x0a", b"\x52\x02\x0a\x02"])
def test_undecodable_bytes_are_a_typed_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(data)
    assert caught.value.reason == "UNDECODABLE"


@pytest.mark.clause("EN-100")
def test_an_empty_packet_is_a_typed_error() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        codec.decode(b"")
    assert caught.value.reason == "EMPTY_FRAME"


@pytest.mark.clause("EN-100")
def test_a_member_of_a_newer_peer_is_unknown_and_keeps_its_call_id() -> None:
    newer = pb.Packet(request_id=4).SerializeToString() + b"\xba\x3f\x01x"  # field 1015, one byte
    assert codec.decode(newer) == (4, p.Unknown())


def test_enum_numbers_of_a_newer_peer_become_unspecified_where_we_have_that() -> None:
    data = pb.Packet(
        provider_tunnel_frame=pb.ProviderTunnelFrame(run_id="r", kind=77, sequence=1)  # type: ignore[arg-type]
    ).SerializeToString()
    _, message = codec.decode(data)
    assert isinstance(message, p.TunnelFrame)
    assert message.kind is p.FrameKind.UNSPECIFIED


@pytest.mark.clause("EN-104")
def test_secrets_are_not_in_any_repr() -> None:
    text = (
        repr(make.register_request())
        + repr(make.register_response())
        + repr(m.OpenEngineSettings(admin_token="s3"))
    )
    for secret in ("a-secret-token", "an-engine-key", "s3"):
        assert secret not in text


@pytest.mark.clause("EN-53")
@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 70_000])
@pytest.mark.parametrize("sequence", [1, 127, 128, 1 << 20])
@pytest.mark.parametrize("run_id", ["r", "ü" * 60, "r" * 127, "r" * 128, "r" * 300])
def test_the_short_path_of_body_frames_writes_what_protobuf_writes(
    size: int, sequence: int, run_id: str
) -> None:
    body = bytes(size)
    head = codec.body_frame_head(codec.string_field(0x0A, run_id), sequence, size)
    whole = codec.encode(p.TunnelFrame(run_id=run_id, kind=p.FrameKind.BODY, sequence=sequence, body=body))
    assert head + body == len(whole).to_bytes(4, "big") + whole
    found = codec.read_body_head(whole, 0, len(whole))
    if len(run_id.encode()) <= 127:
        assert found == (run_id.encode(), sequence, len(whole) - size)
    else:
        assert found is None


@pytest.mark.clause("EN-101")
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, 5), (32768, 32768), (1 << 33, 1)])
def test_the_short_path_of_continuation_frames_writes_what_protobuf_writes(
    last: bool, offset: int, size: int
) -> None:
    head, tail = codec.chunk_frame_head_and_tail(codec.string_field(0x0A, "run"), offset, size, last=last)
    whole = codec.encode(p.BodyChunk(stream_id="run", offset=offset, data=bytes(size), last=last))
    assert head + bytes(size) + tail == len(whole).to_bytes(4, "big") + whole


@pytest.mark.clause("EN-52")
def test_the_short_path_of_an_end_writes_what_protobuf_writes() -> None:
    whole = codec.encode(p.TunnelFrame(run_id="run", kind=p.FrameKind.END, sequence=300))
    assert codec.read_body_head(whole, 0, len(whole)) == (b"run", 300, len(whole))
    assert codec.end_frame(codec.string_field(0x0A, "run"), 300) == len(whole).to_bytes(4, "big") + whole


def test_only_plain_body_and_end_frames_are_read_on_the_short_path() -> None:
    others = [message for message in SAMPLES if not isinstance(message, p.Heartbeat)]
    for message in others:
        data = codec.encode(message)
        assert codec.read_body_head(data, 0, len(data)) is None
    empty_body = codec.encode(p.TunnelFrame(run_id="run-1", kind=p.FrameKind.BODY, sequence=1))
    assert codec.read_body_head(empty_body, 0, len(empty_body)) is None
