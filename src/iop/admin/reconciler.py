"""Keeps connected participants as they are meant to be (AD-35).

A group is reconciled when it was read back equal to the desired state since it last came back. Until then its
reconcile gate is closed. The loop looks on a signal and on a period, reads the whole wanted and actual state each
time, and acts through the same steps as operations do. Groups that a running operation acts on are left to it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from iop.admin.crew import WAIT_S_MIN, Crew, CrewTiming, read_back_all
from iop.admin.desired import (
    Desired,
    ProfileRecord,
    QuarantineRecord,
    WeightRecord,
    with_item,
    without_groups,
    without_item,
)
from iop.admin.enums import AdminErrorCode, ParticipantPhase
from iop.admin.goals import Goal
from iop.admin.journal import Journal, Snapshot
from iop.admin.overrides import following_file, returned, stale_values
from iop.admin.participant import ParticipantDriver
from iop.admin.profile import ParticipantInfo
from iop.admin.reconcile import Remedy, RemedyStep, is_restarted, remedy_for
from iop.admin.steps import (
    CommitWeightsStep,
    ParticipantReadBack,
    ReconfigureStep,
    Step,
    StepCall,
    StopProfileStep,
)
from iop.admin.targets import by_group
from iop.core.clock import Clock
from iop.core.errors import IopError
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = ["Reconciler", "ReconcilerTiming"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilerTiming:
    """Bounds of reconciliation.

    Attributes:
        period_s: connected participants are read back at least so often (AD-35). Shorter costs engines queries;
            longer leaves drift unseen.
        retry_s: how soon a group that could not be reconciled is looked at again.
        remedy_timeout_s: bound of all steps of one remedy.
        groups_at_once: read-backs side by side; bounds the burst on engines.
    """

    period_s: float = 30.0
    retry_s: float = 1.0
    remedy_timeout_s: float = 120.0
    groups_at_once: int = 64
    crew: CrewTiming = dataclasses.field(default_factory=CrewTiming)


class Reconciler:
    """Owns the knowledge of which groups are reconciled; `run` is its loop."""

    def __init__(
        self,
        journal: Journal,
        driver: ParticipantDriver,
        clock: Clock,
        timing: ReconcilerTiming,
        *,
        regate: Callable[[], Awaitable[None]],
        with_content: Callable[[Step], Awaitable[Step]],
    ) -> None:
        self._journal = journal
        self._driver = driver
        self._clock = clock
        self._timing = timing
        self._regate = regate
        self._with_content = with_content
        self._known: dict[GroupId, tuple[str, ...]] = {}
        self._remedies: dict[GroupId, asyncio.Event] = {}
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()
        self._active: set[GroupId] = set()
        self._touches: dict[GroupId, int] = {}
        self._at_once = asyncio.Semaphore(timing.groups_at_once)
        self._regating = asyncio.Lock()
        self._is_regate_due = False
        self.last_seen: dict[ParticipantId, ParticipantReadBack] = {}

    def unreconciled(self, participants: Sequence[ParticipantInfo]) -> frozenset[GroupId]:
        """Groups that must not take inference yet."""
        return frozenset(
            group
            for group, members in by_group(participants).items()
            if self._known.get(group) != _identity(members)
        )

    def look_again(self) -> None:
        """Something may have changed."""
        self._wake.set()

    def touch(self, groups: Sequence[GroupId]) -> None:
        """An operation begins or ends on the groups: what was read back before says nothing any more."""
        for group in groups:
            self._touches[group] = self._touches.get(group, 0) + 1

    async def quiet(self, groups: Sequence[GroupId]) -> None:
        """Wait until no remedy is under way on the groups; an operation that was accepted meanwhile goes next."""
        for group in groups:
            busy = self._remedies.get(group)
            if busy is not None:
                await busy.wait()

    async def run(self) -> None:
        """Reconcile until cancelled. One group that hangs delays no other."""
        next_full_look = self._clock.monotonic() + self._timing.period_s
        async with asyncio.TaskGroup() as tasks:
            while True:
                pending = self._candidates(self._driver.participants(), everybody=False)
                until = next_full_look
                if pending:
                    until = min(until, self._clock.monotonic() + self._timing.retry_s)
                try:
                    async with asyncio.timeout(max(WAIT_S_MIN, until - self._clock.monotonic())):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                is_full = self._clock.monotonic() >= next_full_look
                if is_full:
                    next_full_look = self._clock.monotonic() + self._timing.period_s
                await self._begin(tasks, everybody=is_full)

    async def look(self, *, everybody: bool) -> None:
        """One pass over the groups that need one, or over all that are connected, to its end."""
        async with asyncio.TaskGroup() as tasks:
            await self._begin(tasks, everybody=everybody)

    async def _begin(self, tasks: asyncio.TaskGroup, *, everybody: bool) -> None:
        """Start on every group that needs it and is not being looked at already."""
        participants = self._driver.participants()
        self._forget_gone(participants)
        await self._retire_left()
        await self.follow_file()
        candidates = self._candidates(participants, everybody=everybody)
        fresh = {group: members for group, members in candidates.items() if group not in self._active}
        # Whoever came back is gated before it is asked anything. Always: somebody may have gone and come back between
        # two looks, unseen, and its driver keeps it closed until it hears of its gate again.
        try:
            await self._regate_once()
        except IopError as exc:
            logger.warning("gates.unknown error=%s", exc)  # they stay as they are; the next look tries again
        for group, members in fresh.items():
            self._active.add(group)
            tasks.create_task(self._supervise(group, members), name=f"reconcile {group}")

    async def _retire_left(self) -> None:
        """End the quarantines of groups that left the configuration (AD-31)."""
        snapshot = await self._journal.snapshot()
        left = frozenset(snapshot.desired.quarantines) - self._driver.groups()
        if left:
            logger.warning("quarantine.retired groups=%s", ",".join(sorted(left)))
            await self._journal.amend(lambda current: without_groups(current.desired, left))

    async def follow_file(self) -> None:
        """Drop overrides whose key the config file has changed since, and those of groups that left it (AD-47)."""
        file_values = self._driver.file_values()
        snapshot = await self._journal.snapshot()
        if following_file(snapshot.desired, file_values) is not None:
            logger.info("overrides.file_changed")
            desired = await self._journal.amend(lambda current: following_file(current.desired, file_values))
            for group, record in desired.overrides.items():
                if record.returning:
                    self._known.pop(group, None)  # it is looked at now, to be told

    def _forget_gone(self, participants: Sequence[ParticipantInfo]) -> None:
        groups = by_group(participants)
        for group in list(self._known):
            members = groups.get(group)
            if members is None or not all(p.connected for p in members):
                del self._known[group]

    def _candidates(
        self, participants: Sequence[ParticipantInfo], *, everybody: bool
    ) -> Mapping[GroupId, tuple[ParticipantInfo, ...]]:
        return {
            group: members
            for group, members in by_group(participants).items()
            if all(p.connected for p in members)
            and (everybody or self._known.get(group) != _identity(members))
        }

    async def _supervise(self, group: GroupId, members: tuple[ParticipantInfo, ...]) -> None:
        was_known = self._known.get(group)
        try:
            async with self._at_once:
                has_acted = await self._reconcile(group, members)
            if has_acted or self._known.get(group) != was_known:
                await self._regate_once()
        except Exception:
            logger.exception("reconcile.failed group=%s", group)
        finally:
            self._active.discard(group)
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()

    async def _regate_once(self) -> None:
        """Regate; groups that finish together share one."""
        self._is_regate_due = True
        async with self._regating:
            if self._is_regate_due:
                self._is_regate_due = False
                await self._regate()

    async def _reconcile(self, group: GroupId, members: tuple[ParticipantInfo, ...]) -> bool:
        """Bring one group to its desired state. Returns whether anything but its being known changed."""
        before = await self._journal.snapshot()
        if _is_busy(before, group):
            return False
        touches = self._touches.get(group, 0)
        ids = [p.participant_id for p in members]
        seen = await read_back_all(self._driver, ids, timeout_s=self._timing.crew.read_back_timeout_s)
        self.last_seen.update({p: s for p, s in seen.items() if s.reachable})
        if not all(s.reachable for s in seen.values()):
            self._known.pop(group, None)
            return False
        await self._adopt_weights(members, seen)
        remedy, ordinal = await self._claim(touches, group, members, seen)
        if remedy is None:
            return False
        identity = _identity(members)
        if remedy.incurable:
            await self._quarantine(group, members, seen, remedy.incurable)
        elif remedy.steps:
            self._known.pop(group, None)
            why = await self._remedy(group, members, remedy, ordinal)
            if why:
                await self._quarantine(group, members, seen, why)
            else:
                await self._note_digests(members, remedy)
        was_lifted = await self._lift_if_restarted(group, members, seen)
        self._known[group] = identity
        await self._return_to_file(group, members)
        return bool(remedy.steps or remedy.incurable or was_lifted)

    async def _claim(
        self,
        touches: int,
        group: GroupId,
        members: tuple[ParticipantInfo, ...],
        seen: Mapping[ParticipantId, ParticipantReadBack],
    ) -> tuple[Remedy | None, int]:
        """Decide the remedy in a transaction, so that no operation is accepted in between unseen.

        Returns no remedy at all when the state that was compared with is not the state any more.
        """
        found: list[Remedy] = []
        now_us = self._clock.unix_nanos() // 1000
        current = await self._journal.snapshot()
        if self._touches.get(group, 0) != touches:
            return None, 0
        if not _is_busy(current, group) and group not in current.desired.quarantines:
            remedy = remedy_for(current.desired, members, seen)
            if not remedy.steps:
                return remedy, 0  # nothing to write, so no transaction

        def decide(snapshot: Snapshot) -> Desired | None:
            found.clear()
            is_moved = self._touches.get(group, 0) != touches
            if _is_busy(snapshot, group) or is_moved or group in self._remedies:
                return None
            quarantine = snapshot.desired.quarantines.get(group)
            if quarantine is not None and not is_restarted(quarantine, seen):
                found.append(Remedy())
                return _with_instances(snapshot.desired, quarantine, seen)
            remedy = remedy_for(snapshot.desired, members, seen)
            found.append(remedy)
            if not remedy.steps:
                return None
            self._remedies[group] = asyncio.Event()
            ordinal = snapshot.desired.next_ordinal(now_us=now_us)
            return dataclasses.replace(snapshot.desired, last_ordinal=ordinal)

        desired = await self._journal.amend(decide)
        return (found[0] if found else None), desired.last_ordinal

    async def _remedy(
        self, group: GroupId, members: tuple[ParticipantInfo, ...], remedy: Remedy, ordinal: int
    ) -> str:
        """Execute a remedy behind the group's closed gate; returns why it failed, empty when it did not."""
        logger.warning("reconcile.started group=%s steps=%d", group, len(remedy.steps))
        try:
            await self._regate()
            until = self._clock.monotonic() + self._timing.remedy_timeout_s
            for number, planned in enumerate(remedy.steps, start=1):
                call = StepCall(
                    operation_id=OperationId(f"reconcile-{ordinal}"),
                    ordinal=ordinal,
                    step=number,
                    group_id=group,
                    participant_ids=tuple(p.participant_id for p in members),
                    body=await self._with_content(planned.body),
                    timeout_s=max(0.001, until - self._clock.monotonic()),
                )
                crew = Crew(
                    self._driver,
                    self._clock,
                    self._timing.crew,
                    goal=planned.goal,
                    phase=ParticipantPhase.APPLYING,
                )
                why = await self._run_one(crew, call, until)
                if why:
                    return why
        finally:
            self._remedies.pop(group).set()
        return ""

    async def _return_to_file(self, group: GroupId, members: tuple[ParticipantInfo, ...]) -> None:
        """Tell an engine once what the file says again where an override was dropped (AD-47).

        It binds nobody: before anything was reconfigured the engine served what it was started with, and it may
        have its reasons to refuse. What the Edge itself admits goes by the file already.
        """
        snapshot = await self._journal.snapshot()
        record = snapshot.desired.overrides.get(group)
        if record is None or not record.returning or _is_busy(snapshot, group):
            return
        told = record.returning
        stale = stale_values(snapshot.desired, members, self.last_seen)
        if stale:
            ordinal = await self._next_ordinal(group)
            if ordinal is None:
                return
            remedy = Remedy(steps=(RemedyStep(body=ReconfigureStep(changes=stale), goal=Goal.RECONFIGURED),))
            why = await self._remedy(group, members, remedy, ordinal)
            if why:
                logger.warning("overrides.file_value_refused group=%s reason=%s", group, why)
        await self._journal.amend(lambda current: returned(current.desired, group, told))

    async def name_again(self, profile: ProfileRecord) -> None:
        """Have the participants of a stopped profile name its artifacts once more, for a driver that forgot where
        they are (AD-46): its groups that are connected and that no operation has.
        """
        for group, members in by_group(self._driver.participants()).items():
            mine = [p for p in members if p.participant_id in profile.participant_ids]
            if not mine or not all(p.connected for p in members):
                continue
            ordinal = await self._next_ordinal(group)
            if ordinal is None:
                continue
            stop = RemedyStep(body=StopProfileStep(profile_id=profile.profile_id), goal=Goal.ANSWERED)
            why = await self._remedy(group, members, Remedy(steps=(stop,)), ordinal)
            if why:
                logger.warning("profile.not_named_again group=%s reason=%s", group, why)

    async def _next_ordinal(self, group: GroupId) -> int | None:
        """Claim the group for steps of our own; None when an operation has it."""
        claimed: list[int] = []
        now_us = self._clock.unix_nanos() // 1000

        def claim(snapshot: Snapshot) -> Desired | None:
            claimed.clear()
            if _is_busy(snapshot, group) or group in self._remedies:
                return None
            self._remedies[group] = asyncio.Event()
            claimed.append(snapshot.desired.next_ordinal(now_us=now_us))
            return dataclasses.replace(snapshot.desired, last_ordinal=claimed[0])

        await self._journal.amend(claim)
        return claimed[0] if claimed else None

    async def _run_one(self, crew: Crew, call: StepCall, until: float) -> str:
        async with crew:
            crew.start([call])
            while True:
                for report in await crew.wait(until=until):
                    self.last_seen.update({r.participant_id: r for r in report.after if r.reachable})
                    if report.is_ok:
                        return ""
                    participant, error = next(iter(report.errors.items()))
                    return f"reconciliation failed: {participant}: {error.message}"
                if self._clock.monotonic() >= until:
                    crew.abandon(AdminErrorCode.DEADLINE_EXCEEDED)
                    until = self._clock.monotonic() + 1.0

    async def _note_digests(self, members: Sequence[ParticipantInfo], remedy: Remedy) -> None:
        """Remember the content that a reload put in place and verified: labels recur, identities do not."""
        loaded = [s.body for s in remedy.steps if isinstance(s.body, CommitWeightsStep)]
        digests = {
            p.participant_id: self.last_seen[p.participant_id].content_digest
            for p in members
            if p.participant_id in self.last_seen
        }
        if not loaded:
            return

        def note(snapshot: Snapshot) -> Desired | None:
            weights = snapshot.desired.weights
            for body in loaded:
                record = weights.get(body.model)
                if record is not None and record.version == body.weight_version:
                    merged = {**record.digests, **{p: d for p, d in digests.items() if d}}
                    weights = with_item(weights, body.model, dataclasses.replace(record, digests=merged))
            return dataclasses.replace(snapshot.desired, weights=weights)

        await self._journal.amend(note)

    async def settled(self, *, timeout_s: float) -> None:
        """Wait until every connected group was reconciled or could not be, but not for ever."""
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                while await self._awaited():
                    await self._looked.wait()
        except TimeoutError:
            logger.warning("reconcile.awaited_in_vain")

    async def _awaited(self) -> bool:
        """Whether some group that no operation holds still waits for its turn."""
        candidates = self._candidates(self._driver.participants(), everybody=False)
        if not candidates:
            return False
        snapshot = await self._journal.snapshot()
        return any(not _is_busy(snapshot, group) for group in candidates)

    async def _adopt_weights(
        self, members: tuple[ParticipantInfo, ...], seen: Mapping[ParticipantId, ParticipantReadBack]
    ) -> None:
        """Take note of the weights that engines started with; they bind nobody."""
        first = seen[members[0].participant_id]
        version = first.weight_version
        known = (await self._journal.snapshot()).desired.weights
        if version is None or not _unknown_weights(known, members[0].models, first):
            return

        def adopt(snapshot: Snapshot) -> Desired | None:
            missing = _unknown_weights(snapshot.desired.weights, members[0].models, first)
            if not missing:
                return None
            weights = snapshot.desired.weights
            for model in missing:
                record = WeightRecord(
                    model=model,
                    version=version,
                    source=members[0].startup_source,
                    content_digest=first.content_digest,
                )
                weights = with_item(weights, model, record)
            return dataclasses.replace(snapshot.desired, weights=weights)

        await self._journal.amend(adopt)

    async def _quarantine(
        self,
        group: GroupId,
        members: tuple[ParticipantInfo, ...],
        seen: Mapping[ParticipantId, ParticipantReadBack],
        why: str,
    ) -> None:
        logger.error("participant.quarantined group=%s reason=%s", group, why)
        record = QuarantineRecord(
            group_id=group,
            participant_ids=tuple(p.participant_id for p in members),
            reason=why,
            operation_id=OperationId(""),
            since_unix_nanos=self._clock.unix_nanos(),
            instances={p: s.instance for p, s in seen.items() if s.instance},
        )
        await self._journal.amend(
            lambda snapshot: dataclasses.replace(
                snapshot.desired, quarantines=with_item(snapshot.desired.quarantines, group, record)
            )
        )

    async def _lift_if_restarted(
        self,
        group: GroupId,
        members: tuple[ParticipantInfo, ...],
        seen: Mapping[ParticipantId, ParticipantReadBack],
    ) -> bool:
        """A quarantine ends when a restarted engine was reconciled (AD-31)."""
        ids = [p.participant_id for p in members]
        snapshot = await self._journal.snapshot()
        quarantine = snapshot.desired.quarantines.get(group)
        if quarantine is None or not is_restarted(quarantine, seen):
            return False
        after = await read_back_all(self._driver, ids, timeout_s=self._timing.crew.read_back_timeout_s)

        def lift(current: Snapshot) -> Desired | None:
            if current.desired.quarantines.get(group) != quarantine:
                return None
            remedy = remedy_for(current.desired, members, after)
            if remedy.steps or remedy.incurable or not all(s.reachable for s in after.values()):
                return None
            return dataclasses.replace(
                current.desired, quarantines=without_item(current.desired.quarantines, group)
            )

        return group not in (await self._journal.amend(lift)).quarantines


