"""The Edge's side of a session: answers the handshake, opens streams, calls and steps, receives what they bring."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from iop.core.errors import InvalidRequest, LocalProtocolError, Overloaded, RemoteProtocolError
from iop.core.limits import INLINE_BODY_BYTES_MAX, KIB
from iop.wire import codec, events
from iop.wire.frames import frame
from iop.wire.handshake import (
    PROTOCOL_VERSION_MAX,
    PROTOCOL_VERSION_MIN,
    HandshakeInput,
    is_version_supported,
)
from iop.wire.messages import (
    AdminStep,
    AdminStepEvent,
    AdminStepResult,
    ArtifactRequest,
    CancelReason,
    CloseReason,
    CommandRequest,
    CommandResponse,
    NodeConfig,
    ProviderReport,
    Readiness,
    ReadyAck,
    ReadyRequest,
    RefreshResponse,
    RegisterRequest,
    RegisterResponse,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    StreamErrorCode,
    TunnelRequest,
)
from iop.wire.packets import (
    Cancel,
    CancelKind,
    ConfigRefresh,
    FrameKind,
    Message,
    OpenRun,
    OpenStep,
    OpenTunnel,
    RunFrame,
    StreamCredit,
    TunnelFrame,
)
from iop.wire.session import READY, REGISTERED, Legal, Role, Session, SessionSettings
from iop.wire.stream_edge import EdgeStream
from iop.wire.streams import StreamKind, step_key

READY_REQUESTS_MAX: Final = 16
"""Ready requests that may wait for an answer; a Node repeats itself seldom (EN-14)."""

OPENING_SLACK_BYTES: Final = 2 * KIB
"""Kept free beside an inline body, so that its packet stays within what may stand ahead of control (EN-106)."""


class EdgeSession(Session[EdgeStream]):
    """One Node's connection, as the Edge's protocol state."""

    role = Role.EDGE

    def __init__(self, *, settings: SessionSettings, now: float) -> None:
        super().__init__(settings=settings, now=now)
        self._register_call = 0
        self._ready_calls: deque[int] = deque()
        self._calls: dict[int, type] = {}
        self._last_call = 0
        connected = frozenset({Readiness.CONNECTED})
        self._legal.update(
            {
                RegisterRequest: Legal(self._on_register, connected),
                ReadyRequest: Legal(self._on_ready, REGISTERED),
                TunnelFrame: Legal(self._on_tunnel_frame, READY),
                RunFrame: Legal(self._on_run_frame, READY),
                StreamCredit: Legal(self._on_credit, READY),
                CommandResponse: Legal(self._on_command_response, READY),
                RefreshResponse: Legal(self._on_refresh_response, READY),
                AdminStepEvent: Legal(self._on_step_event, READY),
                AdminStepResult: Legal(self._on_step_result, READY),
                ProviderReport: Legal(self._on_report, READY),
            }
        )

    # ---- handshake ----

    def respond_register(self, response: RegisterResponse, *, now: float) -> list[events.Event]:
        """Answer the registration; a refusal ends the session once it is written (EN-10, EN-15).

        The runtime settings of the config that goes out rule this session too.
        """
        self._answer_register(response, now)
        return self.take_events()

    def _answer_register(self, response: RegisterResponse, now: float) -> None:
        if response.accepted:
            if response.config is None:
                raise LocalProtocolError("An accepted registration needs a config.", reason="NO_CONFIG")
            self._advance(HandshakeInput.ACCEPT, is_local=True)
            self.settings = self.settings.with_runtime(response.config.runtime)
            self._reader.frame_bytes_max = self.settings.frame_bytes_max
            self._handshake_until = now + self.settings.ready_timeout_s
            self._handshake_failure = CloseReason.NOT_READY_IN_TIME
            self._start_heart(now)
            response = replace(response, config=self._with_settings(response.config))
        else:
            self._advance(HandshakeInput.REFUSE, is_local=True)
        self._send(
            replace(
                response,
                protocol_version_min=PROTOCOL_VERSION_MIN,
                protocol_version_max=PROTOCOL_VERSION_MAX,
            ),
            self._register_call,
        )
        if not response.accepted:
            self._end(CloseReason.REFUSED, response.reason_code, by_peer=False)

    def respond_ready(self, ack: ReadyAck) -> list[events.Event]:
        """Answer the oldest open ready request; ``ready=False`` ends the session once it is written (EN-14, EN-15)."""
        if not self._ready_calls:
            raise LocalProtocolError("No ready request waits for an answer.", reason="OUT_OF_TURN")
        self._advance(HandshakeInput.ACK if ack.ready else HandshakeInput.NACK, is_local=True)
        self._send(ack, self._ready_calls.popleft())
        if ack.ready:
            self._handshake_until = None
        else:
            self._end(CloseReason.REFUSED, ack.reason_code, by_peer=False)
        return self.take_events()

    # ---- streams ----

    def open_tunnel(self, request: TunnelRequest, body: Sequence[bytes] = ()) -> EdgeStream:
        """Queue a tunnel; its body goes inline or in continuation frames (EN-101).

        Raises:
            LocalProtocolError: not ready, or the run id is in use. Nothing was queued.
            Overloaded: too many streams.
            InvalidRequest: what does not travel in continuation frames is larger than a frame.
        """
        parts = [bytes(part) for part in body]
        total = sum(map(len, parts))
        headers = sum(len(name) + len(value) + 8 for name, value in request.headers)
        if total + headers + OPENING_SLACK_BYTES <= INLINE_BODY_BYTES_MAX:
            inline = b"".join(parts) if len(parts) != 1 else parts[0]
            return self._open(StreamKind.TUNNEL, request.run_id, OpenTunnel(request=request, body=inline), [])
        message = OpenTunnel(request=request, body_continues=True, body_bytes_total=total)
        return self._open(StreamKind.TUNNEL, request.run_id, message, parts)

    def open_run(self, request: RunRequest) -> EdgeStream:
        """Queue a normalised run. Raises as :meth:`open_tunnel`."""
        total = len(request.input)
        if total + OPENING_SLACK_BYTES <= INLINE_BODY_BYTES_MAX:
            return self._open(StreamKind.RUN, request.run_id, OpenRun(request=request), [])
        message = OpenRun(request=replace(request, input=b""), input_continues=True, input_bytes_total=total)
        return self._open(StreamKind.RUN, request.run_id, message, [request.input])

    def fetch_artifact(self, request: ArtifactRequest) -> EdgeStream:
        """Queue an artifact fetch (AD-46). Raises as :meth:`open_tunnel`."""
        return self._open(StreamKind.ARTIFACT, request.run_id, request, [])

    def start_step(self, step: AdminStep, payload: Sequence[bytes] = ()) -> EdgeStream:
        """Queue an admin step, ahead of all stream data (EN-106, EN-120). Raises as :meth:`open_tunnel`.

        A step that was forgotten and is still under way on this connection is taken up again, not sent again: its
        payload may be half way across, and its effect is to happen once (EN-108).
        """
        self._require_ready()
        stream_id = step_key(step)
        known = self._steps.get(stream_id.encode())
        if known is not None:
            if not known.is_forgotten:
                raise LocalProtocolError("This step is already under way.", reason="STEP_IN_USE")
            known.is_forgotten = False
            return known
        parts = [bytes(part) for part in payload if part]
        total = sum(map(len, parts))
        message = OpenStep(step=step, payload_continues=bool(total), payload_bytes_total=total)
        stream = self._stream(StreamKind.STEP, stream_id, b"", parts)
        self._send(message)
        stream.opening = None
        stream.is_handed_over = True
        self._steps[stream.key] = stream
        self._scheduler.wake(stream)
        return stream

    def consumed(self, stream: EdgeStream, size_bytes: int) -> None:
        """Body or delta bytes have left the Edge; ignored after the stream's end (EN-102).

        Raises:
            LocalProtocolError: more than was received; nothing changed.
        """
        if stream.is_ended or self._readiness is Readiness.CLOSED:
            return
        grant = stream.window.consume(size_bytes)
        if grant:
            self._send(StreamCredit(stream_id=stream.stream_id, bytes=grant))

    def cancel(
        self, stream: EdgeStream, reason: CancelReason, *, at_safe_point: bool = False
    ) -> list[events.Event]:
        """Call a stream off (EN-56, EN-70). Idempotent; a no-op after its end.

        A stream whose opening packet was not handed over ends here and now; the Node never hears of it (EN-106).
        """
        if stream.is_ended or stream.is_cancelled or self._readiness is not Readiness.READY:
            return self.take_events()
        stream.is_cancelled = True
        if not stream.is_handed_over:
            self._finish(stream, StreamError(code=StreamErrorCode.CANCELLED, before_start=True))
            stream.drop_unsent()
            return self.take_events()
        stream.drop_unsent()
        self._send(
            Cancel(
                kind=CancelKind.CANCEL_RUN,
                run_id=stream.stream_id,
                reason_code=reason.value,
                at_safe_point=at_safe_point,
            )
        )
        return self.take_events()

    def terminate_session(self, session_id: str, reason: CancelReason) -> None:
        """End all runs of an agent's session and its state (EN-70). Raises LocalProtocolError when not ready."""
        self._require_ready()
        self._send(Cancel(kind=CancelKind.TERMINATE_SESSION, session_id=session_id, reason_code=reason.value))

    # ---- calls ----

    def send_command(self, request: CommandRequest) -> int:
        """Queue a query (EN-75); the answer names the returned call id. Raises LocalProtocolError when not ready."""
        return self._call(request, CommandResponse)

    def send_refresh(self, config: NodeConfig) -> int:
        """Queue a new config (EN-80, EN-81). Raises LocalProtocolError when not ready."""
        return self._call(ConfigRefresh(config=self._with_settings(config)), RefreshResponse)

    def forget_call(self, call_id: int) -> None:
        """Nobody waits for this answer any more."""
        self._calls.pop(call_id, None)

    def forget_step(self, stream: EdgeStream) -> None:
        """Nobody waits for this step any more; it may still take effect, and its late result is counted (EN-120)."""
        stream.is_forgotten = True

    # ---- inside ----

    def _receive_frame(self, buffer: bytes, start: int, end: int) -> None:
        head = codec.read_body_head(buffer, start, end) if self._readiness is Readiness.READY else None
        if head is not None:
            run_id, sequence, body_at = head
            stream = self._streams.get(run_id)
            if stream is not None and stream.kind is not StreamKind.RUN:
                stream.check_sequence(sequence)
                if body_at == end:
                    stream.check_tunnel_order(FrameKind.END)
                    self._finish(stream, None)
                    return
                stream.check_tunnel_order(FrameKind.BODY)
                stream.window.receive(end - body_at)
                self._events.append(events.BodyReceived(stream, buffer[body_at:end]))
                return
        super()._receive_frame(buffer, start, end)

    def _stream(self, kind: StreamKind, stream_id: str, opening: bytes, upload: list[bytes]) -> EdgeStream:
        return EdgeStream(
            kind=kind,
            stream_id=stream_id,
            opening=opening,
            upload=upload,
            window_bytes=self.settings.stream_window_bytes,
        )

    def _open(self, kind: StreamKind, run_id: str, message: Message, upload: list[bytes]) -> EdgeStream:
        self._require_ready()
        if not run_id:
            raise LocalProtocolError("A stream needs a run id.", reason="NO_RUN_ID")
        if run_id.encode() in self._streams:
            raise LocalProtocolError("This run id is in use.", reason="RUN_ID_IN_USE")
        if len(self._streams) >= self.settings.streams_max:
            raise Overloaded("Too many streams on one Node.", reason="STREAMS_MAX")
        payload = codec.encode(message)
        if len(payload) > self.settings.frame_bytes_max:
            raise InvalidRequest(
                "The request's headers and metadata are larger than a frame to the Node.",
                reason="FRAME_TOO_LARGE",
            )
        stream = self._stream(kind, run_id, frame(payload), upload)
        self._streams[stream.key] = stream
        self._scheduler.wake(stream)
        return stream

    def _call(self, message: Message, answer: type) -> int:
        self._require_ready()
        self._send(message, self._last_call + 1)
        self._last_call += 1
        self._calls[self._last_call] = answer
        return self._last_call

    def _with_settings(self, config: NodeConfig) -> NodeConfig:
        """The config with this session's own figures filled in, so that both sides count the same credit."""
        runtime = replace(
            config.runtime,
            heartbeat_interval_ms=round(self.settings.heartbeat_interval_s * 1000),
            heartbeat_timeout_ms=round(self.settings.heartbeat_timeout_s * 1000),
            stream_window_bytes=self.settings.stream_window_bytes,
            frame_bytes_max=self.settings.frame_bytes_max,
            body_bytes_max=self.settings.body_bytes_max,
        )
        return replace(config, runtime=runtime)

    def _finish(self, stream: EdgeStream, error: StreamError | None) -> None:
        """End a tunnel, artifact or run before or by its own terminal."""
        self._streams.pop(stream.key, None)
        stream.is_ended = True
        if stream.kind is StreamKind.RUN:
            assert error is not None
            is_cancel = error.code == StreamErrorCode.CANCELLED
            kind = RunEventType.CANCELLED if is_cancel else RunEventType.ERROR
            self._events.append(events.RunEventReceived(stream, RunEvent(type=kind, error=error)))
        else:
            self._events.append(events.TunnelEnded(stream, error))

    def _end_streams(self) -> None:
        self._scheduler.drop_lanes()
        for stream in list(self._streams.values()):
            self._finish(
                stream,
                StreamError(
                    code=StreamErrorCode.NODE_LOST,
                    message="The connection to the Node ended.",
                    retryable=True,
                    before_start=not stream.is_handed_over,
                ),
            )
            stream.drop_unsent()
        for stream in self._steps.values():
            stream.is_ended = True
            stream.drop_unsent()
            if not stream.is_forgotten:
                self._events.append(events.StepEnded(stream, None))
        self._steps.clear()
        for call_id, answer in self._calls.items():
            lost: Any = events.CommandAnswered if answer is CommandResponse else events.RefreshAnswered
            self._events.append(lost(call_id, None))
        self._calls.clear()

    # ---- messages ----

    def _on_register(self, request_id: int, request: RegisterRequest) -> None:
        self._advance(HandshakeInput.REGISTER, is_local=False)
        self._register_call = request_id
        if not is_version_supported(request.protocol_version):
            supported = f"{PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION_MAX}"
            reason = f"This Edge speaks protocol versions {supported}, not {request.protocol_version}."
            refusal = RegisterResponse(accepted=False, reason_code="unsupported_version", reason=reason)
            self._answer_register(refusal, self._liveness.heard_at)
            return
        if request.clock_unix_nanos:
            self._events.append(events.PeerClockSeen(request.clock_unix_nanos))
        self._events.append(events.Registered(request))

    def _on_ready(self, request_id: int, request: ReadyRequest) -> None:
        if len(self._ready_calls) >= READY_REQUESTS_MAX:
            raise RemoteProtocolError("Too many ready requests at once.", reason="TOO_MANY_CALLS")
        self._advance(HandshakeInput.READY, is_local=False)
        self._ready_calls.append(request_id)
        self._events.append(events.ReadyReported(request))

    def _on_tunnel_frame(self, _request_id: int, message: TunnelFrame) -> None:
        stream = self._streams.get(message.run_id.encode())
        if stream is None:
            self._drop_late()
            return
        if stream.kind is StreamKind.RUN:
            raise RemoteProtocolError("A tunnel frame answered a run.", reason="WRONG_KIND")
        stream.check_sequence(message.sequence)
        kind = message.kind
        stream.check_tunnel_order(kind)
        if kind is FrameKind.BODY:
            stream.window.receive(len(message.body))
            self._events.append(events.BodyReceived(stream, message.body))
        elif kind is FrameKind.RESPONSE_START:
            self._events.append(
                events.ResponseStarted(stream, message.status, message.headers, message.framing)
            )
        elif kind is FrameKind.END:
            self._finish(stream, None)
        elif kind is FrameKind.ERROR:
            self._finish(stream, message.error or StreamError(code=StreamErrorCode.INTERNAL))
        elif kind is FrameKind.USAGE:
            if message.usage is not None:
                self._events.append(events.UsageReceived(stream, message.usage))
        else:
            # A newer peer's kind holds its place in the sequence and is otherwise nothing to us.
            self.counters.unknown_messages += 1

    def _on_run_frame(self, _request_id: int, message: RunFrame) -> None:
        stream = self._streams.get(message.run_id.encode())
        if stream is None:
            self._drop_late()
            return
        if stream.kind is not StreamKind.RUN:
            raise RemoteProtocolError("A run event answered a tunnel.", reason="WRONG_KIND")
        stream.check_sequence(message.sequence)
        event = message.event
        stream.check_run_order(event.type)
        if event.type is RunEventType.UNSPECIFIED:
            self.counters.unknown_messages += 1
            return
        stream.window.receive(event.credit_bytes)
        if event.type.is_terminal:
            self._streams.pop(stream.key, None)
            stream.is_ended = True
        self._events.append(events.RunEventReceived(stream, event))

    def _on_credit(self, _request_id: int, message: StreamCredit) -> None:
        key = message.stream_id.encode()
        stream = self._streams.get(key) or self._steps.get(key)
        if stream is None:
            return  # credit for an ended run is ignored (EN-102)
        stream.grant_upload(message.bytes)
        self._scheduler.wake(stream)

    def _on_command_response(self, request_id: int, message: CommandResponse) -> None:
        if self._calls.get(request_id) is not CommandResponse:
            self._drop_late()
            return
        del self._calls[request_id]
        self._events.append(events.CommandAnswered(request_id, message))

    def _on_refresh_response(self, request_id: int, message: RefreshResponse) -> None:
        if self._calls.get(request_id) is not RefreshResponse:
            self._drop_late()
            return
        del self._calls[request_id]
        self._events.append(events.RefreshAnswered(request_id, message))

    def _on_step_event(self, _request_id: int, message: AdminStepEvent) -> None:
        stream = self._steps.get(step_key(message).encode())
        if stream is None or stream.is_forgotten:
            self._drop_late()
        else:
            self._events.append(events.StepProgressed(stream, message))

    def _on_step_result(self, _request_id: int, message: AdminStepResult) -> None:
        stream = self._steps.pop(step_key(message).encode(), None)
        if stream is None:
            self._drop_late()
            return
        stream.is_ended = True
        stream.drop_unsent()
        if stream.is_forgotten:
            self._drop_late()
        else:
            self._events.append(events.StepEnded(stream, message))

    def _on_report(self, _request_id: int, message: ProviderReport) -> None:
        self._events.append(events.ReportReceived(message))
