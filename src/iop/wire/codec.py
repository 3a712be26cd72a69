"""Packets to and from protobuf bytes. The only place where the wire meets the generated bindings.

BODY frames are most of what ever travels, so they have a path of their own in both directions: what is constant for a
stream is encoded once, and what is received is compared with what was to be expected next. Both are byte-equal to
protobuf's own output, and whatever does not look exactly so takes the general path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from iop.core.errors import RemoteProtocolError
from iop.core.ids import RunId
from iop.pb.iop import runtime_pb2 as pb
from iop.wire import messages as m
from iop.wire import packets as p
from iop.wire.codec_records import Record

_ARMS: Final = {
    m.OpenAICompatSettings: "openai_compat",
    m.OpenEngineSettings: "openengine",
    m.CliSettings: "cli",
    m.OllamaSettings: "ollama",
}

_STREAM_ERROR: Final = Record(m.StreamError, pb.StreamError)
_USAGE: Final = Record(m.Usage, pb.RunUsage)
_RUN_REQUEST: Final = Record(m.RunRequest, pb.RunRequest)
_RUN_EVENT: Final = Record(m.RunEvent, pb.RunEvent)
_ADMIN_STEP: Final = Record(m.AdminStep, pb.AdminStep)
_CONFIG: Final = Record(m.NodeConfig, pb.NodeConfigPayload, arms=_ARMS)

_PLAIN: Final[tuple[tuple[str, Record[Any], type], ...]] = tuple(
    (field, Record(cls, message, arms=_ARMS), cls)
    for field, cls, message in (
        ("register_request", m.RegisterRequest, pb.RegisterRequest),
        ("register_response", m.RegisterResponse, pb.RegisterResponse),
        ("node_ready_request", m.ReadyRequest, pb.NodeReadyRequest),
        ("node_ready_response", m.ReadyAck, pb.NodeReadyResponse),
        ("heartbeat", p.Heartbeat, pb.Heartbeat),
        ("goodbye", p.Goodbye, pb.Goodbye),
        ("body_chunk", p.BodyChunk, pb.BodyChunk),
        ("stream_credit", p.StreamCredit, pb.StreamCredit),
        ("cancel_request", p.Cancel, pb.CancelRequest),
        ("node_command_request", m.CommandRequest, pb.NodeCommandRequest),
        ("node_command_response", m.CommandResponse, pb.NodeCommandResponse),
        ("artifact_request", m.ArtifactRequest, pb.ArtifactRequest),
        ("node_config_refresh_request", p.ConfigRefresh, pb.NodeConfigRefreshRequest),
        ("node_config_refresh_response", m.RefreshResponse, pb.NodeConfigRefreshResponse),
        ("admin_step_event", m.AdminStepEvent, pb.AdminStepEvent),
        ("admin_step_result", m.AdminStepResult, pb.AdminStepResult),
        ("provider_report", m.ProviderReport, pb.ProviderReport),
    )
)

_KINDS: Final = {int(kind): kind for kind in p.FrameKind}
_FRAMINGS: Final = {int(framing): framing for framing in m.BodyFraming}

_WRITE: Final[dict[type, tuple[str, Callable[[Any, Any], None]]]] = {
    cls: (field, record.fill) for field, record, cls in _PLAIN
}
_READ: Final[dict[str, Callable[[Any], p.Message]]] = {field: record.read for field, record, _ in _PLAIN}


def _writes(field: str, cls: type) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    def register(fill: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        _WRITE[cls] = field, fill
        return fill

    return register


def _reads(field: str) -> Callable[[Callable[[Any], p.Message]], Callable[[Any], p.Message]]:
    def register(read: Callable[[Any], p.Message]) -> Callable[[Any], p.Message]:
        _READ[field] = read
        return read

    return register


def encode(message: p.Message, request_id: int = 0) -> bytes:
    """One packet's bytes, without its frame header."""
    packet = pb.Packet(request_id=request_id)
    field, fill = _WRITE[type(message)]
    below = getattr(packet, field)
    below.SetInParent()
    fill(below, message)
    return packet.SerializeToString()


