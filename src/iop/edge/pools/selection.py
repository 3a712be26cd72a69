"""Which of the providers with room gets the request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from iop.core.ids import ModelId
from iop.edge.calls import ProviderKey

AFFINITIES_MAX: Final = 10_000
"""Sessions remembered; the least recently used goes first. Losing one costs a cache hit, never correctness."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A provider with room for the request.

    Attributes:
        index: of the pool member in the config.
        load: in-flight over capacity x weight, after this request would have been added.
        pressure: recent failures, 0 to 1 (EN-116).
        last_picked: number of its last pick; breaks ties in turn.
        was_tried: an earlier attempt of the same request failed there.
    """

    index: int
    key: ProviderKey
    name: str
    load: float
    pressure: float
    last_picked: int
    was_tried: bool = False


def choose(
    candidates: Iterable[Candidate], *, sticky: ProviderKey | None = None, preferred: str = ""
) -> Candidate | None:
    """The best candidate: untried, then the session's own, the hinted one, the least loaded; failures count as load."""
    best: Candidate | None = None
    best_score: tuple[bool, bool, bool, float, int] | None = None
    for candidate in candidates:
        score = (
            candidate.was_tried,
            candidate.key != sticky,
            not preferred or candidate.name != preferred,
            candidate.load + candidate.pressure,
            candidate.last_picked,
        )
        if best_score is None or score < best_score:
            best, best_score = candidate, score
    return best


class Affinities:
    """Which provider served a session last: bounded, least recently used first out."""

    def __init__(self, maximum: int = AFFINITIES_MAX) -> None:
        self._maximum = maximum
        self._last: OrderedDict[tuple[ModelId, str], ProviderKey] = OrderedDict()

    def find(self, model: ModelId, session: str) -> ProviderKey | None:
        """The provider of this session, if it is remembered."""
        return self._last.get((model, session)) if session else None

    def note(self, model: ModelId, session: str, key: ProviderKey) -> None:
        """Remember who serves the session now."""
        if not session:
            return
        self._last[model, session] = key
        self._last.move_to_end((model, session))
        if len(self._last) > self._maximum:
            self._last.popitem(last=False)
