"""Answers to the Edge's queries, and the report that the Node sends unasked (EN-75, EN-90).

Nothing here names an address, a token or a path: what leaves this module may end in a status that callers
see (EN-04).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from iop.adapters.base import MODEL_CAPABILITY, AdapterCapabilities, AdapterSnapshot, Health
from iop.node.providers import Provider, ProviderSet, provider_name
from iop.node.step_runner import StepCodec, StepRunner
from iop.node.work import NodeWork
from iop.wire.data_parallel import RANKS_CAPABILITY, write_ranks
from iop.wire.messages import (
    CommandRequest,
    CommandResponse,
    CommandType,
    ParticipantReport,
    ProviderReport,
    ProviderSnapshot,
)
from iop.wire.model_facts import ABSENT_OPERATIONS, MODEL_FACTS, NODE_STOPPING, encode_facts

COMMAND_TIMEOUT_S: Final = 30.0
"""Longest a query may take; only a read-back waits for an engine at all."""

SESSIONS_SHOWN_MAX: Final = 1000
"""Most sessions in one answer; the rest is only counted."""


class CommandDesk:
    """Answers commands from the Node's own state.

    Args:
        providers: whose state is told.
        work: what runs.
        steps: admin steps under way.
        codec: writes participants.
        transport: figures of the link, by name.
    """

    def __init__(
        self,
        providers: ProviderSet,
        work: NodeWork,
        steps: StepRunner,
        codec: StepCodec,
        transport: Mapping[str, str],
    ) -> None:
        self._providers = providers
        self._work = work
        self._steps = steps
        self._codec = codec
        self._transport = transport

    async def answer(self, request: CommandRequest) -> CommandResponse:
        """Answer one query. Never raises but CancelledError; bounded by the query's own timeout."""
        if request.adapter and request.adapter not in self._providers.providers:
            return CommandResponse(type=request.type, ok=False, reason="no such adapter is running")
        chosen = [
            provider for name, provider in self._providers.providers.items() if request.adapter in {"", name}
        ]
        match request.type:
            case CommandType.USAGE:
                return CommandResponse(type=request.type, ok=True, figures=self._usage(chosen))
            case CommandType.SESSIONS:
                return CommandResponse(type=request.type, ok=True, figures=self._sessions())
            case CommandType.TRANSPORT:
                return CommandResponse(type=request.type, ok=True, figures=dict(self._transport))
            case CommandType.CAPABILITIES | CommandType.PROVIDERS:
                return CommandResponse(type=request.type, ok=True, providers=self._snapshots(chosen))
            case CommandType.PARTICIPANTS:
                return await self._participants(request, chosen)
            case _:
                return CommandResponse(
                    type=request.type, ok=False, reason="this node does not know the command"
                )

    @staticmethod
    def refuse(request: CommandRequest, reason: str) -> CommandResponse:
        """Answer a query that is not carried out."""
        return CommandResponse(type=request.type, ok=False, reason=reason)

    def report(self) -> ProviderReport:
        """How all providers stand, without asking any engine."""
        providers = list(self._providers.providers.values())
        return ProviderReport(
            providers=self._snapshots(providers),
            participants=tuple(
                ParticipantReport(adapter=provider.name, info=self._codec.encode_info(info))
                for provider in providers
                for info in provider.adapter.participants()
            ),
        )

    def _usage(self, chosen: Iterable[Provider]) -> dict[str, str]:
        figures = {
            "in_flight": str(self._work.in_flight),
            "admin_steps": str(self._steps.running_count),
            "config_revision": str(self._providers.config.config_revision),
        }
        for name, count in self._work.counters.items():
            figures[f"refused_{name}"] = str(count)
        for provider in chosen:
            figures[f"{provider.name}.in_flight"] = str(provider.gate.in_flight)
            figures[f"{provider.name}.long_in_flight"] = str(provider.gate.long_in_flight)
            figures[f"{provider.name}.refused_busy"] = str(provider.gate.refused)
        return figures

    def _sessions(self) -> dict[str, str]:
        sessions = self._work.sessions()
        shown = {name[:256]: str(count) for name, count in sessions.most_common(SESSIONS_SHOWN_MAX)}
        return {"sessions": str(len(sessions)), **{f"session.{name}": count for name, count in shown.items()}}

    def _snapshots(self, chosen: Iterable[Provider]) -> tuple[ProviderSnapshot, ...]:
        chosen = list(chosen)
        running = {provider.name for provider in chosen}
        broken = [
            ProviderSnapshot(
                id=provider_name(config),
                type=config.type,
                status="unavailable",
                health=Health.OFFLINE.value,
                reason=reason,
            )
            for config in self._providers.config.adapters
            if provider_name(config) not in running
            for reason in [self._reason_of(provider_name(config))]
            if reason
        ]
        is_stopping = self._work.is_refusing
        return (*(_snapshot(provider, is_stopping=is_stopping) for provider in chosen), *broken)

    def _reason_of(self, name: str) -> str:
        return next((status.reason for status in self._providers.statuses if status.name == name), "")

    async def _participants(self, request: CommandRequest, chosen: Sequence[Provider]) -> CommandResponse:
        reports: list[ParticipantReport] = []
        timeout_s = min(request.timeout_ms / 1000, COMMAND_TIMEOUT_S) or COMMAND_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._read_back(provider)) for provider in chosen]
        except TimeoutError:
            return CommandResponse(type=request.type, ok=False, reason="an engine did not answer in time")
        for task in asked:
            reports += task.result()[0]
        if not any(is_reached for _, is_reached in (task.result() for task in asked)):
            why = next((p.adapter.capabilities.admin_refusal for p in chosen if _has_refusal(p)), "")
            if why:
                return CommandResponse(type=request.type, ok=False, reason=why)
        return CommandResponse(type=request.type, ok=True, participants=tuple(reports))

    async def _read_back(self, provider: Provider) -> tuple[list[ParticipantReport], bool]:
        """What a provider tells of its participants, and whether any was reached."""
        infos = list(provider.adapter.participants())
        answers = await provider.adapter.read_back([info.participant_id for info in infos])
        reports = [
            ParticipantReport(
                adapter=provider.name,
                info=self._codec.encode_info(info),
                read_back=self._codec.encode_read_back(answer),
            )
            for info, answer in zip(infos, answers, strict=True)
        ]
        return reports, any(answer.reachable for answer in answers)


