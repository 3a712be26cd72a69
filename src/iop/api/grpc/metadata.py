"""Routing metadata of an inference call, and text in headers (SF-21, AD-33)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from iop.api.grpc.ports import RoutingHints
from iop.core.errors import InvalidRequest
from iop.obs.tracing import parse_trace

__all__ = ["WEIGHT_VERSION_KEY", "header_text", "read_hints"]

ROUTING_KEY: Final = "openengine-routing-key"
TARGET_DP_RANK: Final = "openengine-target-dp-rank"
PRIORITY: Final = "openengine-priority"
WEIGHT_VERSION_KEY: Final = "openengine-weight-version"

ROUTING_KEY_CHARS_MAX: Final = 256
"""Longest affinity key; it is kept per queued call."""

_PRINTABLE: Final = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_UNSIGNED: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_SIGNED: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,9})")


def read_hints(metadata: Iterable[tuple[str, str | bytes]]) -> RoutingHints:
    """Read the keys of the contract; others are not ours to judge.

    A malformed trace context counts as none, as its own standard wants; a malformed or repeated key of OpenEngine is an
    error, since acting on half of a routing wish would be worse than refusing it.

    Raises:
        InvalidRequest: MALFORMED_METADATA or REPEATED_METADATA, naming the key.
    """
    found: dict[str, list[str]] = {}
    for key, value in metadata:
        if key in {ROUTING_KEY, TARGET_DP_RANK, PRIORITY, "traceparent", "tracestate"}:
            found.setdefault(key, []).append(value if isinstance(value, str) else value.decode("latin-1"))
    for key in (ROUTING_KEY, TARGET_DP_RANK, PRIORITY):
        if len(found.get(key, ())) > 1:
            raise _bad(key, "may be given once", "REPEATED_METADATA")
    routing_key = _only(found, ROUTING_KEY)
    if routing_key is not None and (
        len(routing_key) > ROUTING_KEY_CHARS_MAX or _PRINTABLE.fullmatch(routing_key) is None
    ):
        raise _bad(ROUTING_KEY, f"must be 1 to {ROUTING_KEY_CHARS_MAX} printable ASCII characters")
    parents = found.get("traceparent", [])
    trace = parse_trace(parents[0], ",".join(found.get("tracestate", ()))) if len(parents) == 1 else None
    return RoutingHints(
        routing_key=routing_key or "",
        target_dp_rank=_number(found, TARGET_DP_RANK, _UNSIGNED, low=0, high=2**32 - 1),
        priority=_number(found, PRIORITY, _SIGNED, low=-(2**31), high=2**31 - 1),
        traceparent="" if trace is None else trace.traceparent,
        tracestate="" if trace is None else trace.state,
    )


def header_text(text: str) -> str:
    """Free text as a header value: itself where it can travel, percent-encoded where it cannot."""
    return text if _PRINTABLE.fullmatch(text) else quote(text, safe="")


def _only(found: dict[str, list[str]], key: str) -> str | None:
    values = found.get(key)
    return values[0] if values else None


def _number(
    found: dict[str, list[str]], key: str, form: re.Pattern[str], *, low: int, high: int
) -> int | None:
    text = _only(found, key)
    if text is None:
        return None
    # The form is checked before int(), which would also take underscores, spaces and other scripts' digits.
    if form.fullmatch(text) is None or not low <= int(text) <= high:
        raise _bad(key, f"must be a decimal number from {low} to {high}")
    return int(text)


def _bad(key: str, rule: str, reason: str = "MALFORMED_METADATA") -> InvalidRequest:
    return InvalidRequest(f"The metadata key {key} {rule}.", reason=reason, details={"key": key})