def _unknown_weights(
    known: Mapping[str, WeightRecord], models: Sequence[str], seen: ParticipantReadBack
) -> list[str]:
    """Models whose weights nobody noted, or that came with others since; published ones are no engine's to name."""
    return [
        m
        for m in models
        if m not in known
        or (
            not known[m].operation_id
            and (known[m].version, known[m].content_digest) != (seen.weight_version, seen.content_digest)
        )
    ]


def _identity(members: Sequence[ParticipantInfo]) -> tuple[str, ...]:
    """Changes whenever a member came back."""
    return tuple(f"{p.participant_id}@{p.instance}" for p in members if p.connected)


def _is_busy(snapshot: Snapshot, group: GroupId) -> bool:
    return any(g.group_id == group for r in snapshot.running.values() for g in r.spec.groups)


def _with_instances(
    desired: Desired,
    quarantine: QuarantineRecord,
    seen: Mapping[ParticipantId, ParticipantReadBack],
) -> Desired | None:
    """Note the engine processes of a quarantined group that nobody had reached before; None when all are known."""
    instances = {p: s.instance for p, s in seen.items() if s.instance} | dict(quarantine.instances)
    if instances == quarantine.instances:
        return None
    noted = dataclasses.replace(quarantine, instances=instances)
    return dataclasses.replace(
        desired, quarantines=with_item(desired.quarantines, quarantine.group_id, noted)
    )
