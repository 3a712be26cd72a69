"""What operators may read: ``iop status --json`` and ``iop explain``, as plain JSON values.

No address, token or transport internals of a Node are in here (EN-04).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from iop.core.clock import Clock
from iop.core.errors import InvalidRequest, NotFound
from iop.core.ids import NodeId
from iop.edge.calls import ProviderKey
from iop.edge.dispatch import Dispatcher
from iop.edge.nodes import Nodes
from iop.edge.outcomes import UNKNOWN_VERSION, OutcomeBook, RequestRecord
from iop.edge.participants import Participants
from iop.edge.pools import Pools
from iop.edge.snapshot import EdgeSnapshot
from iop.wire.messages import CommandRequest, CommandType, Usage

Json: TypeAlias = dict[str, Any]

_QUESTIONS: Final = {
    "usage": CommandType.USAGE,
    "capabilities": CommandType.CAPABILITIES,
    "sessions": CommandType.SESSIONS,
    "transport": CommandType.TRANSPORT,
    "providers": CommandType.PROVIDERS,
}

PROBED_DOWN: Final = frozenset({"offline", "not_ready"})
"""What a Node's probe calls an engine that cannot serve."""

SKEW_WARNING_MS: Final = 1000
"""A Node whose clock differs by more is worth a word: its logs will not line up (EN-113)."""


