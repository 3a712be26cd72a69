"""Questions to an engine's own HTTP control routes: bounded, typed, without addresses in what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias, TypeVar
from urllib.parse import urlencode

import msgspec

from iop.adapters.http_exchange import HttpRequest, Origin, client_ssl_context
from iop.adapters.http_upstream import CONNECT_TIMEOUT_S, HttpUpstream
from iop.core.errors import InvalidRequest, IopError, RemoteProtocolError, Unavailable
from iop.wire.messages import Header, OpenAICompatSettings

Shape = TypeVar("Shape")

ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
"""A name, path, label or version; a longer one is none, and would not fit into what a Node reports."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]

QUESTION_TIMEOUT_S: Final = 5.0
"""For what an engine answers from memory; a step asks again as long as it has time."""

ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
"""Largest control answer: an engine's metrics and its API description are some hundred KiB each."""

WORDS_MAX: Final = 300
"""How much of an engine's own words goes into an error."""


class _Nested(msgspec.Struct):
    message: str = ""


class _NestedError(msgspec.Struct):
    error: _Nested | str | None = None
    detail: Any = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """One whole answer of a control route."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Whether the status says success; what was done is another question (AD-37)."""
        return 200 <= self.status < 300

    def read(self, shape: type[Shape]) -> Shape:
        """The body as JSON of a known shape. Raises RemoteProtocolError."""
        try:
            return msgspec.json.decode(self.body, type=shape)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as exc:
            raise RemoteProtocolError(
                "the engine's answer has an unknown form", reason="BAD_ENGINE_ANSWER"
            ) from exc

    @property
    def words(self) -> str:
        """What the engine says in an error, whatever its dialect; bounded and on one line."""
        text = ""
        try:
            error = msgspec.json.decode(self.body, type=_NestedError)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            text = self.body[: 4 * WORDS_MAX].decode("utf-8", "replace")
        else:
            nested = error.error
            text = nested.message if isinstance(nested, _Nested) else nested or ""
            text = text or error.message or (str(error.detail) if error.detail is not None else "")
        return " ".join(text.split())[:WORDS_MAX] or f"status {self.status}"


class EngineHttp:
    """The control side of one HTTP engine.

    Args:
        settings: where it is and its credential, which also goes to routes that do not ask for one.

    Raises:
        InvalidRequest: an endpoint, key or authority that cannot work.
    """

    def __init__(self, settings: OpenAICompatSettings) -> None:
        origin = Origin.parse(settings.endpoint)
        self._upstream = HttpUpstream(
            origin,
            ssl_context=client_ssl_context(settings.tls_ca_pem) if origin.is_tls else None,
            connect_timeout_s=settings.connect_timeout_sec or CONNECT_TIMEOUT_S,
        )
        self._headers: list[Header] = [(b"Accept", b"*/*")]
        if settings.api_key:
            if not settings.api_key.isascii():
                raise InvalidRequest("api_key: must be printable ASCII", reason="BAD_API_KEY")
            self._headers.append((b"Authorization", b"Bearer " + settings.api_key.encode("ascii")))

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Open for questions."""
        self._upstream.start(tasks)

    async def aclose(self) -> None:
        """Close connections."""
        await self._upstream.aclose()

    async def get(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        headers: Sequence[Header] = (),
        timeout_s: float = QUESTION_TIMEOUT_S,
    ) -> EngineAnswer:
        """Ask. Raises Unavailable, DeadlineExceeded, RemoteProtocolError or Overloaded."""
        return await self._ask(b"GET", path, query or {}, (), headers, timeout_s)

    async def get_all(self, *paths: str) -> list[EngineAnswer]:
        """Ask several things at once: a busy server takes as long for all as for one. Raises as :meth:`get`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self.get(path), name=f"engine.get {path}") for path in paths]
        except BaseExceptionGroup as group:
            failures = group.subgroup(IopError)
            if failures is None or len(failures.exceptions) != len(group.exceptions):
                raise
            raise failures.exceptions[0] from None
        return [task.result() for task in asked]

    async def post(
        self,
        path: str,
        body: object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        headers: Sequence[Header] = (),
        timeout_s: float = QUESTION_TIMEOUT_S,
    ) -> EngineAnswer:
        """Tell, once: what broke off is never sent again. ``body`` is sent as JSON; absent: none at all.

        Raises as :meth:`get`; after any of these the effect is not known.
        """
        content = () if body is None else (msgspec.json.encode(body),)
        return await self._ask(b"POST", path, query or {}, content, headers, timeout_s)

    async def _ask(
        self,
        method: bytes,
        path: str,
        query: Mapping[str, str],
        content: tuple[bytes, ...],
        more: Sequence[Header],
        timeout_s: float,
    ) -> EngineAnswer:
        headers = [*self._headers, *more]
        if content:
            headers.append((b"Content-Type", b"application/json"))
        target = f"{path}?{urlencode(query)}" if query else path
        response = await self._upstream.fetch(
            HttpRequest(
                method=method,
                path=target.encode("ascii"),
                headers=headers,
                body=content,
                headers_timeout_s=timeout_s,
            ),
            body_bytes_max=ANSWER_BYTES_MAX,
        )
        if response.status == 401:
            raise Unavailable("the engine refuses the configured api_key", reason="ENGINE_REFUSES_KEY")
        return EngineAnswer(
            status=response.status,
            headers={
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers
            },
            body=response.body,
        )
