"""Signs of life on streams that a KEEP pause froze.

A frozen stream may be silent for minutes, and what stands between (load balancers, proxies, clients) takes silence for
a dead peer. So the Edge adds a comment now and then, between events, where SF-03 allows it; parsers skip it. It is one
line without a blank one, which some parsers would take for the end of an empty event.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from iop.api.http.exchange import Exchange

__all__ = ["beat_while_frozen"]

BEAT_S: Final = 10.0
"""Seconds between looks at a stream; idle limits of proxies begin at 30 s."""

COMMENT: Final = b": paused\n"


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