def decode(payload: bytes | memoryview) -> tuple[int, p.Message]:
    """The call id and the message of one packet.

    Raises:
        RemoteProtocolError: ``EMPTY_FRAME`` or ``UNDECODABLE``; never anything else, whatever the bytes.
    """
    if not payload:
        raise RemoteProtocolError("A frame without content arrived.", reason="EMPTY_FRAME")
    try:
        packet = pb.Packet.FromString(payload)  # type: ignore[arg-type]  # takes any bytes-like
    except (DecodeError, RecursionError) as exc:
        raise RemoteProtocolError("A frame could not be decoded.", reason="UNDECODABLE") from exc
    field = packet.WhichOneof("message")
    if field is None:
        return packet.request_id, p.Unknown()
    return packet.request_id, _READ[field](getattr(packet, field))


# Tunnel requests and response starts are written out field by field: they are on the path of every request, and the
# general records cost three times as much.


@_writes("provider_tunnel_request", p.OpenTunnel)
def _fill_open_tunnel(message: pb.ProviderTunnelRequest, value: p.OpenTunnel) -> None:
    request = value.request
    message.run_id = request.run_id
    message.adapter = request.adapter
    message.target = request.target
    message.method = request.method
    message.path = request.path
    add_header = message.headers.add
    for name, content in request.headers:
        add_header(name=name, value=content)
    message.body = value.body
    message.stream = request.stream
    message.timeout_sec = request.timeout_sec
    if request.metadata:
        message.metadata.update(request.metadata)
    message.session_id = request.session_id
    message.long_context = request.long_context
    message.operation = request.operation
    if value.body_continues:
        message.body_continues = True
    message.body_bytes_total = value.body_bytes_total


@_reads("provider_tunnel_request")
def _read_open_tunnel(message: pb.ProviderTunnelRequest) -> p.OpenTunnel:
    request = m.TunnelRequest(
        run_id=RunId(message.run_id),
        adapter=message.adapter,
        target=message.target,
        operation=message.operation,
        method=message.method,
        path=message.path,
        headers=tuple([(header.name, header.value) for header in message.headers]),
        stream=message.stream,
        timeout_sec=message.timeout_sec,
        metadata=dict(message.metadata),
        session_id=message.session_id,
        long_context=message.long_context,
    )
    return p.OpenTunnel(
        request=request,
        body=message.body,
        body_continues=message.body_continues,
        body_bytes_total=message.body_bytes_total,
    )


@_writes("provider_tunnel_frame", p.TunnelFrame)
def _fill_tunnel_frame(message: pb.ProviderTunnelFrame, value: p.TunnelFrame) -> None:
    message.run_id = value.run_id
    message.kind = value.kind  # type: ignore[assignment]  # an IntEnum of the same numbers
    message.sequence = value.sequence
    if value.status:
        message.status = value.status
    add_header = message.headers.add
    for name, content in value.headers:
        add_header(name=name, value=content)
    if value.framing:
        message.framing = value.framing  # type: ignore[assignment]  # as above
    message.body = value.body
    if value.error is not None:
        message.error.SetInParent()
        _STREAM_ERROR.fill(message.error, value.error)
    if value.usage is not None:
        message.usage.SetInParent()
        _USAGE.fill(message.usage, value.usage)


@_reads("provider_tunnel_frame")
def _read_tunnel_frame(message: pb.ProviderTunnelFrame) -> p.TunnelFrame:
    kind = _KINDS.get(message.kind, p.FrameKind.UNSPECIFIED)
    return p.TunnelFrame(
        run_id=message.run_id,
        kind=kind,
        sequence=message.sequence,
        status=message.status,
        headers=tuple([(header.name, header.value) for header in message.headers]),
        body=message.body,
        error=_STREAM_ERROR.read(message.error) if message.HasField("error") else None,
        usage=_USAGE.read(message.usage) if message.HasField("usage") else None,
        framing=_FRAMINGS.get(message.framing, m.BodyFraming.UNSPECIFIED),
    )


@_writes("run_request", p.OpenRun)
def _fill_open_run(message: pb.RunRequest, value: p.OpenRun) -> None:
    _RUN_REQUEST.fill(message, value.request)
    message.input_continues = value.input_continues
    message.input_bytes_total = value.input_bytes_total


@_reads("run_request")
def _read_open_run(message: pb.RunRequest) -> p.OpenRun:
    return p.OpenRun(
        request=_RUN_REQUEST.read(message),
        input_continues=message.input_continues,
        input_bytes_total=message.input_bytes_total,
    )


@_writes("admin_step", p.OpenStep)
def _fill_open_step(message: pb.AdminStep, value: p.OpenStep) -> None:
    _ADMIN_STEP.fill(message, value.step)
    message.payload_continues = value.payload_continues
    message.payload_bytes_total = value.payload_bytes_total


@_reads("admin_step")
def _read_open_step(message: pb.AdminStep) -> p.OpenStep:
    return p.OpenStep(
        step=_ADMIN_STEP.read(message),
        payload_continues=message.payload_continues,
        payload_bytes_total=message.payload_bytes_total,
    )


@_writes("run_event", p.RunFrame)
def _fill_run_frame(message: pb.RunEvent, value: p.RunFrame) -> None:
    message.run_id = value.run_id
    message.sequence = value.sequence
    event = value.event
    if event.type is m.RunEventType.DELTA:
        # Deltas are most of a run; the general path looks at eight fields to find two.
        message.type = pb.RUN_EVENT_TYPE_DELTA
        message.delta = event.delta
        message.output_index = event.output_index
        message.reasoning_delta = event.reasoning_delta
        if event.metadata:
            message.metadata.update(event.metadata)
    else:
        _RUN_EVENT.fill(message, event)


@_reads("run_event")
def _read_run_frame(message: pb.RunEvent) -> p.RunFrame:
    if message.type == pb.RUN_EVENT_TYPE_DELTA:
        delta = m.RunEvent(
            type=m.RunEventType.DELTA,
            delta=message.delta,
            output_index=message.output_index,
            reasoning_delta=message.reasoning_delta,
            metadata=dict(message.metadata),
        )
        return p.RunFrame(run_id=message.run_id, sequence=message.sequence, event=delta)
    return p.RunFrame(run_id=message.run_id, sequence=message.sequence, event=_RUN_EVENT.read(message))


# ---- the path of BODY frames ----

_PACKET_TUNNEL_FRAME: Final = b"\x82\x02"  # key of Packet.provider_tunnel_frame
_PACKET_BODY_CHUNK: Final = b"\xfa\x01"  # key of Packet.body_chunk
_KIND_BODY_SEQUENCE: Final = b"\x10\x02\x18"  # kind = BODY, then the key of sequence
_KIND_END_SEQUENCE: Final = b"\x10\x03\x18"
_KEY_BODY: Final = b"\x32"
_RUN_ID_BYTES_MAX: Final = 127  # longer ones take the general path: their length needs two bytes


def varint(value: int) -> bytes:
    """Protobuf's base-128 form of a number that is not negative."""
    if value < _KNOWN_VARINTS:
        return _VARINTS[value]
    return _make_varint(value)


def _make_varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_KNOWN_VARINTS: Final = 1024
_VARINTS: Final = tuple(_make_varint(value) for value in range(_KNOWN_VARINTS))
"""Sizes and sequences of small frames: three of them stand in each. More would be memory for less."""


def string_field(key: int, text: str) -> bytes:
    """A string field whole; nothing for an empty string, as proto3 has it."""
    data = text.encode()
    return bytes((key,)) + varint(len(data)) + data if data else b""


