"""Traces over the hops of a request: W3C trace context, and what a tracer is to the code that is traced (SF-13, SF-32).

Every hop works alike: read the context that came in, start a span under it, send the span's own context on. What
came in is a stranger's word: a malformed context counts as none, as its standard wants, and a new trace begins. Code
here needs no tracing library; :mod:`iop.obs.otel` implements :class:`Tracer` where the config asks for traces. Where
it does not, there is no tracer, and a request pays for one comparison with ``None`` per hop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final, Protocol, TypeAlias

__all__ = [
    "TRACE_FIELDS",
    "AttributeValue",
    "Span",
    "SpanKind",
    "TraceContext",
    "Tracer",
    "parse_trace",
    "passed_trace",
    "read_trace",
    "with_trace",
]

HeaderFields: TypeAlias = Iterable[tuple[bytes, bytes]]
AttributeValue: TypeAlias = str | int | float | bool

TRACE_FIELDS: Final = frozenset({b"traceparent", b"tracestate"})
"""The header fields of the standard, in lower case."""

TRACESTATE_CHARS_MAX: Final = 512
"""What the standard asks everybody to carry; more is let go, whole, because a part would be no list."""

TRACESTATE_MEMBERS_MAX: Final = 32

_PARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?"
)
_STATE: Final = re.compile(r"[ -~\t]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """One span as another hop knows it.

    Attributes:
        trace_id: 32 lower-case hexadecimal digits, not all zero.
        span_id: 16 of them.
        flags: 8 bits; the lowest says that the trace is being recorded.
        state: vendors' own values, as in ``tracestate``; may be empty.
    """

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The context as the header says it."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def fields(self) -> list[tuple[bytes, bytes]]:
        """The header fields for the next hop."""
        fields = [(b"traceparent", self.traceparent.encode("ascii"))]
        if self.state:
            fields.append((b"tracestate", self.state.encode("ascii")))
        return fields


@unique
class SpanKind(Enum):
    """How a span stands to its neighbours."""

    SERVER = "server"
    INTERNAL = "internal"
    CLIENT = "client"


class Span(Protocol):
    """One timed part of a request. Safe after its end: later calls do nothing."""

    @property
    def context(self) -> TraceContext:
        """What the next hop gets as its parent."""
        ...

    def set(self, name: str, value: AttributeValue) -> None:
        """Tell more of it. Never prompts, answers or credentials."""
        ...

    def event(self, name: str) -> None:
        """Something happened now."""
        ...

    def end(self, *, error: str = "") -> None:
        """It is over; ``error`` is a stable code, empty when it went well. Idempotent."""
        ...


class Tracer(Protocol):
    """Starts spans."""

    def start(
        self,
        name: str,
        *,
        kind: SpanKind,
        parent: TraceContext | None,
        attributes: Mapping[str, AttributeValue],
    ) -> Span:
        """Start a span now, under ``parent`` or as the first of a new trace."""
        ...


def parse_trace(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """A context from its two values; None if ``traceparent`` is not well-formed.

    A malformed ``tracestate`` is dropped and the rest kept. Versions after 00 are read as far as 00 goes.
    """
    match = _PARENT.fullmatch(traceparent)
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    return TraceContext(
        trace_id=match[2],
        span_id=match[3],
        flags=int(match[4], 16),
        state=tracestate if _is_state(tracestate) else "",
    )


def read_trace(fields: HeaderFields) -> TraceContext | None:
    """The context that a request brought; None if it brought none, several, or a malformed one.

    Args:
        fields: header fields, names in lower case.
    """
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in fields:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1:
        return None
    return parse_trace(parents[0].decode("latin-1"), b",".join(states).decode("latin-1"))


def passed_trace(fields: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The trace fields of a request as they may go on where this hop records nothing: as they came, or none."""
    context = read_trace(fields)
    if context is None:
        return []
    return [field for field in fields if field[0] == b"traceparent" or context.state]


def with_trace(fields: HeaderFields, context: TraceContext) -> list[tuple[bytes, bytes]]:
    """Header fields with ``context`` in the place of whatever they said of traces."""
    return [*(field for field in fields if field[0].lower() not in TRACE_FIELDS), *context.fields()]


def _is_state(text: str) -> bool:
    return (
        len(text) <= TRACESTATE_CHARS_MAX
        and text.count(",") < TRACESTATE_MEMBERS_MAX
        and _STATE.fullmatch(text) is not None
    )
