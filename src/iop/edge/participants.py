"""Admin participants over Nodes: provider ranks as the operation core's driver sees them (AD-19, AD-35, AD-36, AD-39).

A *group* is one provider on one Node; its participants are the ranks that the engine behind it reported. Ids are made
here, ``node/provider`` and ``node/provider/rank``, so that they survive reconnects and Edge restarts; towards the Node
its own ids are used.

Gates come as levels per participant and become one gate per provider in the pools: a provider takes new work only when
each of its ranks may. A pause ends or freezes first what the Edge itself holds for the provider, then the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from iop.admin.enums import (
    AdminErrorCode,
    DrainTimeoutAction,
    PauseMode,
    ReconfigurableField,
    WeightFormat,
)
from iop.admin.overrides import FileValues
from iop.admin.participant import AdmissionGate, ProgressSink
from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.requests import DiskSource, ServingValue
from iop.admin.steps import (
    ParticipantOutcome,
    ParticipantReadBack,
    PauseStep,
    ResumeStep,
    Step,
    StepCall,
    StepProgress,
    StepResult,
    WorkCounts,
)
from iop.core.errors import DeadlineExceeded, IopError, NotFound, PreconditionFailed, Unavailable
from iop.core.ids import GroupId, NodeId, ParticipantId
from iop.edge.artifacts import Artifacts
from iop.edge.calls import ProviderKey
from iop.edge.dispatch import Dispatcher
from iop.edge.groups import Group, group_id
from iop.edge.nodes import Nodes
from iop.edge.outcomes import UNKNOWN_VERSION
from iop.edge.pools import Overrides, ProviderGate
from iop.edge.scrub import scrub
from iop.edge.snapshot import EdgeSnapshot
from iop.edge.step_words import in_engine_words, in_our_words, same_failure, together
from iop.edge.tasks import TaskOwner
from iop.wire.messages import (
    AdminStep,
    AdminStepEvent,
    AdminStepResult,
    CommandRequest,
    CommandType,
    ParticipantReport,
    ProviderReport,
)

log = logging.getLogger(__name__)

READ_BACK_TIMEOUT_S: Final = 10.0
"""How long an engine may take to say how it stands; beyond it counts as unreachable."""

DISCOVER_RETRY_S: Final = (0.2, 5.0)
"""First and longest wait between questions to a Node whose engine does not tell its ranks yet."""

BUSY_RETRY_S: Final = 0.2
"""When a Node has too many steps running, it is asked again after this."""

AWAY_RETRY_S: Final = 0.5
"""When a Node cannot reach its engine, it is asked again after this: the engine may be starting."""

NAMED_REQUESTS_MAX: Final = 5
"""How many requests a drain that ran out of time names."""

ABORT_CONFIRM_S: Final = 5.0
"""How long an aborting pause waits for Nodes to confirm the ends of streams before it stops the engine anyway."""

LAST_RANK: Final = 1 << 30


class StepCodec(Protocol):
    """Admin records to and from the bytes that the wire carries undecoded."""

    def encode_step(self, step: Step) -> tuple[bytes, Sequence[bytes]]:
        """The request, and the tensor bytes that follow it."""
        ...

    def decode_progress(self, data: bytes) -> StepProgress:
        """Raises RemoteProtocolError."""
        ...

    def decode_result(self, data: bytes) -> StepResult:
        """Raises RemoteProtocolError."""
        ...

    def decode_info(self, data: bytes) -> ParticipantInfo:
        """Raises RemoteProtocolError."""
        ...

    def decode_read_back(self, data: bytes) -> ParticipantReadBack:
        """Raises RemoteProtocolError."""
        ...


class Participants:
    """Implements ``ParticipantDriver`` and ``NodeWatcher``.

    Args:
        snapshot: the first configuration.
        nodes: the connections that steps travel over.
        codec: the wire form of admin records.
        tasks: owner of the questions to Nodes that come.
        artifacts: gets to know what profiles leave on Nodes.
        weight_labels: kept up to date here, read by dispatch: what providers publish.
    """

    def __init__(
        self,
        snapshot: EdgeSnapshot,
        *,
        nodes: Nodes,
        dispatcher: Dispatcher,
        codec: StepCodec,
        tasks: TaskOwner,
        weight_labels: dict[ProviderKey, str],
        artifacts: Artifacts,
    ) -> None:
        self._snapshot = snapshot
        self._nodes = nodes
        self._dispatcher = dispatcher
        self._codec = codec
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._groups: dict[ProviderKey, Group] = {}
        self._versions = weight_labels
        self._artifacts = artifacts
        self._overrides: dict[ProviderKey, Overrides] = {}
        self._on_change: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()
        self.apply_snapshot(snapshot)

    def attach(self, on_change: Callable[[], None]) -> None:
        """Say whom to tell that participants came, went or restarted: the core's ``participants_changed``."""
        self._on_change = on_change

    def apply_snapshot(self, snapshot: EdgeSnapshot) -> None:
        """Follow the configuration: new providers are expected, removed ones forgotten."""
        self._snapshot = snapshot
        wanted = {
            ProviderKey(node=node.id, provider=adapter.provider)
            for node in snapshot.nodes.values()
            for adapter in node.adapters.values()
            if adapter.is_administered
        }
        for key in self._groups.keys() - wanted:
            del self._groups[key]
        # The pools drop an override whose key the file changed; what is to hold after that is said anew.
        self._overrides.clear()
        for key in sorted(wanted - self._groups.keys(), key=str):
            self._groups[key] = Group(key=key)
            if self._nodes.connection_of(key.node) is not None:
                self._tasks.start(partial(self._discover, key), f"discover {key}")
        self._notify()

    def weight_version(self, key: ProviderKey) -> str:
        """The label that all ranks of a provider publish; ``unknown`` where they tell none or differ (AD-33)."""
        return self._versions.get(key, UNKNOWN_VERSION)

    def trouble_of(self, key: ProviderKey) -> str:
        """Why a provider's ranks are not known, in words; empty when they are."""
        group = self._groups.get(key)
        return "" if group is None else group.trouble

    # ---- NodeWatcher ----

    def node_ready(self, node: NodeId) -> None:
        """Ask the new generation for its ranks; until the core has opened them they take nothing (EN-32, AD-35)."""
        for key, group in self._groups.items():
            if key.node == node:
                group.gates.clear()
                group.is_current = False
                group.joined += 1
                self._tasks.start(partial(self._discover, key), f"discover {key}")

    def node_lost(self, node: NodeId) -> None:
        """Its ranks are offline."""
        keys = [key for key in self._groups if key.node == node]
        for key in keys:
            self._groups[key].is_current = False
            self._groups[key].gates.clear()
        self._dispatcher.thaw(keys)
        for key in [key for key in self._versions if key.node == node]:
            del self._versions[key]
        self._notify()

    def node_reported(self, node: NodeId, report: ProviderReport) -> None:
        """Engine restarts, rank counts and weight labels, as they are noticed; never relied upon (EN-34)."""
        for provider in report.providers:
            for key in self._keys_of(node):
                if key.provider == provider.id and key not in self._groups and provider.weight_version:
                    self._versions[key] = provider.weight_version
        by_adapter: dict[str, list[ParticipantReport]] = {}
        for participant in report.participants:
            by_adapter.setdefault(participant.adapter, []).append(participant)
        for key, group in self._groups.items():
            reports = by_adapter.get(key.provider)
            if key.node != node or not reports or not group.is_current:
                continue
            try:
                self._learn(group, reports)
            except IopError as error:
                log.warning("report.malformed", extra={"node_id": node, "reason": error.message})

    # ---- ParticipantDriver ----

    def participants(self) -> Sequence[ParticipantInfo]:
        """All ranks told by configured providers, connected or not, in config order.

        A provider that has told none since this Edge started stands for them, offline, under its group's id.
        """
        return [
            # The join count makes a member that went and came back between two looks a newcomer all the same (AD-35).
            replace(
                info,
                connected=group.is_current,
                instance=f"{info.instance}.{group.joined}",
                startup_source=info.startup_source or self._declared_source(group.key),
            )
            for group in self._groups.values()
            for info in (group.infos.values() or (self._untold(group.key),))
        ]

    def _declared_source(self, key: ProviderKey) -> DiskSource | None:
        """What the operator says of the weights that an engine starts with, where it does not tell itself (AD-32)."""
        path = self._snapshot.nodes[key.node].adapters[key.provider].weights_source
        return DiskSource(path=path, format=WeightFormat.SAFETENSORS) if path else None

    def groups(self) -> frozenset[GroupId]:
        """All configured providers that can be operated, connected or not."""
        return frozenset(group_id(key) for key in self._groups)

    def silent(self, participant_ids: Sequence[ParticipantId]) -> Mapping[ParticipantId, str]:  # noqa: ARG002
        """Nobody: what is known of ranks is known at their Node, whose answer to the step names them."""
        return {}

    def file_values(self) -> FileValues:
        """The keys of each adapter that a reconfigured value stands over (AD-47)."""
        values: dict[GroupId, Mapping[ReconfigurableField, ServingValue]] = {}
        for key in self._groups:
            spec = self._snapshot.nodes[key.node].adapters[key.provider]
            values[group_id(key)] = {
                ReconfigurableField.CAPACITY: spec.capacity,
                ReconfigurableField.LONG_CONTEXT_CAPACITY: spec.long_capacity,
                ReconfigurableField.ENABLED: spec.enabled,
            }
        return values

    def apply_overrides(self, overrides: FileValues) -> None:
        """What the engines serve by reconfiguration is what the Edge admits (AD-47)."""
        for key in self._groups:
            mine = overrides.get(group_id(key), {})
            capacity = mine.get(ReconfigurableField.CAPACITY)
            long_capacity = mine.get(ReconfigurableField.LONG_CONTEXT_CAPACITY)
            enabled = mine.get(ReconfigurableField.ENABLED)
            wanted = Overrides(
                capacity=capacity if isinstance(capacity, int) else None,
                long_capacity=long_capacity if isinstance(long_capacity, int) else None,
                enabled=enabled if isinstance(enabled, bool) else None,
            )
            # Roles, sizes and names are the engine's own business.
            if self._overrides.get(key) != wanted:
                self._overrides[key] = wanted
                self._dispatcher.override(key, wanted)

    async def execute(self, call: StepCall, report: ProgressSink) -> StepResult:
        """Carry one step to one provider; see ``ParticipantDriver.execute``."""
        group = self._group(call.group_id)
        before = WorkCounts()
        if isinstance(call.body, PauseStep):
            counted = await self._quiesce(group.key, call.body, call.timeout_s)
            if counted is None:
                return same_failure(
                    call, AdminErrorCode.DRAIN_TIMEOUT, self._what_runs(group.key), changed=False
                )
            before = counted
        result = await self._send(call, group, report)
        # Of what the Edge counted as frozen, some may have ended before the engine stood still.
        still = self._dispatcher.running_on((group.key,)) if before.kept else 0
        before = replace(before, kept=min(before.kept, still))
        if isinstance(call.body, ResumeStep) and all(o.error is None for o in result.participants):
            self._dispatcher.thaw((group.key,))
        self._learn_versions(group, result.participants)
        return replace(result, work=together(before, result.work))

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """Ask the engines how they stand, one question per provider, side by side (AD-104)."""
        wanted = set(participant_ids)
        answers: dict[ParticipantId, ParticipantReadBack] = {}
        async with asyncio.TaskGroup() as tasks:
            for group in self._groups.values():
                if not wanted.isdisjoint(group.infos):
                    tasks.create_task(self._ask(group, answers), name=f"read_back {group.key}")
        return [
            answers.get(participant) or ParticipantReadBack(participant_id=participant, reachable=False)
            for participant in participant_ids
        ]

    async def apply_gates(self, gates: Mapping[ParticipantId, AdmissionGate]) -> None:
        """Make the pools' gates so; what is closed lets nothing new in when this returns (AD-39)."""
        touched: dict[ProviderKey, ProviderGate] = {}
        for group in self._groups.values():
            mine = {participant: gates[participant] for participant in group.infos if participant in gates}
            if mine and group.is_current:
                group.gates.update(mine)
                touched[group.key] = group.gate()
        self._set_gates(touched)

    # ---- steps ----

    def _what_runs(self, key: ProviderKey) -> str:
        """Which requests a drain did not see the end of; some of them, where there are many."""
        ids = self._dispatcher.requests_on((key,))
        more = f" and {len(ids) - NAMED_REQUESTS_MAX} more" if len(ids) > NAMED_REQUESTS_MAX else ""
        named = f": {', '.join(ids[:NAMED_REQUESTS_MAX])}{more}" if ids else ""
        return f"work was still running{named}"

    async def _quiesce(self, key: ProviderKey, step: PauseStep, timeout_s: float) -> WorkCounts | None:
        """End or freeze the Edge's own work on a provider; ``None`` when a drain ran out of time and must fail."""
        keys = (key,)
        live = self._dispatcher.running_on(keys)
        match step.pause.mode:
            case PauseMode.KEEP:
                return WorkCounts(kept=self._dispatcher.freeze(keys))
            case PauseMode.ABORT:
                return WorkCounts(aborted=await self._abort(key))
            case PauseMode.DRAIN:
                limit_ms = step.pause.drain_timeout_ms
                limit_s = timeout_s if limit_ms is None else min(timeout_s, limit_ms / 1000)
                try:
                    async with asyncio.timeout(limit_s):
                        await self._dispatcher.wait_idle(keys)
                except TimeoutError:
                    if step.pause.on_drain_timeout is not DrainTimeoutAction.ABORT:
                        return None
                    left = self._dispatcher.running_on(keys)
                    aborted = await self._abort(key)
                    return WorkCounts(drained=max(0, live - left), aborted=aborted)
                return WorkCounts(drained=live)

    async def _abort(self, key: ProviderKey) -> int:
        aborted = self._dispatcher.abort((key,))
        try:
            async with asyncio.timeout(ABORT_CONFIRM_S):
                await self._dispatcher.wait_idle((key,))
        except TimeoutError:
            log.warning("pause.abort_unconfirmed", extra={"provider": str(key)})
        return aborted

    async def _send(self, call: StepCall, group: Group, report: ProgressSink) -> StepResult:
        """Send the step until one answer is there: the same step again after each reconnect (AD-36, EN-117)."""
        deadline = self._loop.time() + call.timeout_s
        away_since: float | None = None
        while True:
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                return same_failure(call, AdminErrorCode.DEADLINE_EXCEEDED, "the step's time was up")
            connection = self._nodes.connection_of(group.key.node)
            if connection is None or not group.is_current:
                await self._wait_for_change(left_s)
                continue
            locals_of = group.local_of
            request, payload = self._codec.encode_step(in_engine_words(call.body, group.key, self._snapshot))
            step = AdminStep(
                operation_id=call.operation_id,
                ordinal=call.ordinal,
                step=call.step,
                adapter=group.key.provider,
                group_id=group.local_id,
                participant_ids=tuple(locals_of.get(p, p) for p in call.participant_ids),
                timeout_ms=max(1, int(left_s * 1000)),
                request=request,
            )
            try:
                answer = await connection.admin_step(
                    step,
                    payload=payload,
                    on_event=lambda event: self._progressed(group, event, report),
                    timeout_s=left_s,
                )
            except Unavailable:
                await asyncio.sleep(0)  # the connection is gone; its loss is noticed in this turn or the next
                continue
            except DeadlineExceeded:
                return same_failure(call, AdminErrorCode.DEADLINE_EXCEEDED, "the Node did not answer in time")
            if answer.refused_code == "busy":
                await asyncio.sleep(min(BUSY_RETRY_S, left_s))
                continue
            if answer.refused_code == "unavailable":
                # The engine is away, as after a crash; for as long as its Node might be, it may come back (AD-25).
                now = self._loop.time()
                away_since = now if away_since is None else away_since
                if now - away_since < self._snapshot.participant_lost_s:
                    await asyncio.sleep(min(AWAY_RETRY_S, left_s))
                    continue
            return self._result(call, group, answer)

    def _result(self, call: StepCall, group: Group, answer: AdminStepResult) -> StepResult:
        match answer.refused_code:
            case "":
                return in_our_words(group, self._codec.decode_result(answer.outcome), self._artifacts.publish)
            case "stale_step":
                raise PreconditionFailed(
                    "a newer step was seen for these participants",
                    reason="STALE_STEP",
                    details={"group_id": call.group_id},
                )
            case "unavailable":
                return same_failure(call, AdminErrorCode.PARTICIPANT_LOST, scrub(answer.refused_reason))
            case _:
                reason = scrub(answer.refused_reason)
                return same_failure(call, AdminErrorCode.PARTICIPANT_FAILED, reason, changed=False)

    def _progressed(self, group: Group, event: AdminStepEvent, report: ProgressSink) -> None:
        try:
            progress = self._codec.decode_progress(event.progress)
        except IopError:
            return  # progress may be lost; results may not
        ours = {local: participant for participant, local in group.local_of.items()}
        participant = ours.get(progress.participant_id)
        if participant is not None:
            report(replace(progress, participant_id=participant, message=scrub(progress.message)))

    # ---- knowledge of ranks ----

    async def _discover(self, key: ProviderKey) -> None:
        """Ask until the ranks are known or the generation is gone."""
        connection = self._nodes.connection_of(key.node)
        wait_s, wait_max_s = DISCOVER_RETRY_S
        while connection is not None and self._nodes.connection_of(key.node) is connection:
            group = self._groups.get(key)
            if group is None:
                return
            try:
                reports = await self._question(group)
                if reports:
                    group.is_current = True
                    group.trouble = ""
                    self._learn(group, reports)
                    self._notify()
                    return
                group.trouble = "the engine tells no participants"
            except IopError as error:
                group.trouble = scrub(error.message)
            log.debug("participants.unknown", extra={"provider": str(key), "reason": group.trouble})
            await self._wait_for_change(wait_s)
            wait_s = min(wait_s * 2, wait_max_s)

    async def _question(self, group: Group) -> Sequence[ParticipantReport]:
        connection = self._nodes.connection_of(group.key.node)
        if connection is None:
            raise Unavailable("the Node is not connected")
        answer = await connection.command(
            CommandRequest(
                type=CommandType.PARTICIPANTS,
                adapter=group.key.provider,
                timeout_ms=int(READ_BACK_TIMEOUT_S * 1000),
            ),
            timeout_s=READ_BACK_TIMEOUT_S,
        )
        if not answer.ok:
            raise Unavailable(answer.reason or "the Node could not tell its participants")
        return [report for report in answer.participants if report.adapter == group.key.provider]

    async def _ask(self, group: Group, answers: dict[ParticipantId, ParticipantReadBack]) -> None:
        if not group.is_current:
            return
        try:
            reports = await self._question(group)
            answers.update(self._learn(group, reports))
            group.trouble = ""
        except IopError as error:
            group.trouble = scrub(error.message)
            log.info("read_back.failed", extra={"provider": str(group.key), "reason": error.message})

    def _learn(
        self, group: Group, reports: Iterable[ParticipantReport]
    ) -> dict[ParticipantId, ParticipantReadBack]:
        """Take in what a Node told of a provider's ranks; what it read back, by our ids."""
        key = group.key
        infos: list[ParticipantInfo] = []
        local_of: dict[ParticipantId, str] = {}
        read_backs: dict[ParticipantId, ParticipantReadBack] = {}
        for report in reports:
            info = self._codec.decode_info(report.info) if report.info else None
            back = self._codec.decode_read_back(report.read_back) if report.read_back else None
            local = info.participant_id if info is not None else back.participant_id if back else None
            if local is None:
                continue
            known = next((ours for ours, theirs in group.local_of.items() if theirs == local), None)
            if info is not None:
                rank = str(info.rank) if info.rank is not None else local
                ours = ParticipantId(f"{key.node}/{key.provider}/{rank}")
                infos.append(self._renamed(info, ours, key))
                local_of[ours] = local
                group.local_id = info.group_id
            elif known is not None:
                ours = known
            else:
                continue
            if back is not None:
                read_backs[ours] = replace(back, participant_id=ours)
        if infos:
            infos.sort(key=lambda info: (LAST_RANK if info.rank is None else info.rank, info.participant_id))
            self._replace_infos(group, infos, local_of)
        for ours, back in read_backs.items():
            if back.weight_version is not None:
                group.versions[ours] = back.weight_version
        self._publish_version(group)
        return read_backs

    def _replace_infos(
        self, group: Group, infos: Sequence[ParticipantInfo], local_of: dict[ParticipantId, str]
    ) -> None:
        new = {info.participant_id: info for info in infos}
        if new == group.infos and local_of == group.local_of:
            return
        restarted = [
            participant
            for participant, info in new.items()
            if participant in group.infos and info.instance != group.infos[participant].instance
        ]
        for participant in restarted:
            # AD-35: another engine process; what was known of the old one says nothing about it.
            group.gates.pop(participant, None)
        for participant in group.gates.keys() - new.keys():
            del group.gates[participant]
        group.infos, group.local_of = new, local_of
        group.versions = {p: version for p, version in group.versions.items() if p in new}
        self._set_gates({group.key: group.gate()})
        self._notify()

    def _untold(self, key: ProviderKey) -> ParticipantInfo:
        group = group_id(key)
        nothing = ParticipantInfo(
            participant_id=ParticipantId(group), group_id=group, capabilities=Capabilities()
        )
        return replace(self._renamed(nothing, nothing.participant_id, key), connected=False)

    def _renamed(self, info: ParticipantInfo, ours: ParticipantId, key: ProviderKey) -> ParticipantInfo:
        models = self._snapshot.models_of(key)
        return replace(
            info,
            participant_id=ours,
            group_id=group_id(key),
            models=tuple(model.id for model in models),
            aliases=tuple((alias, model.id) for model in models for alias in model.aliases),
            connected=True,
            node=key.node,
            provider=key.provider,
        )

    def _learn_versions(self, group: Group, outcomes: Iterable[ParticipantOutcome]) -> None:
        for outcome in outcomes:
            if outcome.weight_version and outcome.participant_id in group.infos:
                group.versions[outcome.participant_id] = outcome.weight_version
        self._publish_version(group)

    def _publish_version(self, group: Group) -> None:
        labels = set(group.versions.values())
        if len(labels) == 1 and "" not in labels:
            self._versions[group.key] = next(iter(labels))
        else:
            self._versions.pop(group.key, None)

    # ---- inner ----

    def _set_gates(self, gates: Mapping[ProviderKey, ProviderGate]) -> None:
        if gates:
            self._dispatcher.set_gates(gates.items())

    def _group(self, wanted: GroupId) -> Group:
        for group in self._groups.values():
            if group_id(group.key) == wanted:
                return group
        raise NotFound("no configured provider has this group id", details={"group_id": wanted})

    def _keys_of(self, node: NodeId) -> list[ProviderKey]:
        spec = self._snapshot.nodes.get(node)
        return [] if spec is None else [ProviderKey(node=node, provider=name) for name in spec.adapters]

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_change()

    async def _wait_for_change(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        except TimeoutError:
            pass