def body_frame_head(stream_prefix: bytes, sequence: int, body_bytes: int) -> bytes:
    """Frame header and all of a BODY packet up to its body bytes.

    Args:
        stream_prefix: :func:`string_field` of the run id with key 0x0A, kept by the stream.
        sequence: of the frame.
        body_bytes: how many follow; more than zero.
    """
    inner = stream_prefix + _KIND_BODY_SEQUENCE + varint(sequence) + _KEY_BODY + varint(body_bytes)
    packet = _PACKET_TUNNEL_FRAME + varint(len(inner) + body_bytes) + inner
    return (len(packet) + body_bytes).to_bytes(4, "big") + packet


def end_frame(stream_prefix: bytes, sequence: int) -> bytes:
    """An END packet whole, frame header included; ``stream_prefix`` as in :func:`body_frame_head`."""
    inner = stream_prefix + _KIND_END_SEQUENCE + varint(sequence)
    packet = _PACKET_TUNNEL_FRAME + varint(len(inner)) + inner
    return len(packet).to_bytes(4, "big") + packet


def chunk_frame_head_and_tail(
    stream_prefix: bytes, offset: int, data_bytes: int, *, last: bool
) -> tuple[bytes, bytes]:
    """What stands before and behind the data of a continuation frame, frame header included."""
    tail = b"\x20\x01" if last else b""
    inner = stream_prefix
    if offset:
        inner += b"\x10" + varint(offset)
    if data_bytes:
        inner += b"\x1a" + varint(data_bytes)
    below = len(inner) + data_bytes + len(tail)
    packet = _PACKET_BODY_CHUNK + varint(below) + inner
    return (len(packet) + data_bytes + len(tail)).to_bytes(4, "big") + packet, tail


def read_body_head(payload: bytes | memoryview, start: int, end: int) -> tuple[bytes, int, int] | None:
    """Look whether a packet is a plain BODY or END frame.

    Returns:
        Run id (UTF-8), sequence and where its body starts (it runs to ``end``; an END has none and starts there).
        None: take the general path.
    """
    if end - start < 12 or payload[start] != 0x82 or payload[start + 1] != 0x02:
        return None
    at = start + 2
    size = payload[at]
    at += 1
    if size >= 0x80:
        size &= 0x7F
        shift = 7
        while True:
            part = payload[at]
            at += 1
            size |= (part & 0x7F) << shift
            if part < 0x80:
                break
            shift += 7
            if shift > 28:
                return None
    if at + size != end or size < 10 or payload[at] != 0x0A:
        return None
    id_bytes = payload[at + 1]
    at += 2
    id_end = at + id_bytes
    if id_bytes > _RUN_ID_BYTES_MAX or id_end + 4 > end:
        return None
    run_id = bytes(payload[at:id_end])
    kind = payload[id_end + 1]
    if payload[id_end] != 0x10 or kind not in {0x02, 0x03} or payload[id_end + 2] != 0x18:
        return None
    at = id_end + 3
    sequence = shift = 0
    while True:
        if at >= end or shift > 56:
            return None
        part = payload[at]
        at += 1
        sequence |= (part & 0x7F) << shift
        if part < 0x80:
            break
        shift += 7
    if kind == 0x03:
        return (run_id, sequence, at) if at == end else None
    if at >= end or payload[at] != 0x32:
        return None
    at += 1
    size = shift = 0
    while True:
        if at >= end or shift > 28:
            return None
        part = payload[at]
        at += 1
        size |= (part & 0x7F) << shift
        if part < 0x80:
            break
        shift += 7
    return None if at + size != end or not size else (run_id, sequence, at)


def proto_of(payload: bytes) -> ProtoMessage:
    """The parsed packet as protobuf has it; for tests and traces."""
    return pb.Packet.FromString(payload)
