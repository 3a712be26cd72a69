"""Finds the tokenizer's merges: the most frequent neighbours become one token, again and again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from iop.engine.tokenizer import PIECE


def train_merges(texts: Iterable[str], *, specials: int, vocabulary: int) -> list[tuple[int, int]]:
    """Merges in order, until ``vocabulary`` ids exist. Ties go to the lower ids, so the result is reproducible."""
    pieces = Counter(match.group() for text in texts for match in PIECE.finditer(text))
    words = [
        ([specials + value for value in piece.encode()], count) for piece, count in sorted(pieces.items())
    ]
    merges: list[tuple[int, int]] = []
    while specials + 256 + len(merges) < vocabulary:
        pairs: dict[tuple[int, int], int] = defaultdict(int)
        for ids, count in words:
            for pair in pairwise(ids):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        token = specials + 256 + len(merges)
        merges.append(best)
        for ids, _ in words:
            at = 0
            while at < len(ids) - 1:
                if (ids[at], ids[at + 1]) == best:
                    ids[at : at + 2] = [token]
                at += 1
    return merges
