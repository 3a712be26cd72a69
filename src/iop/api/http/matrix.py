"""What a model's pool can really do, for callers and operators: routes, what goes in, lengths, limits (SF-01).

Routes are those of the configured providers, without what a Node found its engine not to have. Facts are those of the
providers that are there now: a request may land on any of them, so what is promised is what all of them said. What one
did not say is unknown (null), and is never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from iop.api.http.convert.plan import conversion_for
from iop.api.http.limits import HttpLimits
from iop.api.http.operations import PATHS
from iop.core.ids import NodeId, ProviderId
from iop.edge.calls import RUN_OPERATIONS, TOKENIZE, ProviderKey, Route
from iop.edge.snapshot import AdapterSpec, EdgeSnapshot, ModelSpec
from iop.wire.data_parallel import RANKS_CAPABILITY, read_ranks, write_ranks
from iop.wire.messages import ProviderSnapshot
from iop.wire.model_facts import ABSENT_OPERATIONS, MODEL_FACTS, ModelFacts, decode_facts, read_names

__all__ = ["FindReport", "SurfaceMatrix", "nobody_told"]

FindReport = Callable[[NodeId, ProviderId], ProviderSnapshot | None]
"""What a Node last told of one of its engines; None while it is not there."""

_KNOWN: Final = frozenset({*PATHS, TOKENIZE})

_NOTHING: Final[frozenset[str]] = frozenset()
_DOWN: Final = frozenset({"unavailable"})


def nobody_told(_node: NodeId, _provider: ProviderId) -> ProviderSnapshot | None:
    """No Node has told anything."""
    return None


class SurfaceMatrix:
    """Judges pools by the running configuration and by what Nodes told.

    Args:
        find_report: the latest report of a provider.
        limits: of the public listener.
    """

    def __init__(self, find_report: FindReport = nobody_told, *, limits: HttpLimits | None = None) -> None:
        self._find_report = find_report
        self._limits = limits or HttpLimits()

    def absent(self, key: ProviderKey) -> frozenset[str]:
        """Operations that this provider's engine was found not to have."""
        report = self._find_report(key.node, key.provider)
        if report is None or not (told := report.capabilities.get(ABSENT_OPERATIONS)):
            return _NOTHING
        return read_names(told)

    def tunnelled(self, snapshot: EdgeSnapshot, model: ModelSpec) -> list[str]:
        """Operations that at least one provider serves by tunnel."""
        offered: set[str] = set()
        for key, adapter in _members(snapshot, model):
            if adapter.route is Route.TUNNEL:
                offered |= self._offered(key, adapter) - {TOKENIZE}
        return sorted(offered)

    def of(self, snapshot: EdgeSnapshot, model: ModelSpec) -> dict[str, Any]:
        """Everything of one model.

        ``endpoints`` says how each route is served, by whichever members of the pool: ``tunnel``: untouched;
        ``run``: as a normalised run; ``converted``: in another dialect, which ``conversions`` names by its
        operation; ``estimate``: by the Edge, marked (SF-14). What is missing is refused.
        """
        return {**self._routes(snapshot, model), **self._facts(snapshot, model)}

    # ---- inside ----

    def _offered(self, key: ProviderKey, adapter: AdapterSpec) -> frozenset[str]:
        if adapter.route is Route.RUN:
            return RUN_OPERATIONS
        configured = (adapter.operations or frozenset(PATHS)) | adapter.profile_operations
        return (configured & _KNOWN) - self.absent(key)

    def _routes(self, snapshot: EdgeSnapshot, model: ModelSpec) -> dict[str, Any]:
        ways: dict[str, set[str]] = {}
        conversions: dict[str, set[str]] = {}
        for key, adapter in _members(snapshot, model):
            way = "run" if adapter.route is Route.RUN else "tunnel"
            offered = self._offered(key, adapter)
            for operation in PATHS:
                if operation in offered:
                    ways.setdefault(operation, set()).add(way)
                elif (other := conversion_for(operation, offered)) is not None:
                    ways.setdefault(operation, set()).add("converted")
                    conversions.setdefault(operation, set()).add(other)
        if "messages" in ways and "count_tokens" not in ways:
            ways["count_tokens"] = {"estimate"}
        return {
            "endpoints": {path: sorted(ways[name]) for name, path in PATHS.items() if name in ways},
            "conversions": {
                path: sorted(conversions[name]) for name, path in PATHS.items() if name in conversions
            },
        }

    def _facts(self, snapshot: EdgeSnapshot, model: ModelSpec) -> dict[str, Any]:
        facts: list[ModelFacts] = []
        ranks: frozenset[int] = frozenset()
        configured = concurrent = long = 0
        for member in model.members:
            adapter = snapshot.find_adapter(member.key)
            if adapter is None or not adapter.enabled:
                continue
            configured += 1
            report = self._find_report(member.key.node, member.key.provider)
            if report is None or report.status in _DOWN:
                continue
            concurrent += adapter.capacity
            long += adapter.long_capacity
            told = decode_facts(report.capabilities.get(MODEL_FACTS + member.target, "{}"))
            facts.append(told)
            if not self._offered(member.key, adapter).isdisjoint(
                RUN_OPERATIONS
            ):  # what OpenEngine calls become
                ranks |= read_ranks(report.capabilities.get(RANKS_CAPABILITY + member.target, ""))
        lengths = [each.context_tokens for each in facts]
        known = [length for length in lengths if length is not None]
        return {
            "context_window": {
                "min": min(known) if known and len(known) == len(lengths) else None,
                "max": max(known, default=None),
            },
            "modalities": {
                "text": True,
                "image": _surely(each.images for each in facts),
                "audio": _surely(each.audio for each in facts),
            },
            "tools": _surely(each.tools for each in facts),
            "limits": {
                "concurrent": concurrent,
                "long_concurrent": long,
                "queue": model.queue.max_waiters,
                "body_bytes": self._limits.body_bytes,
                "total_timeout_sec": self._limits.total_timeout_s,
            },
            "data_parallel_ranks": write_ranks(ranks),
            "providers_configured": configured,
            "providers_live": len(facts),
        }


def _members(snapshot: EdgeSnapshot, model: ModelSpec) -> Iterable[tuple[ProviderKey, AdapterSpec]]:
    for member in model.members:
        adapter = snapshot.find_adapter(member.key)
        if adapter is not None and adapter.enabled:
            yield member.key, adapter


def _surely(each: Iterable[bool | None]) -> bool | None:
    """True if all said so, False if one said not, else unknown."""
    told = list(each)
    if False in told:
        return False
    return True if told and None not in told else None