def _has_refusal(provider: Provider) -> bool:
    return bool(provider.adapter.capabilities.admin_refusal)


def _snapshot(provider: Provider, *, is_stopping: bool) -> ProviderSnapshot:
    now_is = provider.adapter.snapshot()
    capabilities = provider.adapter.capabilities
    status = "available"
    if provider.failure or now_is.health in {Health.OFFLINE, Health.NOT_READY}:
        status = "unavailable"
    elif is_stopping or provider.is_retiring or now_is.health is Health.DRAINING:
        status = "draining"
    return ProviderSnapshot(
        id=provider.name,
        type=provider.config.type,
        category=capabilities.category.value,
        status=status,
        health=now_is.health.value,
        capacity=provider.gate.capacity,
        in_flight=provider.gate.in_flight,
        long_capacity=provider.gate.long_capacity,
        long_in_flight=provider.gate.long_in_flight,
        weight_version=now_is.weight_version,
        reason=provider.failure or now_is.reason,
        models=now_is.models,
        capabilities=_capability_map(capabilities, now_is, is_stopping=is_stopping),
    )


def _capability_map(
    capabilities: AdapterCapabilities, now_is: AdapterSnapshot, *, is_stopping: bool
) -> dict[str, str]:
    told = {
        "tunnels": _yes(capabilities.tunnels),
        "runs": _yes(capabilities.runs),
        "admin": _yes(capabilities.admin),
        "sessions": _yes(capabilities.sessions),
        "operations": ",".join(sorted(capabilities.operations)),
    }
    if is_stopping:
        told[NODE_STOPPING] = _yes(True)
    if capabilities.admin_refusal:
        told["admin_refusal"] = capabilities.admin_refusal
    if now_is.engine_version:
        told["engine_version"] = now_is.engine_version
    for target, info in now_is.model_infos.items():
        told[MODEL_CAPABILITY + target] = base64.b64encode(info).decode("ascii")
    for target, ranks in now_is.data_parallel_ranks.items():
        told[RANKS_CAPABILITY + target] = write_ranks(ranks)
    for target, facts in now_is.model_facts.items():
        told[MODEL_FACTS + target] = encode_facts(facts)
    if now_is.absent_operations:
        told[ABSENT_OPERATIONS] = ",".join(sorted(now_is.absent_operations))
    return told


def _yes(value: bool) -> str:
    return "true" if value else "false"
