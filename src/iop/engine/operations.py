"""Administrative steps over the runner and the ranks: each acts, then reads back, and undoes itself when it fails
half-way.

One operation at a time (``_turn``). What touches blocks, gates or memory in the ranks does so between steps
(``Runner.idle``), so no rank is ever asked to compute with something that is being taken away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from iop.admin.enums import (
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    DrainTimeoutAction,
    PauseMode,
    ResourceKind,
    WeightRetention,
)
from iop.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    IopError,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)
from iop.engine.generation import FinishReason
from iop.engine.ranks import RankGroup
from iop.engine.reports import (
    FlushReport,
    PauseReport,
    RankFlush,
    RankRelease,
    RankState,
    ReleaseReport,
    SlotsReport,
)
from iop.engine.runner import Live, Runner
from iop.engine.scheduler import Hold

__all__ = ["SLOTS_MAX", "Operations", "Pause"]

SLOTS_MAX: Final = 64
"""Most slots that can be set while running: the ranks' exchange memory is laid out for so many."""

_ABORTED: Final = "The engine's operator ended this request."


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The pause in force."""

    mode: PauseMode
    admission: AdmissionPolicy


class Operations:
    """Pause, resume, flush, release, restore and slots. ``turn`` serialises them with the weight steps."""

    def __init__(self, *, runner: Runner, ranks: RankGroup) -> None:
        self._runner = runner
        self._ranks = ranks
        self.turn = asyncio.Lock()
        self.pause_in_force: Pause | None = None
        self.released: set[ResourceKind] = set()
        self.unsettled_update = ""
        self.swapped_update = ""

    async def read_back(self) -> tuple[RankState, ...]:
        """Every rank's own state; see ``Engine.read_back``."""
        answers = await self._ranks.call("state")
        return tuple(self._rank_state(rank, answer) for rank, answer in enumerate(answers))

    def _rank_state(self, rank: int, answer: dict[str, Any]) -> RankState:
        scheduler, pause = self._runner.scheduler, answer["pause"]
        running = len(scheduler.running)
        return RankState(
            rank=rank,
            pid=answer["pid"],
            paused=pause is not None,
            mode=None if pause is None else PauseMode(pause["mode"]),
            admission=None if pause is None else AdmissionPolicy(pause["admission"]),
            in_flight=running if scheduler.can_run else 0,
            kept=0 if scheduler.can_run else self.kept(),
            waiting=len(scheduler.waiting),
            kv_resident=answer["kv_resident"],
            kv_blocks_used=scheduler.pool.used,
            kv_blocks_filled=answer["kv_filled"],
            prefix_entries=scheduler.pool.entries,
            weights_resident=answer["weights_resident"],
            weight_retention=None if answer["retention"] is None else WeightRetention(answer["retention"]),
            weight_bytes_resident=answer["weight_bytes"],
            kv_bytes_resident=answer["kv_bytes"],
            weight_digest=answer["digest"],
            weight_version=answer["version"],
        )

    def kept(self) -> int:
        """Requests frozen by a KEEP pause; 0 while running."""
        if self._runner.scheduler.can_run:
            return 0
        return sum(1 for live in self._runner.live.values() if live.has_started)

    async def pause(
        self,
        *,
        mode: PauseMode,
        admission: AdmissionPolicy,
        drain_timeout_s: float | None,
        on_drain_timeout: DrainTimeoutAction | None,
    ) -> PauseReport:
        """See ``Engine.pause``."""
        runner, scheduler = self._runner, self._runner.scheduler
        async with self.turn:
            before = self.pause_in_force
            if before is not None and mode is PauseMode.DRAIN and self.kept():
                raise PreconditionFailed(
                    "Work is frozen by a KEEP pause; it cannot drain.", reason="PAUSE_MODE"
                )
            drained = aborted = 0
            try:
                runner.hold(Hold.PAUSE, admission=admission)
                in_flight = (
                    self._in_flight(admission) if before is None or mode is not PauseMode.DRAIN else []
                )
                if mode is PauseMode.DRAIN:
                    drained, aborted = await self._drain(in_flight, drain_timeout_s, on_drain_timeout)
                elif mode is PauseMode.ABORT:
                    aborted = self._abort(in_flight)
                scheduler.can_run = False
                async with runner.idle:
                    await self._ranks.call("pause", {"mode": int(mode), "admission": int(admission)})
                    states = await self.read_back()
                if not all(state.paused and state.mode is mode for state in states):
                    raise Unavailable("A rank does not read back as paused.", reason="VERIFICATION_FAILED")
            except BaseException:
                await self._take_pause_back(before)
                raise
            self.pause_in_force = Pause(mode=mode, admission=admission)
            return PauseReport(
                mode=mode,
                admission=admission,
                drained=drained,
                aborted=aborted,
                kept=self.kept(),
                ranks=states,
            )

    def _in_flight(self, admission: AdmissionPolicy) -> list[Live]:
        """What a pause must see to: with QUEUE what has started (the rest waits on), with REJECT all accepted work."""
        everything = self._runner.live.values()
        return [live for live in everything if admission is AdmissionPolicy.REJECT or live.has_started]

    async def _drain(
        self, in_flight: list[Live], timeout_s: float | None, on_timeout: DrainTimeoutAction | None
    ) -> tuple[int, int]:
        """Wait for ``in_flight``: how many finished, how many were aborted when time ran out."""
        runner = self._runner
        finished_before = runner.totals.finished
        for live in in_flight:
            for output in live.outputs:
                output.sequence.must_finish = True
        runner.wake()
        try:
            async with asyncio.timeout(timeout_s):
                while not all(live.is_over for live in in_flight):
                    if runner.failure is not None:
                        raise runner.failure
                    runner.changed.clear()
                    await runner.changed.wait()
        except TimeoutError as exc:
            if on_timeout is not DrainTimeoutAction.ABORT:
                raise DeadlineExceeded(
                    "The work in flight did not finish in time.", reason="DRAIN_TIMEOUT"
                ) from exc
            aborted = self._abort([live for live in in_flight if not live.is_over])
            return runner.totals.finished - finished_before, aborted
        finally:
            for live in in_flight:
                for output in live.outputs:
                    output.sequence.must_finish = False
        return runner.totals.finished - finished_before, 0

    def _abort(self, lives: list[Live]) -> int:
        for live in lives:
            self._runner.end(live, reason=FinishReason.ABORTED, message=_ABORTED)
        return len(lives)

    async def _take_pause_back(self, before: Pause | None) -> None:
        """Put the gates as they were; a rank that cannot be told is lost, and the engine then fails closed."""
        runner = self._runner
        if runner.failure is None:
            orders = (
                {"mode": int(before.mode), "admission": int(before.admission)} if before is not None else None
            )
            await self._ranks.call("resume" if orders is None else "pause", orders)
        runner.scheduler.can_run = before is None
        runner.hold(Hold.PAUSE, admission=None if before is None else before.admission)

    async def resume(self) -> tuple[RankState, ...]:
        """See ``Engine.resume``."""
        runner, scheduler = self._runner, self._runner.scheduler
        async with self.turn:
            if self.released:
                await self._look_what_is_released()
            if self.released:
                raise PreconditionFailed("Memory is released; restore it first.", reason="RESOURCES_RELEASED")
            # Weights that are only staged beside the ones in use hold nobody up: a rollback ends its pause first.
            if self.swapped_update and self.pause_in_force is not None:
                raise PreconditionFailed(
                    "A weight update is not settled; commit or undo it first.", reason="UPDATE_PENDING"
                )
            try:
                await self._ranks.call("resume")
                states = await self.read_back()
                if any(state.paused for state in states):
                    raise Unavailable("A rank does not read back as resumed.", reason="VERIFICATION_FAILED")
            except BaseException:
                await self._take_pause_back(self.pause_in_force)
                raise
            self.pause_in_force = None
            scheduler.can_run = True
            runner.hold(Hold.PAUSE, admission=None)
            return states

    async def flush(
        self, *, kinds: Collection[CacheKind], busy: BusyPolicy, wait_timeout_s: float
    ) -> FlushReport:
        """See ``Engine.flush``."""
        if not kinds:
            raise InvalidRequest("`kinds` must name at least one cache.", details={"field": "kinds"})
        async with self.turn:
            outcomes = [
                RankFlush(
                    rank=rank,
                    kind=kind,
                    outcome=CacheOutcome.UNKNOWN,
                    reason="This engine has no such cache.",
                )
                for kind in kinds
                if kind is not CacheKind.PREFIX
                for rank in range(self._ranks.count)
            ]
            dropped = preempted = 0
            refusal = ""
            if CacheKind.PREFIX in kinds:
                dropped, preempted, refusal = await self._flush_prefixes(busy, wait_timeout_s)
            states = await self.read_back()
            if CacheKind.PREFIX in kinds:
                outcomes += [self._prefix_outcome(state, refusal) for state in states]
            return FlushReport(
                outcomes=tuple(outcomes), entries_dropped=dropped, preempted=preempted, ranks=states
            )

    async def _flush_prefixes(self, busy: BusyPolicy, wait_timeout_s: float) -> tuple[int, int, str]:
        """Entries dropped, sequences preempted, and why it was refused, if it was."""
        runner, scheduler = self._runner, self._runner.scheduler
        preempted = 0
        try:
            if scheduler.running and busy is BusyPolicy.FAIL:
                return 0, 0, "Sequences are running."
            if busy is BusyPolicy.WAIT and scheduler.running:
                runner.hold(Hold.FLUSH, admission=AdmissionPolicy.QUEUE)
                if not await self._wait_until_empty(wait_timeout_s):
                    return 0, 0, "Sequences did not finish in time."
            async with runner.idle:
                if busy is BusyPolicy.PREEMPT:
                    preempted = scheduler.preempt_all()
                if scheduler.running:
                    return 0, 0, "Sequences are running."
                dropped, _ = scheduler.forget_prefixes()
                await self._ranks.call("zero", {"blocks": scheduler.pool.free_blocks()})
                states = await self.read_back()
            if scheduler.pool.entries or any(state.kv_blocks_filled for state in states):
                raise Unavailable("A rank's cache does not read back as empty.", reason="VERIFICATION_FAILED")
        finally:
            runner.hold(Hold.FLUSH, admission=None)
        return dropped, preempted, ""

    async def _wait_until_empty(self, timeout_s: float) -> bool:
        runner = self._runner
        lives = [live for live in runner.live.values() if live.has_started]
        try:
            await self._drain(lives, timeout_s, DrainTimeoutAction.FAIL)
        except DeadlineExceeded:
            return False
        return True

    @staticmethod
    def _prefix_outcome(state: RankState, refusal: str) -> RankFlush:
        outcome, reason = CacheOutcome.CLEARED, ""
        if refusal:
            outcome, reason = CacheOutcome.REFUSED, refusal
        return RankFlush(rank=state.rank, kind=CacheKind.PREFIX, outcome=outcome, reason=reason)

    async def release(
        self, *, kinds: Collection[ResourceKind], retention: WeightRetention | None
    ) -> ReleaseReport:
        """See ``Engine.release``."""
        self._check_kinds(kinds)
        if (ResourceKind.WEIGHTS in kinds) is not (retention is not None):
            raise InvalidRequest(
                "`weight_retention` must be given with WEIGHTS and only then.",
                details={"field": "weight_retention"},
            )
        async with self.turn:
            if self.pause_in_force is None:
                raise PreconditionFailed("Only a paused engine releases memory.", reason="NOT_PAUSED")
            if self.unsettled_update:
                raise PreconditionFailed(
                    "A weight update is not settled; commit or undo it first.", reason="UPDATE_PENDING"
                )
            new = set(kinds) - self.released
            order = {
                "weights": int(retention) if retention is not None and ResourceKind.WEIGHTS in new else None,
                "kv": ResourceKind.KV_CACHE in new,
            }
            async with self._runner.idle:
                if order["kv"]:
                    # Frozen sequences lose their keys and values, not their tokens: they are computed again.
                    self._runner.scheduler.preempt_all()
                    self._runner.scheduler.forget_prefixes()
                # Before the ranks are told: they do it also when whoever asked gives up, and its undo must know.
                self.released |= new
                try:
                    answers = await self._ranks.call("release", order)
                except IopError:
                    self.released -= new
                    if self._runner.failure is None:
                        await self._ranks.call(
                            "restore", {"weights": order["weights"] is not None, "kv": order["kv"]}
                        )
                    raise
            return ReleaseReport(moved=_moved(answers), ranks=await self.read_back())

    async def restore(self, *, kinds: Collection[ResourceKind]) -> ReleaseReport:
        """See ``Engine.restore``."""
        self._check_kinds(kinds)
        async with self.turn:
            order = {
                "weights": ResourceKind.WEIGHTS in kinds and ResourceKind.WEIGHTS in self.released,
                "kv": ResourceKind.KV_CACHE in kinds and ResourceKind.KV_CACHE in self.released,
            }
            async with self._runner.idle:
                answers = await self._ranks.call("restore", order)
            self.released -= set(kinds)
            return ReleaseReport(moved=_moved(answers), ranks=await self.read_back())

    async def _look_what_is_released(self) -> None:
        """By the ranks' own word: what a restore that was given up gave back is not released any more."""
        states = await self.read_back()
        if all(state.weights_resident for state in states):
            self.released.discard(ResourceKind.WEIGHTS)
        if all(state.kv_resident for state in states):
            self.released.discard(ResourceKind.KV_CACHE)

    def weights_are_back(self) -> None:
        """New weights were committed over released ones."""
        self.released.discard(ResourceKind.WEIGHTS)

    @staticmethod
    def _check_kinds(kinds: Collection[ResourceKind]) -> None:
        if not kinds:
            raise InvalidRequest("`kinds` must name at least one resource.", details={"field": "kinds"})
        if ResourceKind.GRAPHS in kinds:
            raise Unsupported("This engine captures no graphs.", reason="RESOURCE_UNSUPPORTED")

    async def set_slots(self, slots: int) -> SlotsReport:
        """See ``Engine.set_slots``."""
        if not 1 <= slots <= SLOTS_MAX:
            raise InvalidRequest(
                f"`slots` must be from 1 to {SLOTS_MAX}.", details={"field": "slots", "limit": str(SLOTS_MAX)}
            )
        async with self.turn:
            before, self._runner.scheduler.slots = self._runner.scheduler.slots, slots
            self._runner.wake()
            return SlotsReport(slots=slots, slots_before=before, details={"slots_max": str(SLOTS_MAX)})


def _moved(answers: tuple[dict[str, Any], ...]) -> tuple[RankRelease, ...]:
    return tuple(
        RankRelease(rank=rank, weight_bytes=answer["weight_bytes"], kv_bytes=answer["kv_bytes"])
        for rank, answer in enumerate(answers)
    )
