"""Signs of life on streams that wait in a queue, and then for a first token, or that a KEEP pause froze.

Such a stream may be silent for minutes, and what stands between (load balancers, proxies, clients) takes silence for
a dead peer. So the Edge adds a comment now and then, between events, where SF-03 allows it; parsers skip it. It is one
line without a blank one, which some parsers would take for the end of an empty event.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from iop.api.http.errors import Dialect, late_answer_event
from iop.api.http.exchange import Exchange
from iop.api.http.head import HeaderList
from iop.edge.handle import DispatchHandle

__all__ = ["beat_while_frozen", "comment_while_waiting"]

BEAT_S: Final = 10.0
"""Seconds between looks at a stream; idle limits of proxies begin at 30 s."""

COMMENT: Final = b": paused\n"

WORKING: Final = b": the provider has it\n"

_EVENTS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
)


def beat_while_frozen(exchange: Exchange, is_frozen: Callable[[], bool]) -> None:
    """Comment on the answer while ``is_frozen``; ends with the exchange.

    Call it for event streams only, and only where every write ends at the end of an event, in clear.
    """
    if not (exchange.is_ended or exchange.is_gone):
        exchange.after(BEAT_S, partial(_beat, exchange, is_frozen))


def _beat(exchange: Exchange, is_frozen: Callable[[], bool]) -> None:
    if is_frozen() and exchange.is_writable:
        exchange.write(COMMENT)
    beat_while_frozen(exchange, is_frozen)


def comment_while_waiting(
    exchange: Exchange, handle: DispatchHandle, *, every_s: float, headers: HeaderList, dialect: Dialect
) -> None:
    """Tell the caller of a stream its place in the queue every ``every_s`` seconds, the first time after as many.

    The first comment begins the answer: from then on whatever goes wrong is an event (EN-110, SF-06). An answer
    begun so goes on with comments while its provider reads the prompt, which may take as long as the wait did. One
    that was not is never begun for that: its head is the provider's.
    """
    if not (exchange.is_ended or exchange.is_gone or exchange.is_started):
        exchange.after(every_s, partial(_tell_place, exchange, handle, every_s, headers, dialect))


def _tell_place(
    exchange: Exchange, handle: DispatchHandle, every_s: float, headers: HeaderList, dialect: Dialect
) -> None:
    behind = handle.waiting_behind
    if behind is not None:
        place = (b"x-iop-queue-position", b"%d" % behind)
        exchange.start_early([*_EVENTS, *headers, place], late=partial(late_answer_event, dialect=dialect))
        if exchange.is_writable:
            exchange.comment(b": waiting behind %d\n" % behind)
    elif exchange.is_early and not exchange.is_started and exchange.is_writable:
        exchange.comment(WORKING)
    # It may wait again, where an attempt was in vain before anything was answered (EN-112).
    comment_while_waiting(exchange, handle, every_s=every_s, headers=headers, dialect=dialect)
