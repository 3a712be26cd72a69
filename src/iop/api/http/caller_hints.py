"""What callers may say of their request in ``x-iop-*`` headers, as far as their key lets them (EN-110, SF-11)."""

from __future__ import annotations

from typing import Final

from iop.api.http.exchange import Exchange
from iop.api.http.keys import Caller
from iop.core.errors import InvalidRequest

__all__ = ["priority_of", "session_of"]

PRIORITY_DIGITS_MAX: Final = 4
"""Longest ``x-iop-priority``; the dispatcher clamps it anyway."""

SESSION_BYTES_MAX: Final = 128
"""Longest ``x-iop-session``; each is remembered for a while."""


def priority_of(exchange: Exchange, caller: Caller) -> int:
    """``x-iop-priority``; 0 where it is not there or not for this key. Raises InvalidRequest."""
    if caller.spec is None or not caller.spec.may_priority:
        return 0
    value = exchange.head.get(b"x-iop-priority")
    if value is None:
        return 0
    digits = value.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > PRIORITY_DIGITS_MAX:
        raise InvalidRequest("`x-iop-priority` must be a small integer.", details={"field": "x-iop-priority"})
    return int(value)


def session_of(exchange: Exchange, caller: Caller) -> str:
    """``x-iop-session``, within its key's own; empty where it is absent or not for this key. Raises InvalidRequest."""
    if caller.spec is None or not caller.spec.may_session:
        return ""
    value = exchange.head.get(b"x-iop-session")
    if value is None:
        return ""
    if len(value) > SESSION_BYTES_MAX or not value.isascii():
        raise InvalidRequest(
            f"`x-iop-session` must be at most {SESSION_BYTES_MAX} ASCII characters.",
            details={"field": "x-iop-session"},
        )
    # Two keys that choose the same word do not share a session.
    return f"{caller.name}:{value.decode('ascii')}"
