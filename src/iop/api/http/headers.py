"""Header hygiene between caller and provider (SF-04), and the headers of ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from iop.api.http.head import HeaderList, RequestHead
from iop.obs.tracing import TRACE_FIELDS, TraceContext, passed_trace, read_trace

__all__ = ["accepts_coding", "provider_headers", "request_headers", "request_id_of", "trace_of"]

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
"""Ids that callers may bring: visible ASCII, short enough for every log line and table."""

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)

_NEVER_TO_PROVIDER: Final = _HOP_BY_HOP | {
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"cookie",
    b"cookie2",
    b"host",
    b"content-length",
    b"expect",
    # Where the caller comes from is nobody's business behind the Edge (EN-04).
    b"forwarded",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-port",
    b"x-forwarded-proto",
    b"x-real-ip",
    # Our own id goes out under its name; what the caller sent may not have been a valid one.
    b"x-request-id",
    # The same holds for trace context: it goes on if it is well-formed (SF-13).
    *TRACE_FIELDS,
}

_NEVER_TO_CALLER: Final = _HOP_BY_HOP | {
    b"set-cookie",
    b"set-cookie2",
    b"content-length",
    b"date",
    b"alt-svc",
    # These name a place by its address; see below (EN-04).
    b"location",
    b"content-location",
    b"refresh",
    b"x-request-id",
}

_PLACES: Final = frozenset({b"location", b"content-location"})

_OURS: Final = b"x-iop-"

_OF_ANOTHER_EDGE: Final = frozenset(
    {b"x-iop-origin", b"x-iop-reason", b"x-iop-converted", b"x-iop-dropped", b"x-iop-estimate"}
)
"""What a provider that is an Edge itself says of its answer and the caller has to know: who made it, what was converted
or let go, that it is an estimate (SF-24). Its other fields tell of its own queue and providers."""

_USUAL_CONNECTIONS: Final = frozenset({b"keep-alive", b"close"})
_NOTHING: Final[frozenset[bytes]] = frozenset()


def request_id_of(head: RequestHead) -> str | None:
    """The request id that the caller brought, if it is one that may go into logs and headers."""
    value = head.get(b"x-request-id")
    if value is None or _REQUEST_ID.fullmatch(value) is None:
        return None
    return value.decode("ascii")


def request_headers(head: RequestHead, *, request_id: str, is_stream: bool) -> HeaderList:
    """The caller's headers that may reach a provider, with our request id.

    Hop-by-hop fields and those that ``Connection`` names stop here, and so do the caller's credentials,
    cookies and ``x-iop-*``. The rest passes, ``Accept-Encoding`` too, for the provider's bytes are never
    altered; only where the caller named none, and on streams, whose events are watched, ``identity`` is
    asked for (P-05).
    """
    named = _named_by_connection(head.headers)
    headers: HeaderList = []
    traced: HeaderList | None = None
    has_encoding = False
    for field in head.headers:
        name = field[0]
        if name in _NEVER_TO_PROVIDER:
            if name in TRACE_FIELDS:
                traced = traced or []
                traced.append(field)
            continue
        if name in named or name.startswith(_OURS):
            continue
        if name == b"accept-encoding":
            if is_stream:
                continue
            has_encoding = True
        headers.append(field)
    if not has_encoding:
        headers.append((b"accept-encoding", b"identity"))
    headers.append((b"x-request-id", request_id.encode("ascii")))
    if traced is not None:
        headers += passed_trace(traced)
    return headers


def trace_of(head: RequestHead) -> TraceContext | None:
    """The caller's trace context, if it brought a well-formed one (SF-13)."""
    return read_trace(head.headers)


def provider_headers(headers: Sequence[tuple[bytes, bytes]]) -> HeaderList:
    """The provider's headers that reach the caller, names in lower case; framing is ours to state."""
    kept: HeaderList = []
    named = _NOTHING
    for name, value in headers:
        lowered = name.lower()
        if lowered in _NEVER_TO_CALLER:
            if lowered == b"connection" and value.lower() not in _USUAL_CONNECTIONS:
                named |= _named_by_connection([(lowered, value)])
            elif lowered in _PLACES and value[:1] == b"/" and value[1:2] not in (b"/", b"\\"):
                kept.append((lowered, value))  # a path, which is the Edge's as well
        elif not lowered.startswith(_OURS) or lowered in _OF_ANOTHER_EDGE:
            kept.append((lowered, value))
    return [field for field in kept if field[0] not in named] if named else kept


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    named: set[bytes] | None = None
    for name, value in headers:
        if name == b"connection" and value.lower() not in _USUAL_CONNECTIONS:
            named = named or set()
            named.update(token.strip(b" \t").lower() for token in value.split(b","))
    # No one may have the framing of the body or its type dropped by naming it.
    return frozenset(named - {b"content-type", b"content-encoding", b""}) if named else _NOTHING


def accepts_coding(head: RequestHead, coding: bytes) -> bool:
    """Whether the caller's ``Accept-Encoding`` names ``coding`` and does not refuse it."""
    wildcard = False
    for value in head.get_all(b"accept-encoding"):
        for item in value.lower().split(b","):
            name, _, parameters = item.partition(b";")
            name = name.strip()
            is_wanted = parameters.replace(b" ", b"") not in (b"q=0", b"q=0.0", b"q=0.00", b"q=0.000")
            if name == coding or name == b"x-" + coding:
                return is_wanted
            if name == b"*":
                wildcard = is_wanted
    return wildcard
