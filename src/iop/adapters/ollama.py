"""An Ollama server over its native API: normalised runs with tools, and the tool fallback (EN-65, EN-66)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from iop.adapters.base import (
    AdapterCapabilities,
    AdapterServices,
    AdapterSnapshot,
    Category,
    Health,
    RunStream,
    TunnelStream,
)
from iop.adapters.controlled import Controlled
from iop.adapters.engine_facts import facts_of_show
from iop.adapters.http_connection import HttpExchange
from iop.adapters.http_exchange import (
    HEADERS_TIMEOUT_S,
    HttpRequest,
    Origin,
    UpstreamError,
    UpstreamFailure,
    client_ssl_context,
)
from iop.adapters.http_tunnel import refuse_tunnel, stream_error_of
from iop.adapters.http_upstream import HttpUpstream
from iop.adapters.ollama_codec import AnswerReader, chat_request, has_tools, refuses_tools
from iop.adapters.ollama_control import OllamaControl, full_name
from iop.core.errors import InvalidRequest, IopError, RemoteProtocolError, Unavailable
from iop.obs.tracing import parse_trace
from iop.wire.messages import (
    AdapterConfig,
    BodyFraming,
    CancelReason,
    OllamaSettings,
    RunEvent,
    RunEventType,
    StreamError,
    StreamErrorCode,
)
from iop.wire.model_facts import ModelFacts

_log = logging.getLogger(__name__)

PROBE_TIMEOUT_S: Final = 5.0
PROBE_BYTES_MAX: Final = 4 * 1024 * 1024
ERROR_BYTES_MAX: Final = 64 * 1024
"""How much of an error answer is read for its words."""


class _Tag(msgspec.Struct):
    name: str
    digest: str = ""


class _Tags(msgspec.Struct):
    models: list[_Tag] = []


class _Version(msgspec.Struct):
    version: str = ""


class OllamaAdapter(Controlled):
    """One Ollama server.

    Args:
        config: its adapter config.
        services: the Node's change signal.

    Raises:
        InvalidRequest: the config cannot work; names key and fix.
    """

    def __init__(self, config: AdapterConfig, services: AdapterServices) -> None:
        settings = config.settings
        if not isinstance(settings, OllamaSettings):
            raise InvalidRequest(
                f"adapter {config.name!r}: type ollama needs an endpoint", reason="NO_ENDPOINT"
            )
        origin = Origin.parse(settings.endpoint)
        super().__init__(config, services, OllamaControl(settings, services, targets=tuple(config.targets)))
        self._keep_alive = settings.keep_alive
        self._upstream = HttpUpstream(origin, ssl_context=client_ssl_context(b"") if origin.is_tls else None)
        self._runs: set[_ChatRun] = set()
        self._without_tools: set[str] = set()
        self._models: tuple[str, ...] = ()
        self._shown: dict[str, str] = {}
        self._facts: dict[str, ModelFacts] = {}
        self._version = ""

    @property
    def in_flight(self) -> int:
        """Runs of which something is left at the engine."""
        return len(self._runs)

    def cancel_all(self) -> None:
        """Close the engine connections of all runs; each ends as cancelled."""
        for run in tuple(self._runs):
            run.cancel()

    @property
    def capabilities(self) -> AdapterCapabilities:
        """Runs, and what its control finds."""
        return AdapterCapabilities(
            kind=self._config.type,
            category=Category.LOCAL_INFERENCE,
            runs=True,
            admin=True,
            admin_refusal=self._refusal,
        )

    def snapshot(self) -> AdapterSnapshot:
        """From the last probe and the runs since."""
        return AdapterSnapshot(
            health=self._health,
            reason=self._reason,
            models=self._models,
            engine_version=self._version,
            model_facts=self._facts,
        )

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Open for runs."""
        self._upstream.start(tasks)
        await self._control.start(tasks)

    async def aclose(self) -> None:
        """Close connections; runs under way end as cancelled."""
        await self._upstream.aclose()
        await self._control.aclose()

    async def probe(self) -> None:
        """Ask for version, installed and loaded models."""
        await self._control.probe()
        try:
            version = await self._get(b"/api/version")
            tags = await self._get(b"/api/tags")
        except IopError as exc:
            self._observe(Health.OFFLINE, exc.message)
            return
        try:
            self._version = f"ollama {msgspec.json.decode(version, type=_Version).version}"[:128]
            listed = msgspec.json.decode(tags, type=_Tags).models[:1024]
            self._models = tuple(tag.name[:256] for tag in listed)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            self._observe(Health.NOT_READY, "it does not answer like an Ollama server")
            return
        await self._learn(listed)
        self._observe(Health.READY, "")

    async def _learn(self, listed: Sequence[_Tag]) -> None:
        """What the models of this configuration can, asked once for each content of theirs (EN-66).

        One that says that it takes no tools is never tried with them; of one that does not say, a refusal shows it.
        """
        digests = {tag.name: tag.digest for tag in listed}
        for target in self._config.targets:
            digest = digests.get(full_name(target))
            if digest is None or self._shown.get(target) == digest:
                continue
            try:
                answer = await self._ask(b"POST", b"/api/show", msgspec.json.encode({"model": target}))
            except IopError:
                continue
            self._facts[target] = facts_of_show(answer)
            self._shown[target] = digest
            # What refused tools before may take them now.
            self._without_tools.discard(target)
            if self._facts[target].tools is False:
                self._without_tools.add(target)
            self._services.on_change()

    def open_tunnel(self, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """Not offered: its OpenAI dialect drops fields and hides errors, so runs go over the native API."""
        refuse_tunnel(
            stream, StreamErrorCode.INVALID_REQUEST, "providers of type ollama serve runs, not tunnels"
        )
        on_done()

    async def run(self, stream: RunStream) -> None:
        """One chat; tried once more with tools in words when the model refuses them (EN-66)."""
        run = _ChatRun(stream, self._upstream, self._observe_outcome)
        if self._is_gated:
            # It would load the model again that a release let go.
            stream.emit(
                _failed(StreamErrorCode.BUSY, "the engine is paused", retryable=True, before_start=True)
            )
            return
        self._runs.add(run)
        try:
            terminal = await self._serve(stream, run)
        finally:
            self._runs.discard(run)
        stream.emit(terminal)

    async def _serve(self, stream: RunStream, run: _ChatRun) -> RunEvent:
        """The run's terminal event, when nothing of it is left at the engine."""
        target = stream.request.target
        terminal: RunEvent | None
        try:
            wants_tools = has_tools(stream.request)
            is_fallback = wants_tools and target in self._without_tools
            body = chat_request(stream.request, keep_alive=self._keep_alive, is_fallback=is_fallback)
            terminal = await run.send(body, is_fallback=is_fallback)
            if terminal is None:
                _log.info("run.tool_fallback run_id=%s", stream.request.run_id)
                self._without_tools.add(target)
                body = chat_request(stream.request, keep_alive=self._keep_alive, is_fallback=True)
                terminal = await run.send(body, is_fallback=True)
        except InvalidRequest as exc:
            terminal = _failed(StreamErrorCode.INVALID_REQUEST, exc.message, before_start=True)
        except Unavailable as exc:
            terminal = _failed(StreamErrorCode.CONNECT_FAILED, exc.message, retryable=True, before_start=True)
        if terminal is None:
            terminal = _failed(
                StreamErrorCode.UPSTREAM_ERROR, "the backend refuses tools that it was not given"
            )
        return terminal

    async def _get(self, path: bytes) -> bytes:
        return await self._ask(b"GET", path)

    async def _ask(self, method: bytes, path: bytes, body: bytes = b"") -> bytes:
        request = HttpRequest(
            method=method,
            path=path,
            headers=[(b"Content-Type", b"application/json")] if body else [],
            body=(body,) if body else (),
            headers_timeout_s=PROBE_TIMEOUT_S,
        )
        response = await self._upstream.fetch(request, body_bytes_max=PROBE_BYTES_MAX)
        if response.status != 200:
            raise Unavailable(f"the engine answers {response.status} to a probe", reason="ENGINE_UNWELL")
        return response.body

    def _observe_outcome(self, error: UpstreamError | None) -> None:
        if error is None:
            if self._health is Health.OFFLINE:
                self._observe(Health.READY, "")
        elif error.failure is UpstreamFailure.CONNECT_FAILED:
            self._observe(Health.OFFLINE, error.message)


class _ChatRun:
    """Sink of one or two exchanges that serve one run."""

    def __init__(
        self,
        stream: RunStream,
        upstream: HttpUpstream,
        on_outcome: Callable[[UpstreamError | None], None],
    ) -> None:
        self._stream = stream
        self._upstream = upstream
        self._on_outcome = on_outcome
        self._exchange: HttpExchange | None = None
        self._reader = AnswerReader(is_fallback=False)
        self._status = 0
        self._error_body = b""
        self._has_started = False
        self._is_cancelled = False
        self._terminal: RunEvent | None = None
        self._closed = asyncio.Event()
        trace = parse_trace(stream.request.traceparent, stream.request.tracestate)
        self._trace = [] if trace is None else trace.fields()
        stream.bind(on_cancel=self._on_cancel, on_writable=self._on_writable)

    async def send(self, body: bytes, *, is_fallback: bool) -> RunEvent | None:
        """Serve one exchange; the run's terminal event, or `None` when the model refused the tools.

        Raises Unavailable when the adapter is closed. Cancellation: the exchange is cancelled.
        """
        if self._is_cancelled:
            return RunEvent(type=RunEventType.CANCELLED)
        self._reader = AnswerReader(is_fallback=is_fallback)
        self._terminal = None
        self._error_body = b""
        self._closed.clear()
        self._exchange = self._upstream.request(
            HttpRequest(
                method=b"POST",
                path=b"/api/chat",
                headers=[(b"Content-Type", b"application/json"), *self._trace],
                body=(body,),
                headers_timeout_s=self._stream.request.timeout_sec or HEADERS_TIMEOUT_S,
            ),
            self,
        )
        try:
            await self._closed.wait()
        finally:
            self._exchange.cancel()
        return self._terminal

    def on_start(self, status: int, headers: list[tuple[bytes, bytes]], framing: BodyFraming) -> None:  # noqa: ARG002
        """Its status decides how the body is read."""
        self._on_outcome(None)
        self._status = status
        if status == 200 and not self._has_started:
            self._has_started = True
            self._stream.emit(RunEvent(type=RunEventType.START))

    def on_body(self, data: bytes) -> bool:
        """Lines become deltas; reading stops when the credit is used up (EN-102)."""
        if self._status != 200:
            self._error_body = (self._error_body + data)[:ERROR_BYTES_MAX]
            return True
        try:
            self._take(self._reader.feed(data))
        except RemoteProtocolError as exc:
            self._terminal = _failed(StreamErrorCode.UPSTREAM_ERROR, exc.message)
            if self._exchange is not None:
                self._exchange.cancel()
            return True
        return self._stream.credit_bytes > 0

    def on_end(self) -> None:
        """The answer is whole."""
        if self._status != 200:
            self._terminal = self._refusal()
            return
        try:
            self._take(self._reader.finish())
        except RemoteProtocolError as exc:
            self._terminal = _failed(StreamErrorCode.UPSTREAM_ERROR, exc.message)

    def on_error(self, error: UpstreamError) -> None:
        """Failed, or cancelled by us."""
        if self._is_cancelled:
            self._terminal = RunEvent(type=RunEventType.CANCELLED)
        elif self._terminal is None:
            self._on_outcome(error)
            self._terminal = RunEvent(type=RunEventType.ERROR, error=stream_error_of(error))

    def on_closed(self) -> None:
        """Nothing is left at the engine."""
        self._closed.set()

    def _take(self, events: list[RunEvent]) -> None:
        for event in events:
            if event.type.is_terminal:
                self._terminal = event
            else:
                self._stream.emit(event)

    def _refusal(self) -> RunEvent | None:
        """An error answer; `None` when it refuses the tools and they can still be told in words."""
        try:
            text = str(msgspec.json.decode(self._error_body).get("error", ""))
        except (msgspec.DecodeError, AttributeError, RecursionError):
            text = self._error_body[:256].decode("utf-8", "replace")
        if refuses_tools(self._status, text) and not self._reader.is_fallback:
            return None
        code = {
            400: StreamErrorCode.INVALID_REQUEST,
            404: StreamErrorCode.INVALID_REQUEST,
            503: StreamErrorCode.BUSY,
        }.get(self._status, StreamErrorCode.UPSTREAM_ERROR)
        return _failed(code, f"engine: {text[:512]}", retryable=self._status in {500, 502, 503})

    def cancel(self) -> None:
        """Close the engine's connection; the run ends as cancelled. Idempotent."""
        self._is_cancelled = True
        if self._exchange is not None:
            self._exchange.cancel()

    def _on_cancel(self, reason: CancelReason) -> None:  # noqa: ARG002 - every reason ends it the same way
        self.cancel()

    def _on_writable(self) -> None:
        if self._exchange is not None:
            self._exchange.resume()


def _failed(
    code: StreamErrorCode, message: str, *, retryable: bool = False, before_start: bool = False
) -> RunEvent:
    return RunEvent(
        type=RunEventType.ERROR,
        error=StreamError(code=code, message=message, retryable=retryable, before_start=before_start),
    )
