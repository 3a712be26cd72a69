"""A token count from a provider that has no route for counts but a tokenizer that takes chats (SF-14).

The conversation becomes a chat as it would to be generated from, and the tokenizer's ``count`` of it is the answer.
What a tokenizer of text cannot count, and what it does not answer, is left to the estimate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from iop.api.http.bulk import BulkFields
from iop.api.http.convert.losses import Losses, invalid
from iop.api.http.convert.messages_to_chat import messages_to_chat
from iop.api.http.convert.numbers import load_request
from iop.api.http.convert.shell import provider_head
from iop.api.http.errors import Dialect
from iop.api.http.exchange import Exchange
from iop.api.http.head import HeaderList
from iop.api.http.headers import request_headers
from iop.api.http.relay import NOT_COUNTABLE, Relay
from iop.api.http.splice import RequestFields
from iop.core.errors import InvalidRequest, IopError
from iop.edge.calls import TOKENIZE, TunnelCall
from iop.edge.dispatch import DispatchHandle
from iop.wire.messages import BodyFraming, Header, StreamError, StreamErrorCode

__all__ = ["TokenizeRelay", "count_of", "tokenize_call", "tokenize_request"]

_NO_COUNT: Final = frozenset(
    {
        NOT_COUNTABLE,
        StreamErrorCode.CONNECT_FAILED,
        StreamErrorCode.UPSTREAM_ERROR,
        StreamErrorCode.UPSTREAM_TRUNCATED,
        StreamErrorCode.TIMEOUT,
    }
)
"""Errors of a tokenizer's answer that are its provider's own. A Node that is lost, or an Edge that stops, says so."""

_READ: Final = ("system", "messages", "tools")
"""What of a request becomes prompt."""


def tokenize_request(fields: RequestFields | bytes, *, model: str) -> tuple[Sequence[bytes], int]:
    """What the tokenizer is asked, and how many bytes were made for it besides the caller's.

    Args:
        fields: the body of a token count; a valid JSON object.
        model: the provider's name for the model.

    Raises:
        InvalidRequest: it holds what a tokenizer of text cannot count, pictures say.
    """
    raw = fields if isinstance(fields, bytes) else fields.body
    strings = fields.strings if isinstance(fields, BulkFields) else None
    if not raw:
        raise invalid("messages", "is too large to be converted")
    body = load_request(raw)
    if strings is not None:
        body = strings.restore(body, "arguments")
    try:
        chat = messages_to_chat({name: body.get(name) for name in _READ}, Losses("a tokenizer's request"))
    except RecursionError:
        raise InvalidRequest("The body nests too deeply to be converted.", reason="JSON_TOO_DEEP") from None
    for index, message in enumerate(chat["messages"]):
        if not _is_text(message.get("content")):
            raise invalid(f"messages[{index}].content", "must be text to be counted")
    made: dict[str, Any] = {"model": model, "messages": chat["messages"], "add_generation_prompt": True}
    if "tools" in chat:
        made["tools"] = chat["tools"]
    text = json.dumps(made, separators=(",", ":")).encode()
    if strings is None:
        return [text], len(text)
    return strings.expand(text), len(text) + len(raw)


def tokenize_call(
    exchange: Exchange,
    sink: TokenizeRelay,
    parts: Sequence[bytes],
    *,
    session_id: str,
    request_id: str,
) -> TunnelCall:
    """The provider's request; its path is the profile's."""
    head = provider_head(exchange.head, Dialect.CHAT)
    return TunnelCall(
        operation=TOKENIZE,
        method="POST",
        path="/tokenize",
        headers=request_headers(head, request_id=request_id, is_stream=False),
        body=parts,
        sink=sink,
        session_id=session_id,
    )


def count_of(body: bytes) -> int | None:
    """The ``count`` of a tokenizer's answer; None where it has none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    count = value.get("count") if isinstance(value, dict) else None
    return count if type(count) is int and count >= 0 else None


class TokenizeRelay(Relay):
    """Sink of a tokenizer's answer: its count is the caller's, and any other answer leads to the estimate.

    Args:
        exchange: the caller's.
        estimate: answers by an estimate.
        bytes_max: longest answer that is read; it lists every token.
        begin: called before the count is answered; returns headers of ours.
        fail: answers an error.
    """

    __slots__ = ("_bytes_max", "_estimate", "_is_usable", "_read", "_read_bytes")

    def __init__(
        self,
        exchange: Exchange,
        *,
        estimate: Callable[[], None],
        bytes_max: int,
        begin: Callable[[Exchange, DispatchHandle, int], HeaderList],
        fail: Callable[[Exchange, IopError], None],
    ) -> None:
        super().__init__(
            exchange, dialect=Dialect.MESSAGES, choices=1, event_bytes_max=bytes_max, begin=begin, fail=fail
        )
        self._estimate = estimate
        self._bytes_max = bytes_max
        self._is_usable = False
        self._read: list[bytes] = []
        self._read_bytes = 0

    def on_response_start(
        self,
        *,
        status: int,
        headers: Sequence[Header],
        framing: BodyFraming,  # noqa: ARG002 - a body that was cut is no JSON, or ends in an error
    ) -> None:
        """Only a success, in clear as it was asked for, is read."""
        told: Mapping[bytes, bytes] = {name.lower(): value for name, value in headers}
        self._is_usable = (
            status == 200 and told.get(b"content-encoding", b"identity").strip().lower() == b"identity"
        )

    def on_body(self, data: bytes) -> None:
        """Keep what may be a count; nothing of it goes to the caller."""
        if self._is_usable:
            self._read.append(data)
            self._read_bytes += len(data)
            if self._read_bytes > self._bytes_max:
                self._is_usable = False
                self._read = []
        if self._handle is not None:
            self._handle.consumed(len(data))

    def on_end(self) -> None:
        """Answer by the count, or by the estimate."""
        handle, self._handle = self._handle, None
        exchange = self._exchange
        if exchange.is_ended or exchange.is_gone:
            return
        count = count_of(b"".join(self._read)) if self._is_usable else None
        if count is None or handle is None:
            exchange.release_body()
            self._estimate()
            return
        headers = self._begin(exchange, handle, 200)
        headers += [(b"content-type", b"application/json"), (b"x-iop-converted", TOKENIZE.encode())]
        exchange.respond(200, headers, orjson.dumps({"input_tokens": count}))

    def on_error(self, error: StreamError) -> None:
        """Nobody needs a tokenizer that is away, breaks or is slow: the estimate answers as well."""
        exchange = self._exchange
        if error.code not in _NO_COUNT:
            super().on_error(error)
            return
        self._handle = None
        if not (exchange.is_ended or exchange.is_gone):
            exchange.release_body()
            self._estimate()


def _is_text(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
