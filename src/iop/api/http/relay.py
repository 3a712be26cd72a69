"""A provider's answer on its way to the caller: the sink of one tunnel (SF-03 to SF-08, SF-14).

Bytes go from the connection's read turn to the caller's socket in the same turn. Credit comes back as soon
as they are written, or, while the caller is slow, when it has caught up; so a slow caller costs its own
window and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, unique
from typing import Any, Final

import orjson

from iop.api.http.content_coding import DecodeError, Decoder, decoder_for
from iop.api.http.errors import Dialect, error_event, error_of_stream
from iop.api.http.exchange import Exchange
from iop.api.http.head import HeaderList
from iop.api.http.headers import accepts_coding, provider_headers
from iop.api.http.pulse import beat_while_frozen
from iop.api.http.rewrite import Rewrite
from iop.api.http.splice import JsonWatch
from iop.api.http.sse import SseEnding, SseWatcher
from iop.api.http.usage import BODY_BYTES_MAX, usage_of, usage_of_body, was_given_up
from iop.core.errors import IopError, Unavailable
from iop.edge.dispatch import DispatchHandle
from iop.wire.messages import BodyFraming, CancelReason, Header, StreamError, Usage

__all__ = ["CountRelay", "Relay"]

_TRUNCATED: Final = StreamError(code="upstream_truncated")

NOT_COUNTABLE: Final = "not_countable"
"""Reason why nobody's tokenizer was asked: the estimate answers."""

_NO_ROUTE: Final = frozenset({404, 405, 501})

_DOUBTED_BYTES_MAX: Final = 64 * 1024
"""Longest answer that may turn out to be "no such route"; longer ones are taken for what they say."""


@unique
class _Mode(Enum):
    """What kind of body is relayed."""

    NOTHING = "nothing"
    PLAIN = "plain"
    EVENTS = "events"


class Relay:
    """Sink of one request's tunnel. Bind the handle as soon as there is one.

    Args:
        exchange: where the answer goes.
        dialect: in whose words an error inside a stream is told.
        choices: how many alternatives a stream must finish.
        event_bytes_max: most bytes of one event.
        rewrite: what the model's rules make of answer bytes; None: they pass as they are (SF-15).
        begin: called at the first byte with the status; returns headers of ours for this answer.
        fail: answers an error before the first byte.
    """

    __slots__ = (
        "_begin",
        "_choices",
        "_decoder",
        "_dialect",
        "_event_bytes_max",
        "_exchange",
        "_fail",
        "_handle",
        "_json",
        "_kept",
        "_kept_bytes",
        "_mode",
        "_owed",
        "_remaining",
        "_rewrite",
        "_shows_decoded",
        "_watcher",
        "_withheld",
    )

    def __init__(
        self,
        exchange: Exchange,
        *,
        dialect: Dialect,
        choices: int,
        event_bytes_max: int,
        rewrite: Rewrite | None = None,
        begin: Callable[[Exchange, DispatchHandle, int], HeaderList],
        fail: Callable[[Exchange, IopError], None],
    ) -> None:
        self._exchange = exchange
        self._dialect = dialect
        self._choices = choices
        self._event_bytes_max = event_bytes_max
        self._rewrite = rewrite
        self._withheld: tuple[int, HeaderList] | None = None
        self._begin = begin
        self._fail = fail
        self._handle: DispatchHandle | None = None
        self._mode = _Mode.NOTHING
        self._watcher: SseWatcher | None = None
        self._json: JsonWatch | None = None
        self._decoder: Decoder | None = None
        self._shows_decoded = False
        self._remaining: int | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._owed = 0

    def bind(self, handle: DispatchHandle) -> None:
        """Watch over the exchange from now on: its caller may leave or be slow.

        Handle and relay know each other until the provider's last word; then the relay forgets, so that
        both die at once and not at the next search for cycles.
        """
        self._handle = handle
        self._exchange.bind(on_gone=self._on_gone, on_writable=self._on_writable)

    # ---- TunnelSink ----

    def on_response_start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """Pass on the provider's head, and decide how its body is watched."""
        if not 200 <= status <= 999:  # a Node's word: nothing that a caller could take for an interim answer
            self._give_up(Unavailable("The provider's answer has no valid status.", reason="upstream_error"))
            return
        kind = coding = b""
        length: int | None = None
        out = provider_headers(headers)
        for name, value in out:
            if name == b"content-type":
                kind = value.lower()
            elif name == b"content-encoding":
                coding = value.strip().lower()
        if framing is BodyFraming.LENGTH:
            length = _stated_length(headers)
        is_events = kind.startswith(b"text/event-stream")
        if coding and coding != b"identity":
            self._decoder = decoder_for(coding)
            is_readable = (
                self._rewrite is None
                and not self._exchange.is_early  # its head is gone, and what it holds so far is in clear
                and accepts_coding(self._exchange.head, coding)
            )
            if not is_readable and self._decoder is None:
                self._refuse_coding()
                return
            if not is_readable:
                self._shows_decoded = True
                length = None
                out = [(name, value) for name, value in out if name != b"content-encoding"]
        if is_events:
            self._mode = _Mode.EVENTS
            self._watcher = SseWatcher(
                self._dialect if status < 400 else Dialect.PLAIN,
                choices=self._choices,
                event_bytes_max=self._event_bytes_max,
            )
            # What is added or dropped at the end would not fit a stated length.
            length = None
        else:
            self._mode = _Mode.PLAIN
            if framing is BodyFraming.CLOSE and b"json" in kind:
                self._json = JsonWatch()
        self._remaining = length
        assert self._handle is not None, "no answer comes before dispatch has returned"
        if self._handle.version_begun != self._handle.weight_version:
            length = None  # a trailer has to tell of it, and only chunks can be followed by one (AD-33)
        out += self._begin(self._exchange, self._handle, status)
        if self._rewrite is not None and self._mode is _Mode.PLAIN and b"json" in kind:
            self._withheld = (
                status,
                out,
            )  # the name may be longer or shorter, so the length is not known yet
        else:
            self._exchange.start(status, out, length=length)
            if is_events and (self._decoder is None or self._shows_decoded):
                beat_while_frozen(self._exchange, self._is_frozen)

    def _is_frozen(self) -> bool:
        return self._handle is not None and self._handle.is_frozen

    def on_body(self, data: bytes) -> None:
        """Pass bytes on."""
        exchange, handle = self._exchange, self._handle
        size = len(data)
        if not exchange.is_ended:
            if self._mode is _Mode.EVENTS:
                self._relay_events(data)
            else:
                self._relay_plain(data)
        if exchange.is_writable or exchange.is_ended:
            if handle is not None:
                handle.consumed(size)
        else:
            self._owed += size

    def on_usage(self, usage: Usage) -> None:
        """Usage that the Node observed is the dispatcher's to keep."""

    def on_end(self) -> None:
        """The provider's answer is over as far as its framing tells."""
        if not (self._exchange.is_ended or self._exchange.is_gone):
            if self._mode is _Mode.EVENTS:
                self._end_events(_TRUNCATED)
            elif self._mode is _Mode.PLAIN:
                self._end_plain()
        self._handle = None

    def on_error(self, error: StreamError) -> None:
        """The provider's answer was cut, or never came."""
        exchange = self._exchange
        if exchange.is_ended or exchange.is_gone:
            pass
        elif not exchange.is_started:
            self._fail(self._exchange, error_of_stream(error))
        elif self._mode is _Mode.EVENTS:
            self._end_events(error)
        else:
            self._note_truncated()
            exchange.cut()
        self._handle = None

    # ---- bodies ----

    def _relay_events(self, data: bytes) -> None:
        watcher = self._watcher
        assert watcher is not None, "events are always watched"
        if self._decoder is not None:
            clear = self._decode(data)
            if clear is None:
                return
            ready = watcher.feed(clear)
            if not self._shows_decoded:
                self._exchange.write(data)  # the caller reads this coding: its bytes pass as they are
                return
        else:
            ready = watcher.feed(data)
        exchange = self._exchange
        if ready:
            if self._rewrite is not None:
                ready = self._rewrite(ready, True)
            exchange.write(ready)
        if watcher.is_terminated:
            self._note_usage()
            exchange.end()
        elif watcher.is_too_large:
            error = Unavailable("An event of the provider's stream is too large.", reason="event_too_large")
            self._give_up(error)

    def _relay_plain(self, data: bytes) -> None:
        if self._shows_decoded:
            clear = self._decode(data)
            if clear is None:
                return
            data = clear
        if self._remaining is not None:
            if len(data) > self._remaining:
                data = data[: self._remaining]  # what exceeds the stated length belongs to no answer
            self._remaining -= len(data)
        if self._json is not None:
            self._json.feed(data)
        if self._withheld is not None:
            self._kept.append(data)
            self._kept_bytes += len(data)
            if self._kept_bytes > self._event_bytes_max:
                self._give_up(Unavailable("The provider's answer is too large.", reason="event_too_large"))
            return
        if self._kept_bytes >= 0 and (self._decoder is None or self._shows_decoded):
            self._kept.append(data)
            self._kept_bytes += len(data)
            if self._kept_bytes > BODY_BYTES_MAX:
                self._kept = []
                self._kept_bytes = -1
        self._exchange.write(data)

    def _decode(self, data: bytes) -> bytes | None:
        assert self._decoder is not None
        try:
            return self._decoder.decode(data)
        except DecodeError:
            if self._shows_decoded:
                self._give_up(
                    Unavailable("The provider's content coding is broken.", reason="upstream_error")
                )
                return None
            self._decoder = None  # the caller asked for this coding and will see for itself
            return None

    # ---- endings ----

    def _end_events(self, error: StreamError) -> None:
        watcher, exchange = self._watcher, self._exchange
        assert watcher is not None, "events are always watched"
        ending, rest = watcher.finish()
        self._note_usage()
        if self._decoder is not None and not self._shows_decoded:
            # Nothing can be added inside a coding that is not ours; a cut shows in the framing.
            if ending in (SseEnding.TERMINATED, SseEnding.FINISHED):
                exchange.end()
            else:
                self._note_truncated()
                exchange.cut()
            return
        if ending is SseEnding.TERMINATED or ending is SseEnding.FINISHED:
            exchange.write(rest)
        else:
            self._note_truncated()
            if ending is SseEnding.CUT:
                exchange.write(error_event(error_of_stream(error), self._dialect, newline=watcher.newline))
        exchange.end()

    def _end_plain(self) -> None:
        exchange = self._exchange
        is_cut = self._shows_decoded and self._decoder is not None and not self._decoder.is_whole
        if is_cut or (self._json is not None and not self._json.is_complete) or self._remaining:
            self._note_truncated()
            if exchange.is_started:
                exchange.cut()
            else:
                self._fail(exchange, error_of_stream(_TRUNCATED))
            return
        whole = self._kept[0] if len(self._kept) == 1 else b"".join(self._kept)
        if whole and self._handle is not None:
            usage = usage_of_body(whole)
            if usage is not None:
                self._handle.note_usage(usage)
            if was_given_up(whole):
                self._note_truncated()
        if self._withheld is not None and self._rewrite is not None:
            status, headers = self._withheld
            exchange.start(status, headers, length=self._length_of(shown := self._rewrite(whole, False)))
            exchange.write(shown)
            exchange.end()
        else:
            exchange.end()

    def _length_of(self, body: bytes) -> int | None:
        """What to state; None where a trailer has to follow."""
        handle = self._handle
        return None if handle is not None and handle.version_begun != handle.weight_version else len(body)

    def _give_up(self, error: IopError) -> None:
        """End an answer that has begun and that we cannot go on with."""
        self._note_truncated()
        if self._mode is _Mode.EVENTS and self._watcher is not None:
            self._exchange.write(error_event(error, self._dialect, newline=self._watcher.newline))
            self._exchange.end()
        elif self._exchange.is_started:
            self._exchange.cut()
        else:
            self._fail(self._exchange, error)
        self._call_off()

    def _refuse_coding(self) -> None:
        self._fail(
            self._exchange,
            Unavailable(
                "The provider answers in a content coding that neither the caller nor the gateway reads.",
                reason="unsupported_encoding",
            ),
        )
        self._call_off()

    def _call_off(self) -> None:
        """Nothing more of the provider's is wanted, and after this nothing comes."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.cancel(CancelReason.CLIENT_GONE)

    def _note_truncated(self) -> None:
        if self._handle is not None:
            self._handle.note_truncated()

    def _note_usage(self) -> None:
        if self._watcher is not None and self._watcher.has_failed:
            # Some engines end a failed stream like a good one (SF-14).
            self._note_truncated()
        if self._watcher is not None and self._watcher.usage and self._handle is not None:
            self._handle.note_usage(usage_of(self._watcher.usage))

    # ---- the caller ----

    def _on_gone(self) -> None:
        self._call_off()

    def _on_writable(self) -> None:
        owed, self._owed = self._owed, 0
        if owed and self._handle is not None:
            self._handle.consumed(owed)


def _stated_length(headers: Sequence[Header]) -> int | None:
    for name, value in headers:
        if name.lower() == b"content-length":
            return int(value) if value.isdigit() else None
    return None


class CountRelay(Relay):
    """Sink of a token count: a provider without that route is answered for by an estimate (SF-14).

    Such providers say 404, 405 or 501 without an error object; one that has the route and knows nothing of
    the model says so in an error object, and that passes.
    """

    __slots__ = ("_doubted", "_doubted_bytes", "_estimate", "_late_start")

    def __init__(self, exchange: Exchange, *, estimate: Callable[[], None], **rest: Any) -> None:
        super().__init__(exchange, **rest)
        self._estimate = estimate
        self._late_start: Callable[[], None] | None = None
        self._doubted: list[bytes] = []
        self._doubted_bytes = 0

    def on_response_start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """Hold back an answer that may mean that there is no such route."""
        start = super().on_response_start
        if status in _NO_ROUTE:
            self._late_start = lambda: start(status=status, headers=headers, framing=framing)
        else:
            start(status=status, headers=headers, framing=framing)

    def on_body(self, data: bytes) -> None:
        """Hold back a doubtful answer's body, as long as it is small."""
        if self._late_start is None:
            super().on_body(data)
            return
        self._doubted.append(data)
        self._doubted_bytes += len(data)
        if self._doubted_bytes > _DOUBTED_BYTES_MAX:
            self._believe()

    def on_end(self) -> None:
        """Judge a doubtful answer."""
        if self._late_start is not None:
            if not _has_error_object(b"".join(self._doubted)):
                self._late_start = self._handle = None
                self._exchange.release_body()
                self._estimate()
                return
            self._believe()
        super().on_end()

    def on_error(self, error: StreamError) -> None:
        """A doubtful answer that was cut is passed on as what it is. Where the route's owner was lost before it was
        asked, and nobody else can count this, the estimate answers.
        """
        if error.code == NOT_COUNTABLE and not (self._exchange.is_ended or self._exchange.is_gone):
            self._handle = None
            self._exchange.release_body()
            self._estimate()
            return
        if self._late_start is not None:
            self._believe()
        super().on_error(error)

    def _believe(self) -> None:
        late_start, self._late_start = self._late_start, None
        if late_start is not None:
            late_start()
        doubted, self._doubted = self._doubted, []
        for data in doubted:
            super().on_body(data)


def _has_error_object(body: bytes) -> bool:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and isinstance(value.get("error"), dict)
