"""What a call's metadata tells of the hops before this one, and what its answer tells of this one (SF-13, SF-24)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from iop.api.grpc.metadata import PRIORITY, ROUTING_KEY
from iop.api.grpc.ports import RoutingHints
from iop.edge.chain import VIA_FIELD, read_via

__all__ = ["IGNORED_KEY", "Hops", "ignored_hints", "ignored_names", "read_hops", "with_ignored"]

REQUEST_ID_KEY: Final = "x-request-id"

IGNORED_KEY: Final = "iop-ignored"
"""Names the metadata keys of the call that its API key may not use: they were not followed, and that is said."""

_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")


class Hops(NamedTuple):
    """The Edges that a call came through, and the request id that the first of them gave; empty where unknown."""

    via: str
    request_id: str


def read_hops(metadata: Iterable[tuple[str, str | bytes]]) -> Hops:
    """Read them. An id that could not stand in a log line is none; so is one that comes twice."""
    via: list[str | bytes] = []
    ids: list[str] = []
    for key, value in metadata:
        if key == VIA_FIELD:
            via.append(value)
        elif key == REQUEST_ID_KEY:
            ids.append(value if isinstance(value, str) else value.decode("latin-1"))
    is_one = len(ids) == 1 and _REQUEST_ID.fullmatch(ids[0]) is not None
    return Hops(via=read_via(via), request_id=ids[0] if is_one else "")


def ignored_names(told: str) -> tuple[tuple[str, str], ...]:
    """Answer metadata with those of the names that are keys of a call; whatever else a peer says is let go."""
    said = {name.strip() for name in told.split(",")}
    names = [key for key in (PRIORITY, ROUTING_KEY) if key in said]
    return ((IGNORED_KEY, ", ".join(names)),) if names else ()


def with_ignored(
    metadata: Iterable[tuple[str, str]], told: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """Answer metadata in which all hints that somebody on the way did not follow stand in one place."""
    mine, others = [], [value for key, value in told if key == IGNORED_KEY]
    for key, value in metadata:
        if key == IGNORED_KEY:
            others.append(value)
        else:
            mine.append((key, value))
    return (*mine, *ignored_names(",".join(others)))


def ignored_hints(said: RoutingHints, taken: RoutingHints) -> tuple[tuple[str, str], ...]:
    """Answer metadata that names the hints which were not followed; none when all were."""
    names = [
        key
        for key, is_ignored in (
            (PRIORITY, said.priority != taken.priority),
            (ROUTING_KEY, said.routing_key != taken.routing_key),
        )
        if is_ignored
    ]
    return ((IGNORED_KEY, ", ".join(names)),) if names else ()
