"""Stands before an exchange and converts what a relay writes to it.

The relay keeps doing what it does for tunnels and runs, in the provider's dialect: watching for cuts, credit,
usage, the caller's leaving. What it writes becomes the caller's dialect here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from iop.api.http.convert.answers import AnswerConverter, BrokenAnswerError, failure_of_body
from iop.api.http.convert.events import Failure
from iop.api.http.errors import Dialect, error_type
from iop.api.http.exchange import Exchange
from iop.api.http.head import HeaderList, RequestHead
from iop.api.http.json_text import json_text
from iop.core.errors import IopError, Unavailable

__all__ = ["ConvertingExchange", "provider_head"]

_JSON = (b"content-type", b"application/json")
_SSE = (b"content-type", b"text/event-stream; charset=utf-8")
_OF_THE_BODY = frozenset({b"content-type", b"content-length", b"content-encoding", b"etag", b"content-md5"})
_OF_DIALECTS = frozenset({b"anthropic-version", b"anthropic-beta"})
_MESSAGES_VERSION = (b"anthropic-version", b"2023-06-01")


def provider_head(head: RequestHead, dialect: Dialect) -> RequestHead:
    """The caller's head as a provider of another dialect may see it: no content coding, no version of a
    dialect that is not its own.
    """
    headers = [
        field for field in head.headers if field[0] != b"accept-encoding" and field[0] not in _OF_DIALECTS
    ]
    if dialect is Dialect.MESSAGES:
        headers.append(_MESSAGES_VERSION)
    return replace(head, headers=headers, query=b"")


class ConvertingExchange:
    """What a relay takes for its exchange.

    Args:
        exchange: the caller's.
        converter: of this answer.
        source: the caller's dialect.
        target: the provider's.
        is_stream: whether the caller asked for a stream.
        request_id: shown in errors.
        bytes_max: most of an answer that is gathered.
        fail: answers an error of ours before the first byte.
        give_up: told when the rest of the provider's answer is not wanted.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        converter: AnswerConverter,
        source: Dialect,
        target: Dialect,
        is_stream: bool,
        request_id: str,
        bytes_max: int,
        fail: Callable[[Exchange, IopError], None],
        give_up: Callable[[], None],
    ) -> None:
        self.head = provider_head(exchange.head, target)
        self._exchange = exchange
        self._converter = converter
        self._source = source
        self._is_stream = is_stream
        self._request_id = request_id
        self._bytes_max = bytes_max
        self._fail = fail
        self._give_up = give_up
        self._status = 0
        self._headers: HeaderList = []
        self._is_events = False
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self.is_started = False
        self._is_ended = False

    # ---- what relays look at ----

    @property
    def is_writable(self) -> bool:
        """Whether the caller keeps up."""
        return self._exchange.is_writable

    @property
    def is_early(self) -> bool:
        """Whether the caller's event stream was begun before the answer was there."""
        return self._exchange.is_early

    @property
    def is_gone(self) -> bool:
        """Whether the caller has left."""
        return self._exchange.is_gone

    @property
    def is_ended(self) -> bool:
        """Whether the answer is whole or cut."""
        return self._is_ended or self._exchange.is_ended

    def bind(self, *, on_gone: Callable[[], None], on_writable: Callable[[], None] | None = None) -> None:
        """Watch over the caller."""
        self._exchange.bind(on_gone=on_gone, on_writable=on_writable)

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back later, unless the exchange is over by then."""
        self._exchange.after(delay_s, callback)

    def release_body(self) -> None:
        """The request's bytes are not needed any more."""
        self._exchange.release_body()

    # ---- what relays write ----

    def respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes = b"") -> None:
        """A whole answer."""
        self.start(status, headers, length=len(body))
        self.write(body)
        self.end()

    def start(
        self,
        status: int,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        length: int | None = None,  # noqa: ARG002 - of the provider's body; ours is another
    ) -> None:
        """The provider's head. Only a stream that the caller asked for is passed on as it comes."""
        self.is_started = True
        self._status = status
        self._is_events = any(
            name == b"content-type" and value.lower().startswith(b"text/event-stream")
            for name, value in headers
        )
        self._headers = [field for field in headers if field[0] not in _OF_THE_BODY]
        if self._flows:
            self._exchange.start(200, [_SSE, *self._headers], length=None)

    def write(self, data: bytes) -> None:
        """More of the provider's body."""
        if self.is_ended or self.is_gone:
            return
        if self._flows:
            if out := self._converter.feed(data):
                self._exchange.write(out)
            if self._converter.is_over:
                self._end_flow()
            return
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes > self._bytes_max:
            self._refuse(Unavailable("The provider's answer is too large.", reason="event_too_large"))
            self._give_up()

    def end(self) -> None:
        """The provider's body is whole, as far as the relay can tell."""
        if self.is_ended or self.is_gone:
            return
        if self._flows:
            self._end_stream()
        else:
            self._end_whole(b"".join(self._gathered))

    def cut(self) -> None:
        """The provider's body was cut."""
        if self.is_ended or self.is_gone:
            return
        if self._flows:
            self._end_stream()
            return
        self._refuse(
            Unavailable("The provider's answer ended before it was whole.", reason="upstream_truncated")
        )

    # ---- inside ----

    @property
    def _flows(self) -> bool:
        return self._is_events and self._is_stream and 200 <= self._status < 300

    def _end_stream(self) -> None:
        self._is_ended = True
        try:
            rest = self._converter.finish()
        except BaseException:
            self._exchange.cut()  # a bug of ours: nobody waits for what will not come, nor takes this for whole
            raise
        self._exchange.write(rest)
        self._end_flow()

    def _end_flow(self) -> None:
        self._is_ended = True
        self._exchange.end()
        if self._converter.has_failed:
            self._give_up()

    def _end_whole(self, body: bytes) -> None:
        if 300 <= self._status < 400:  # a redirect is no answer to a question
            told = f"The provider answered with status {self._status}."
            self._refuse(Unavailable(told, reason="upstream_error"))
            return
        if not 200 <= self._status < 300:
            self._tell_error(self._status, failure_of_body(body, self._status))
            return
        try:
            if self._is_stream:
                out, kind = self._converter.streamed(body), _SSE
            elif self._is_events:
                out, kind = self._converter.gathered(body), _JSON
            else:
                out, kind = self._converter.whole(body), _JSON
        except BrokenAnswerError as error:
            self._give_up()
            if error.is_told:
                self._tell_error(502, error.failure)
            else:
                self._refuse(Unavailable(error.failure.message, reason=error.failure.code))
            return
        self._is_ended = True
        self._exchange.respond(self._status, [kind, *self._headers], out)

    def _tell_error(self, status: int, failure: Failure) -> None:
        """An error of the provider's, status kept, in the caller's words (P-18)."""
        self._is_ended = True
        kind = error_type(status, self._source)
        body: dict[str, Any]
        if self._source.is_anthropic:
            error: dict[str, Any] = {"type": kind, "message": failure.message}
            if failure.code is not None:
                error["code"] = failure.code
            body = {"type": "error", "error": error, "request_id": self._request_id}
        else:
            body = {"error": {"message": failure.message, "type": kind, "param": None, "code": failure.code}}
        self._exchange.respond(status, [_JSON, *self._headers], json_text(body))

    def _refuse(self, error: IopError) -> None:
        self._is_ended = True
        self._fail(self._exchange, error)