class Status:
    """Reads the whole Edge, changes nothing.

    Args:
        find_snapshot: the running configuration.
        now: monotonic seconds of the loop that everything else uses.
        clock: wall time, for what people read.
    """

    def __init__(
        self,
        *,
        find_snapshot: Callable[[], EdgeSnapshot],
        nodes: Nodes,
        pools: Pools,
        dispatcher: Dispatcher,
        participants: Participants,
        outcomes: OutcomeBook,
        now: Callable[[], float],
        clock: Clock,
    ) -> None:
        self._find_snapshot = find_snapshot
        self._nodes = nodes
        self._pools = pools
        self._dispatcher = dispatcher
        self._participants = participants
        self._outcomes = outcomes
        self._now = now
        self._clock = clock

    def status(self, *, with_leases: bool = False) -> Json:
        """The fleet as it is now."""
        snapshot = self._find_snapshot()
        answer: Json = {
            "config_revision": snapshot.revision,
            "nodes": [self._node(node) for node in snapshot.nodes],
            "models": [self._model(snapshot, model) for model in snapshot.models],
            "counters": self.counters(),
        }
        if with_leases:
            answer["leases"] = self._leases()
        return answer

    def explain(self, request_id: str) -> Json:
        """What became of a recent request. Raises NotFound when it is not remembered."""
        record = self._outcomes.find(request_id)
        if record is None:
            raise NotFound(
                "no recent request has this id; only the latest ones are remembered", reason="unknown_request"
            )
        return self._explanation(record)

    async def command(self, node: str, what: str, *, adapter: str = "") -> Json:
        """Ask a Node: ``usage``, ``capabilities``, ``sessions``, ``transport`` or ``providers`` (EN-75).

        Raises:
            InvalidRequest: another question.
            IopError: as ``Nodes.command``.
        """
        kind = _QUESTIONS.get(what)
        if kind is None:
            raise InvalidRequest(
                f"ask one of: {', '.join(_QUESTIONS)}",
                reason="unknown_command",
                details={"command": what[:64]},
            )
        request = CommandRequest(type=kind, adapter=adapter)
        answer = await self._nodes.command(NodeId(node), request)
        return {
            "node": node,
            "command": what,
            "ok": answer.ok,
            "reason": answer.reason,
            "figures": dict(answer.figures),
            "providers": [
                {**asdict(provider), "capabilities": dict(provider.capabilities)}
                for provider in answer.providers
            ],
        }

    def counters(self) -> Mapping[str, int]:
        """Totals since the start, and levels; names are stable."""
        outcomes = {f"outcome_{outcome.value}": n for outcome, n in self._outcomes.totals().items()}
        return {
            "leases": len(self._pools.leases),
            "leases_granted": self._pools.leases.granted_total,
            "leases_returned": self._pools.leases.returned_total,
            "waiting": self._pools.waiting,
            "requests": self._outcomes.begun_total,
            "requests_live": self._outcomes.live,
            "repeats": self._dispatcher.repeats_total,
            "late_frames": self._nodes.late_frames_total,
            "late_settlements": self._outcomes.late_settlements,
            "overdue_cancels": self._dispatcher.overdue_cancels_total,
            "refused_registrations": self._nodes.refused_registrations_total,
            **outcomes,
        }

    def is_able_to_admit(self) -> bool:
        """Whether some model has a live provider with open gates; what readiness of the public API means."""
        return any(self._pools.model_figures(model).can_admit for model in self._find_snapshot().models)

    # ---- parts ----

    def _node(self, node: NodeId) -> Json:
        view = self._nodes.view(node)
        connection = self._nodes.connection_of(node)
        skew = None if connection is None else connection.clock_skew_ms
        reason = view.reason
        if not reason and skew is not None and abs(skew) > SKEW_WARNING_MS:
            reason = f"its clock differs by {skew} ms"
        if not reason and view.refresh not in {"", "applied"}:
            reason = f"config refresh: {view.refresh}"
        spec = self._find_snapshot().nodes[node]
        return {
            "id": node,
            "connected": view.connected,
            "step": view.step.value,
            "since": self._wall(view.since),
            "reason": reason,
            "config_revision": view.revision,
            "clock_skew_ms": skew,
            "providers": [
                self._provider(ProviderKey(node=node, provider=provider), view.connected)
                for provider in spec.adapters
            ],
        }

    def _provider(self, key: ProviderKey, is_connected: bool) -> Json:
        spec = self._find_snapshot().nodes[key.node].adapters[key.provider]
        figures = self._pools.provider_figures(key)
        reason = figures.reason
        health = figures.health
        if is_connected:
            trouble = self._participants.trouble_of(key)
            started = self._nodes.adapters_of(key.node).get(key.provider)
            if started is not None and not started.started:
                reason = f"did not start: {started.reason}"
            elif trouble and figures.gates:
                reason = f"{reason}: {trouble}" if reason else trouble
            probed = self._nodes.probed(key.node, key.provider)
            if health == "online" and probed is not None and probed.health in PROBED_DOWN:
                # Requests still decide who is chosen (EN-116); people should not wait for the first that fails.
                health = "offline"
                reason = reason or f"by the Node's probe: {probed.reason or 'its engine does not answer'}"
        return {
            "id": key.provider,
            "type": spec.type,
            "category": spec.category,
            "status": figures.status,
            "health": health,
            "capacity": figures.capacity,
            "in_flight": figures.in_flight,
            "queued": figures.queued,
            "long_capacity": figures.long_capacity,
            "long_in_flight": figures.long_in_flight,
            "long_queued": figures.long_queued,
            "weight_version": self._participants.weight_version(key) if is_connected else UNKNOWN_VERSION,
            "gates": list(figures.gates),
            "reason": reason,
        }

    def _model(self, snapshot: EdgeSnapshot, model: Any) -> Json:
        figures = self._pools.model_figures(model)
        return {
            "id": model,
            "aliases": list(snapshot.models[model].aliases),
            "providers": [str(key) for key in figures.providers],
            "queue_depth": figures.queue_depth,
            "queue_max": figures.queue_max,
            "paused": figures.paused,
        }

    def _leases(self) -> list[Json]:
        return [
            {
                "id": lease.id,
                "node": lease.key.node,
                "provider": lease.key.provider,
                "kind": lease.kind.value,
                "run_id": lease.run_id,
                "request_id": lease.request_id,
                "since": self._wall(lease.since),
            }
            for lease in self._pools.leases
        ]

    def _explanation(self, record: RequestRecord) -> Json:
        last = record.attempts[-1] if record.attempts else None
        return {
            "request_id": record.request_id,
            "model": record.model,
            "caller": record.caller,
            "candidates": [
                {"provider": str(view.key), "eligible": view.eligible, "why": view.why}
                for view in record.candidates
            ],
            "provider": None if last is None else str(last.provider),
            "queue_ms": record.queue_ms,
            "attempts": len(record.attempts),
            "tries": [
                {"run_id": attempt.run_id, "provider": str(attempt.provider), "error": attempt.error}
                for attempt in record.attempts
            ],
            "outcome": None if record.outcome is None else record.outcome.value,
            "reason": record.reason,
            "began": self._wall(record.began_at),
            "duration_ms": None
            if record.ended_at is None
            else int((record.ended_at - record.began_at) * 1000),
            "usage": None if record.usage is None else _usage(record.usage),
            "weight_version": {
                "admission": record.version_admission,
                "first": record.version_first,
                "last": record.version_last,
            },
        }

    def _wall(self, monotonic: float) -> str:
        """A monotonic moment as wall time, for people; decides nothing (EN-113)."""
        seconds = self._clock.unix_nanos() / 1e9 - (self._now() - monotonic)
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_prompt_tokens": usage.cached_prompt_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }
