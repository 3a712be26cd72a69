"""The data-parallel ranks of an engine that a caller can ask for, and their short form (SF-21, SF-22).

An engine may run a model several times side by side, each replica with a KV cache of its own; its number is the rank.
Whoever knows which replica has a prefix cached asks for that one. The short form names ranks and spans of them, as in
``0-3,8``; it travels in ``ProviderSnapshot.capabilities``, which older peers ignore.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = [
    "RANKS_CAPABILITY",
    "RANKS_EXTRA_KEY",
    "RANKS_MAX",
    "RANK_MAX",
    "read_ranks",
    "served_ranks",
    "write_ranks",
]

RANKS_CAPABILITY: Final = "data_parallel_ranks:"
"""Beginning of the capability of one target. No such capability: the engine was not asked yet."""

RANKS_EXTRA_KEY: Final = "iop.data_parallel_ranks"
"""Key in ``ModelInfo.extra`` with the short form: ranks may differ by model where one server stands for many."""

RANK_MAX: Final = 2**32 - 1

RANKS_MAX: Final = 1024
"""Most ranks of one engine; what claims more is not believed at all."""

_SPAN: Final = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")


def served_ranks(
    *, size: int | None, rank: int | None = None, start_rank: int | None = None
) -> frozenset[int]:
    """The ranks that one server serves, from what it says of its parallelism.

    Args:
        size: replicas; ``None`` or nought: it names none that could be asked for.
        rank: the replica that the server is, where it is one of several.
        start_rank: the first replica behind the server.
    """
    if not size or size > RANKS_MAX:
        return frozenset()
    if start_rank is None and rank is not None:
        return frozenset({rank})
    first = start_rank or 0
    return frozenset(range(first, first + size)) if first + size - 1 <= RANK_MAX else frozenset()


def write_ranks(ranks: Iterable[int]) -> str:
    """The short form; empty for none."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def read_ranks(text: str) -> frozenset[int]:
    """The ranks of a short form; one that cannot be read, or names too many, names none."""
    ranks: set[int] = set()
    for part in text.split(",", RANKS_MAX) if text else ():
        span = _SPAN.fullmatch(part)
        if span is None:
            return frozenset()
        first = int(span[1])
        last = first if span[2] is None else int(span[2])
        if not first <= last <= RANK_MAX or last - first >= RANKS_MAX - len(ranks):
            return frozenset()
        ranks.update(range(first, last + 1))
    return frozenset(ranks)
