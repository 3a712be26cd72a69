"""Calls as they go over the wire: any bytes out, every event, status and detail back.

Nothing here repairs, retries or interprets: a check must see what the server really said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import grpc
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from iop.conformance.messages import pb
from iop.conformance.model import CheckFailed, require

__all__ = ["METHODS", "MUTATIONS", "SERVICE", "Answer", "Stream", "call", "open_stream", "with_unknown"]

_DESCRIPTOR: Final = pb.DESCRIPTOR.services_by_name["OpenEngineAdmin"]
SERVICE: Final[str] = _DESCRIPTOR.full_name
METHODS: Final[Mapping[str, Any]] = MappingProxyType({method.name: method for method in _DESCRIPTOR.methods})
"""Method descriptors by RPC name."""

_READING: Final = frozenset(
    {"GetOperation", "CancelOperation", "GetAdminProfile", "ListOperations", "WatchOperation"}
)
MUTATIONS: Final[tuple[str, ...]] = tuple(name for name in METHODS if name not in _READING)
"""RPCs that carry an idempotency key."""

TERMINAL: Final = frozenset({"completed", "failed", "cancelled"})

_UNKNOWN_FIELD: Final = 1_999
_DETAILS_KEY: Final = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that came of one call.

    Attributes:
        messages: what was received before it ended.
        code: its status.
        text: the status message.
        reason: of ErrorInfo; empty without one.
        metadata: of ErrorInfo.
        has_error_info: whether the status carried one.
    """

    rpc: str
    messages: tuple[Any, ...]
    code: grpc.StatusCode
    text: str = ""
    reason: str = ""
    domain: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    has_error_info: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether the call ended with OK."""
        return self.code is grpc.StatusCode.OK

    @property
    def operation_id(self) -> str:
        """Of the operation that the call began or found; empty if none."""
        for message in self.messages:
            if message.DESCRIPTOR.fields_by_name.get("operation_id") and message.operation_id:
                return str(message.operation_id)
        return ""

    @property
    def terminal(self) -> Any:
        """The last event, which must be a terminal one.

        Raises:
            CheckFailed: the call was refused, or its stream ended otherwise.
        """
        what = f"end after {len(self.messages)} events with" if self.messages else "refused:"
        wants = "one terminal event, then OK (AD-21)" if self.messages else "the request to be accepted"
        require(self.is_ok, saw=f"{self.rpc} {what} {self.told()}", wants=wants)
        require(
            self.messages,
            saw=f"a stream of {self.rpc} without any event",
            wants="events up to a terminal one",
        )
        last = self.messages[-1]
        require(
            last.WhichOneof("event") in TERMINAL,
            saw=f"the stream of {self.rpc} end after {last.WhichOneof('event')}",
            wants="exactly one terminal event at the end (AD-21)",
        )
        return last

    @property
    def completed(self) -> Any:
        """The completed event.

        Raises:
            CheckFailed: it ended otherwise.
        """
        last = self.terminal
        which = last.WhichOneof("event")
        why = last.failed.error.message if which == "failed" else ""
        require(which == "completed", saw=f"{self.rpc} end {which} {why}".rstrip(), wants="it to complete")
        return last.completed

    @property
    def message(self) -> Any:
        """The one message of an answer that is no stream.

        Raises:
            CheckFailed: the call was refused.
        """
        require(self.is_ok, saw=f"{self.rpc} refused: {self.told()}", wants="an answer")
        return self.messages[0]

    def told(self) -> str:
        """The status in words."""
        if self.is_ok:
            kinds = [_kind(message) for message in self.messages]
            return f"OK with {', '.join(kinds) or 'nothing'}"
        return f"{self.code.name} {self.reason or '(no ErrorInfo)'} {self.text!r}"

    def refused(self, code: grpc.StatusCode, *, reason: str = "", where: str = "", wants: str = "") -> Answer:
        """This answer, which must be a refusal with this status, an ErrorInfo and, if given, this reason.

        Raises:
            CheckFailed: it is not.
        """
        place = f" for {where}" if where else ""
        wish = wants or f"{code.name}{' ' + reason if reason else ''}"
        require(self.code is code, saw=f"{self.rpc} answer {self.told()}{place}", wants=wish)
        require(
            self.has_error_info and self.reason,
            saw=f"{self.rpc} refused with {code.name} without google.rpc.ErrorInfo{place}",
            wants="an ErrorInfo with a stable reason on every refusal (AD-17)",
        )
        if reason:
            require(
                self.reason == reason,
                saw=f"the reason {self.reason}{place} of {self.rpc}",
                wants=f"the reason {reason}",
            )
        return self

    def names(self, text: str) -> bool:
        """Whether the refusal says this word: in its metadata or its message."""
        return text in self.text or any(text in value for value in self.metadata.values())


def _kind(message: Any) -> str:
    if "event" in message.DESCRIPTOR.oneofs_by_name:
        return str(message.WhichOneof("event"))
    return str(message.DESCRIPTOR.name)


class Stream:
    """A call that is open: read some, look on, or leave."""

    def __init__(self, rpc: str, raw: Any) -> None:
        self.rpc = rpc
        self.seen: list[Any] = []
        self._raw = raw

    async def next(self, *, timeout_s: float = 10.0) -> Any:
        """The next event.

        Raises:
            CheckFailed: none came in time, or the stream ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._raw.read()
        except TimeoutError:
            raise CheckFailed(saw=f"no event of {self.rpc} for {timeout_s:g} s", wants="one") from None
        except grpc.aio.AioRpcError as error:
            told = _answer(self.rpc, self.seen, error).told()
            raise CheckFailed(saw=f"{self.rpc} end with {told}", wants="a further event") from None
        if message is grpc.aio.EOF:
            code = await self._raw.code()
            if code is not grpc.StatusCode.OK:
                answer = await self._ended()
                raise CheckFailed(saw=f"{self.rpc} end with {answer.told()}", wants="a further event")
            raise CheckFailed(saw=f"the stream of {self.rpc} end", wants="a further event")
        self.seen.append(message)
        return message

    async def first(self) -> Any:
        """The first event, which must say that the operation was accepted."""
        event = await self.next()
        require(
            event.WhichOneof("event") == "accepted",
            saw=f"the first event of {self.rpc} be {event.WhichOneof('event')}",
            wants="accepted",
        )
        return event

    async def rest(self, *, timeout_s: float = 20.0) -> Answer:
        """Everything to the end of the call."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._raw.read()
                    if message is grpc.aio.EOF:
                        break
                    self.seen.append(message)
                return await self._ended()
        except TimeoutError:
            self.leave()
            raise CheckFailed(
                saw=f"the stream of {self.rpc} still open after {timeout_s:g} s", wants="a terminal event"
            ) from None
        except grpc.aio.AioRpcError as error:
            return _answer(self.rpc, self.seen, error)

    async def _ended(self) -> Answer:
        code = await self._raw.code()
        if code is grpc.StatusCode.OK:
            return Answer(rpc=self.rpc, messages=tuple(self.seen), code=code)
        error = grpc.aio.AioRpcError(
            code,
            await self._raw.initial_metadata(),
            await self._raw.trailing_metadata(),
            details=await self._raw.details(),
        )
        return _answer(self.rpc, self.seen, error)

    def leave(self) -> None:
        """Cancel the call: the observer goes, the operation must not."""
        self._raw.cancel()


def open_stream(
    channel: grpc.aio.Channel,
    rpc: str,
    request: Message | bytes,
    *,
    metadata: Sequence[tuple[str, str]],
    timeout_s: float,
) -> Stream:
    """Begin a call whose answer is a stream."""
    make = channel.unary_stream(
        f"/{SERVICE}/{rpc}", request_serializer=_to_bytes, response_deserializer=_reader(rpc)
    )
    return Stream(rpc, make(request, metadata=tuple(metadata), timeout=timeout_s))


async def call(
    channel: grpc.aio.Channel,
    rpc: str,
    request: Message | bytes,
    *,
    metadata: Sequence[tuple[str, str]],
    timeout_s: float,
) -> Answer:
    """Make one call and take all of its answer; a status is an answer, never an exception."""
    if METHODS[rpc].server_streaming:
        stream = open_stream(channel, rpc, request, metadata=metadata, timeout_s=timeout_s)
        return await stream.rest(timeout_s=timeout_s + 2.0)
    make = channel.unary_unary(
        f"/{SERVICE}/{rpc}", request_serializer=_to_bytes, response_deserializer=_reader(rpc)
    )
    try:
        message = await make(request, metadata=tuple(metadata), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return _answer(rpc, [], error)
    return Answer(rpc=rpc, messages=(message,), code=grpc.StatusCode.OK)


def _answer(rpc: str, messages: Sequence[Any], error: grpc.aio.AioRpcError) -> Answer:
    info = error_details_pb2.ErrorInfo()
    has_info = False
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY:
            continue
        status = status_pb2.Status()
        try:
            status.ParseFromString(value)
        except DecodeError:
            continue
        for detail in status.details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                has_info = detail.Unpack(info)
    return Answer(
        rpc=rpc,
        messages=tuple(messages),
        code=error.code(),
        text=error.details() or "",
        reason=info.reason,
        domain=info.domain,
        metadata=dict(info.metadata),
        has_error_info=has_info,
    )


def _to_bytes(request: Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


def _reader(rpc: str) -> Any:
    return message_factory.GetMessageClass(METHODS[rpc].output_type).FromString


def with_unknown(request: Message, path: Sequence[str] = ()) -> bytes:
    """The request with a field that no server knows, inside the message at `path` (which must be singular).

    A second occurrence of a singular message is merged into the first, so the rest of the request stays as it is.
    """
    payload = _varint(_UNKNOWN_FIELD << 3) + _varint(1)
    fields = []
    descriptor: Any = request.DESCRIPTOR
    for name in path:
        field = descriptor.fields_by_name[name]
        fields.append(field)
        descriptor = field.message_type
    for field in reversed(fields):
        payload = _varint(field.number << 3 | 2) + _varint(len(payload)) + payload
    return bytes(request.SerializeToString()) + payload


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
