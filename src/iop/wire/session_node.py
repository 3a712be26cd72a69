"""The Node's side of a session: registers, reports ready, receives streams, calls and steps, sends what they bring."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Final, cast

from iop.core.errors import RemoteProtocolError
from iop.core.limits import KIB
from iop.wire import events
from iop.wire.handshake import HandshakeInput
from iop.wire.messages import (
    AdminStep,
    AdminStepEvent,
    AdminStepResult,
    ArtifactRequest,
    BodyFraming,
    CancelReason,
    CloseReason,
    CommandRequest,
    CommandResponse,
    Header,
    ProviderReport,
    Readiness,
    ReadyAck,
    ReadyRequest,
    RefreshResponse,
    RegisterRequest,
    RegisterResponse,
    RunEvent,
    RunRequest,
    StreamError,
    StreamErrorCode,
    TunnelRequest,
    Usage,
)
from iop.wire.packets import (
    BodyChunk,
    Cancel,
    CancelKind,
    ConfigRefresh,
    OpenRun,
    OpenStep,
    OpenTunnel,
    StreamCredit,
)
from iop.wire.session import READY, Legal, Role, Session, SessionSettings
from iop.wire.stream_node import NodeStream
from iop.wire.streams import StreamKind, step_key

ENDED_RUNS_MAX: Final = 8192
"""Run ids remembered after their end, so that a repeated opening packet has no second effect (EN-108)."""

REPORT_CONTROL_BYTES_MAX: Final = 256 * KIB
"""Reports are droppable (EN-34): with this much control waiting, one more is not queued."""

CALLS_MAX: Final = 1024
"""Commands and refreshes that may wait for our answer at once."""


class NodeSession(Session[NodeStream]):
    """The Edge's connection, as the Node's protocol state."""

    role = Role.NODE

    def __init__(self, *, settings: SessionSettings, now: float) -> None:
        super().__init__(settings=settings, now=now)
        self._finished: list[NodeStream] = []
        self._ended_runs: OrderedDict[bytes, None] = OrderedDict()
        self._calls: dict[int, type] = {}
        self._last_call = 0
        # The Edge is the one that the Node's operator chose to dial; its first answer holds a whole config.
        self._reader.frame_bytes_max = settings.frame_bytes_max
        ready_sent = frozenset({Readiness.READY_SENT, Readiness.READY})
        self._legal.update(
            {
                RegisterResponse: Legal(self._on_register_response, frozenset({Readiness.REGISTERING})),
                ReadyAck: Legal(self._on_ready_ack, ready_sent),
                OpenTunnel: Legal(self._on_open_tunnel, READY),
                OpenRun: Legal(self._on_open_run, READY),
                ArtifactRequest: Legal(self._on_artifact, READY),
                OpenStep: Legal(self._on_step, READY),
                BodyChunk: Legal(self._on_chunk, READY),
                StreamCredit: Legal(self._on_credit, READY),
                Cancel: Legal(self._on_cancel, READY),
                CommandRequest: Legal(self._on_command, READY),
                ConfigRefresh: Legal(self._on_refresh, READY),
            }
        )

    # ---- handshake ----

    def register(self, request: RegisterRequest) -> None:
        """Send the first packet (EN-02). Raises LocalProtocolError for a second one."""
        self._advance(HandshakeInput.REGISTER, is_local=True)
        self._last_call += 1
        self._send(request, self._last_call)

    def send_ready(self, request: ReadyRequest, *, now: float) -> None:
        """Report ready (EN-12); may be repeated. Raises LocalProtocolError before registration."""
        self._advance(HandshakeInput.READY, is_local=True)
        self._last_call += 1
        self._send(request, self._last_call)
        if self._readiness is Readiness.READY_SENT:
            self._handshake_until = now + self.settings.ready_timeout_s
            self._handshake_failure = CloseReason.NOT_READY_IN_TIME

    # ---- answers of streams; each is ignored and counted once the stream has its terminal (EN-57) ----

    def start(
        self, stream: NodeStream, *, status: int, headers: tuple[Header, ...], framing: BodyFraming
    ) -> None:
        """Send RESPONSE_START."""
        if self._may_send(stream):
            stream.start(status=status, headers=headers, framing=framing)
            self._scheduler.wake(stream)

    def send_body(self, stream: NodeStream, data: bytes) -> None:
        """Send body bytes, as credit allows."""
        if self._may_send(stream):
            stream.send_body(data)
            if not stream.is_queued:
                self._scheduler.wake(stream)

    def send_usage(self, stream: NodeStream, usage: Usage) -> None:
        """Send an observation."""
        if self._may_send(stream):
            stream.send_usage(usage)
            self._scheduler.wake(stream)

    def end(self, stream: NodeStream) -> None:
        """Send END."""
        if self._may_send(stream):
            stream.end()
            self._scheduler.wake(stream)

    def fail(self, stream: NodeStream, error: StreamError) -> None:
        """Send ERROR."""
        if self._may_send(stream):
            stream.fail(error)
            self._scheduler.wake(stream)

    def emit(self, stream: NodeStream, event: RunEvent) -> None:
        """Send a run event."""
        if self._may_send(stream):
            stream.emit(event)
            self._scheduler.wake(stream)

    def emit_step(self, stream: NodeStream, event: AdminStepEvent) -> None:
        """Send a step's progress."""
        if self._may_send(stream):
            step = cast("AdminStep", stream.request)
            self._send(replace(event, adapter=step.adapter, group_id=step.group_id))

    def finish_step(self, stream: NodeStream, result: AdminStepResult) -> None:
        """Send a step's one result."""
        if self._may_send(stream):
            stream.is_terminated = True
            self._steps.pop(stream.key, None)
            step = cast("AdminStep", stream.request)
            self._send(replace(result, adapter=step.adapter, group_id=step.group_id))

    # ---- calls and reports ----

    def respond_command(self, call_id: int, response: CommandResponse) -> None:
        """Answer a command once; ignored and counted when it was answered or the session is over."""
        self._respond(call_id, CommandRequest, response)

    def respond_refresh(self, call_id: int, response: RefreshResponse) -> None:
        """Answer a refresh once; ignored and counted when it was answered or the session is over."""
        self._respond(call_id, ConfigRefresh, response)

    def send_report(self, report: ProviderReport) -> bool:
        """Send news if the connection is ready and not behind; returns whether it was queued (EN-34)."""
        if self._readiness is not Readiness.READY or self._scheduler.control_bytes > REPORT_CONTROL_BYTES_MAX:
            return False
        self._send(report)
        return True

    def data_to_send(self, limit: int = 64 * KIB) -> bytes:
        """As the base; streams whose terminal is among the bytes are over with it."""
        data = super().data_to_send(limit)
        if self._finished:
            for stream in self._finished:
                self._forget(stream)
            self._finished.clear()
        return data

    # ---- inside ----

    def _may_send(self, stream: NodeStream) -> bool:
        if stream.is_terminated or self._readiness is Readiness.CLOSED:
            self.counters.late_local_calls += 1
            return False
        return True

    def _respond(self, call_id: int, kind: type, response: CommandResponse | RefreshResponse) -> None:
        if self._readiness is Readiness.CLOSED or self._calls.get(call_id) is not kind:
            self.counters.late_local_calls += 1
            return
        del self._calls[call_id]
        self._send(response, call_id)

    def _forget(self, stream: NodeStream) -> None:
        if self._streams.pop(stream.key, None) is not None:
            self._ended_runs[stream.key] = None
            if len(self._ended_runs) > ENDED_RUNS_MAX:
                self._ended_runs.popitem(last=False)

    def _open(
        self,
        kind: StreamKind,
        stream_id: str,
        request: TunnelRequest | RunRequest | ArtifactRequest | AdminStep,
        inline: bytes,
        *,
        continues: bool,
        total: int,
    ) -> None:
        key = stream_id.encode()
        if not key:
            raise RemoteProtocolError("A stream without an id was opened.", reason="NO_STREAM_ID")
        known = self._steps if kind is StreamKind.STEP else self._streams
        if key in known or (kind is not StreamKind.STEP and key in self._ended_runs):
            self.counters.duplicate_packets += 1
            return
        if self.streams_open >= self.settings.streams_max:
            raise RemoteProtocolError("Too many streams were opened.", reason="TOO_MANY_STREAMS")
        stream = NodeStream(
            kind=kind,
            stream_id=stream_id,
            request=request,
            body_bytes_total=total if continues else len(inline),
            window_bytes=self.settings.stream_window_bytes,
            frame_bytes_max=self.settings.frame_bytes_max,
            finished=self._finished,
        )
        known[key] = stream
        if inline:
            stream.body.append(inline)
            stream.body_bytes = len(inline)
        if stream.body_bytes > stream.body_bytes_total:
            raise RemoteProtocolError("More body came than was announced.", reason="BODY_TOO_LONG")
        if stream.body_bytes_total > self.settings.body_bytes_max:
            self._refuse_body(stream)
        elif not continues:
            self._complete(stream)

    def _refuse_body(self, stream: NodeStream) -> None:
        text = (
            f"The body has {stream.body_bytes_total} bytes; at most {self.settings.body_bytes_max} are taken."
        )
        if isinstance(stream.request, AdminStep):
            step = stream.request
            self.finish_step(
                stream,
                AdminStepResult(
                    operation_id=step.operation_id,
                    step=step.step,
                    refused_code="unsupported",
                    refused_reason=text,
                ),
            )
        else:
            stream.body.clear()
            stream.fail(StreamError(code=StreamErrorCode.INVALID_REQUEST, message=text, before_start=True))
            self._scheduler.wake(stream)

    def _complete(self, stream: NodeStream) -> None:
        stream.is_complete = True
        if isinstance(stream.request, RunRequest):
            stream.request = replace(stream.request, input=b"".join(stream.body))
            stream.body.clear()
        self._events.append(events.StreamOpened(stream))

    def _call_off(self, stream: NodeStream, reason: CancelReason, *, at_safe_point: bool = False) -> None:
        """Cancel a stream that still owes its terminal; at most once."""
        if stream.cancel_reason is not None:
            return
        stream.cancel(reason, at_safe_point=at_safe_point)
        if stream.is_complete:
            if not stream.is_terminated:
                self._events.append(events.StreamCancelled(stream, reason))
        elif not stream.is_terminated:
            # Its body never became whole, so no provider request was opened and none will be (EN-106).
            stream.body.clear()
            stream.fail(
                StreamError(
                    code=StreamErrorCode.CANCELLED,
                    message="Called off before its body was here.",
                    before_start=True,
                )
            )
        self._scheduler.wake(stream)

    def _end_streams(self) -> None:
        for stream in list(self._streams.values()):
            if stream.is_complete and not stream.is_terminated and stream.cancel_reason is None:
                stream.cancel_reason = CancelReason.CONNECTION_LOST
                self._events.append(events.StreamCancelled(stream, CancelReason.CONNECTION_LOST))
        self._streams.clear()
        # Admin steps go on; their results wait for the Edge to ask again (EN-117).
        self._steps.clear()
        self._calls.clear()

    # ---- messages ----

    def _on_register_response(self, _request_id: int, message: RegisterResponse) -> None:
        if not message.accepted:
            self._events.append(events.RegisterAnswered(message))
            self._end(CloseReason.REFUSED, message.reason_code, by_peer=True)
            return
        if message.config is None:
            raise RemoteProtocolError("An accepted registration came without a config.", reason="NO_CONFIG")
        self._advance(HandshakeInput.ACCEPT, is_local=False)
        self.settings = self.settings.with_runtime(message.config.runtime)
        self._handshake_until = None
        self._start_heart(self._liveness.heard_at)
        self._events.append(events.RegisterAnswered(message))

    def _on_ready_ack(self, _request_id: int, message: ReadyAck) -> None:
        self._advance(HandshakeInput.ACK if message.ready else HandshakeInput.NACK, is_local=False)
        self._events.append(events.ReadyAnswered(message))
        if message.ready:
            self._handshake_until = None
        else:
            self._end(CloseReason.REFUSED, message.reason_code, by_peer=True)

    def _on_open_tunnel(self, _request_id: int, message: OpenTunnel) -> None:
        self._open(
            StreamKind.TUNNEL,
            message.request.run_id,
            message.request,
            message.body,
            continues=message.body_continues,
            total=message.body_bytes_total,
        )

    def _on_open_run(self, _request_id: int, message: OpenRun) -> None:
        self._open(
            StreamKind.RUN,
            message.request.run_id,
            message.request,
            message.request.input,
            continues=message.input_continues,
            total=message.input_bytes_total,
        )

    def _on_artifact(self, _request_id: int, message: ArtifactRequest) -> None:
        self._open(StreamKind.ARTIFACT, message.run_id, message, b"", continues=False, total=0)

    def _on_step(self, _request_id: int, message: OpenStep) -> None:
        step = message.step
        self._open(
            StreamKind.STEP,
            step_key(step),
            step,
            b"",
            continues=message.payload_continues,
            total=message.payload_bytes_total,
        )

    def _on_chunk(self, _request_id: int, message: BodyChunk) -> None:
        key = message.stream_id.encode()
        stream = self._streams.get(key) or self._steps.get(key)
        if stream is None or stream.is_complete or stream.is_terminated:
            self._drop_late()
            return
        grant = stream.add_body(message.data, offset=message.offset, last=message.last)
        if message.last:
            self._complete(stream)
        elif grant:
            self._send(StreamCredit(stream_id=stream.stream_id, bytes=grant))

    def _on_credit(self, _request_id: int, message: StreamCredit) -> None:
        stream = self._streams.get(message.stream_id.encode())
        if stream is None:
            return  # credit for an ended run is ignored (EN-102)
        became_writable = stream.grant(message.bytes)
        self._scheduler.wake(stream)
        if became_writable and not stream.is_terminated and stream.cancel_reason is None:
            self._events.append(events.StreamWritable(stream))

    def _on_cancel(self, _request_id: int, message: Cancel) -> None:
        try:
            reason = CancelReason(message.reason_code)
        except ValueError:
            reason = CancelReason.UNKNOWN
        if message.kind is CancelKind.CANCEL_RUN:
            stream = self._streams.get(message.run_id.encode())
            if stream is not None:
                self._call_off(stream, reason, at_safe_point=message.at_safe_point)
        elif message.kind is CancelKind.TERMINATE_SESSION:
            for stream in list(self._streams.values()):
                if message.session_id and stream.session_id == message.session_id:
                    self._call_off(stream, CancelReason.SESSION_TERMINATED)
            self._events.append(events.SessionTerminated(message.session_id))
        else:
            self.counters.unknown_messages += 1

    def _on_command(self, request_id: int, message: CommandRequest) -> None:
        if self._note_call(request_id, CommandRequest):
            self._events.append(events.CommandReceived(request_id, message))

    def _on_refresh(self, request_id: int, message: ConfigRefresh) -> None:
        if self._note_call(request_id, ConfigRefresh):
            self._events.append(events.RefreshReceived(request_id, message.config))

    def _note_call(self, request_id: int, kind: type) -> bool:
        if not request_id:
            raise RemoteProtocolError("A call came without an id.", reason="NO_CALL_ID")
        if request_id in self._calls:
            self.counters.duplicate_packets += 1
            return False
        if len(self._calls) >= CALLS_MAX:
            raise RemoteProtocolError("Too many calls at once.", reason="TOO_MANY_CALLS")
        self._calls[request_id] = kind
        return True
