"""Executes admin steps: each once, its result kept for the retry, older ones refused (EN-108, EN-117,
EN-120).

A step outlives the connection that brought it: it finishes at the engine, and the repetition that the Edge
sends after the reconnect is answered from the book.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from iop.admin.enums import AdminErrorCode, ParticipantPhase, PauseMode
from iop.admin.judging import JUDGEMENT_PREFIX
from iop.admin.profile import ParticipantInfo
from iop.admin.results import ParticipantError
from iop.admin.steps import (
    JudgeReconfigureStep,
    ParticipantOutcome,
    ParticipantReadBack,
    PauseStep,
    ResumeStep,
    Step,
    StepCall,
    StepProgress,
    StepResult,
)
from iop.core.errors import InvalidRequest, IopError, PreconditionFailed, Unavailable, Unsupported
from iop.core.ids import GroupId, OperationId, ParticipantId
from iop.net.ports import InboundAdminStep
from iop.node.providers import Provider, ProviderSet
from iop.node.steps import StepBook, StepKey, Verdict, key_of
from iop.node.work import NodeWork
from iop.wire.messages import AdminStep, AdminStepEvent, AdminStepResult

_log = logging.getLogger(__name__)

STEPS_RUNNING_MAX: Final = 256
"""Steps at once. An Edge sends one per group; more is its bug, and each costs a task."""

GIVEN_UP_S: Final = 30.0
"""How long a step that was given up may take to let go of its engine. An adapter that does not is stuck, and nothing
newer may run beside it."""

STEP_TIMEOUT_MAX_S: Final = 24 * 3600.0
"""Longest time a step may say for itself; the operation core allows no longer deadline either."""


class StepCodec(Protocol):
    """Admin records to and from the bytes that the wire carries undecoded."""

    def decode_step(self, request: bytes, payload: Sequence[bytes]) -> Step:
        """Raises RemoteProtocolError or InvalidRequest."""
        ...

    def encode_progress(self, progress: StepProgress) -> bytes:
        """A progress report."""
        ...

    def encode_result(self, result: StepResult) -> bytes:
        """A step's result."""
        ...

    def encode_info(self, info: ParticipantInfo) -> bytes:
        """What a participant is."""
        ...

    def encode_read_back(self, read_back: ParticipantReadBack) -> bytes:
        """How a participant stands."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _UnderWay:
    """One step that runs, or waits for an older one to end."""

    step: AdminStep
    scope: asyncio.Timeout | None = None
    is_given_up: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def give_up(self) -> None:
        """End it; who waits for its answer learns that there is none."""
        self.is_given_up = True
        if self.scope is not None and not self.ended.is_set() and not self.scope.expired():
            self.scope.reschedule(asyncio.get_running_loop().time())


class StepRunner:
    """All admin steps of this Node.

    Args:
        providers: whose engines are acted on.
        work: told when an engine freezes and thaws.
        codec: reads requests, writes results.
        tasks: owns the steps; outlives connections.
    """

    def __init__(
        self, providers: ProviderSet, work: NodeWork, codec: StepCodec, tasks: asyncio.TaskGroup
    ) -> None:
        self._providers = providers
        self._work = work
        self._codec = codec
        self._tasks = tasks
        self._book: StepBook[InboundAdminStep] = StepBook()
        self._judging = 0
        self._under_way: dict[StepKey, _UnderWay] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running_count(self) -> int:
        """Steps under way."""
        return self._book.running_count

    def receive(self, inbound: InboundAdminStep) -> None:
        """Take in one step; its one result follows."""
        step = inbound.step
        if self._book.running_count + self._judging >= STEPS_RUNNING_MAX:
            inbound.finish(_refusal(step, "busy", "too many admin steps at once"))
            return
        if step.operation_id.startswith(JUDGEMENT_PREFIX):
            self._judging += 1
            self._tasks.create_task(self._judge(inbound), name=f"step.{step.operation_id}")
            return
        decision = self._book.receive(step, inbound)
        if decision.verdict is Verdict.STALE:
            _log.warning("step.refused operation=%s step=%s reason=stale_step", step.operation_id, step.step)
            inbound.finish(_refusal(step, "stale_step", "a newer step was seen for one of the participants"))
        elif decision.verdict is Verdict.REPLAY:
            assert decision.result is not None
            inbound.finish(decision.result)
        elif decision.verdict is Verdict.RUN:
            self._idle.clear()
            older = [each for each in self._under_way.values() if _is_superseded(each.step, by=step)]
            for each in older:
                each.give_up()
            mine = self._under_way[key_of(step)] = _UnderWay(step=step)
            self._tasks.create_task(
                self._run(mine, inbound.payload, older), name=f"step.{step.operation_id}/{step.step}"
            )

    async def wait_idle(self) -> None:
        """Wait until no step runs; the caller bounds it."""
        await self._idle.wait()

    async def _judge(self, inbound: InboundAdminStep) -> None:
        """Answer a question that has no effect: past the book, since it is fenced by nothing and fences nothing."""
        result = _refusal(inbound.step, "unavailable", "the node stopped before the step was done")
        try:
            result = await self._execute(inbound.step, inbound.payload)
        finally:
            self._judging -= 1
            inbound.finish(result)

    async def _run(self, mine: _UnderWay, payload: Sequence[bytes], older: Sequence[_UnderWay]) -> None:
        step = mine.step
        _log.info("step.started operation=%s step=%s adapter=%s", step.operation_id, step.step, step.adapter)
        result = _refusal(step, "unavailable", "the node stopped, or a newer step came, before it was done")
        try:
            if await _have_let_go(older) and not mine.is_given_up:
                async with asyncio.timeout(None) as mine.scope:
                    result = await self._execute(step, payload)
        except TimeoutError:
            _log.warning("step.given_up operation=%s step=%s", step.operation_id, step.step)
        finally:
            del self._under_way[key_of(step)]
            mine.ended.set()
            for waiter in self._book.finish(key_of(step), result):
                waiter.finish(result)
            if self._book.running_count == 0:
                self._idle.set()
        _log.info(
            "step.completed operation=%s step=%s refused=%s",
            step.operation_id,
            step.step,
            result.refused_code,
        )

    async def _execute(self, step: AdminStep, payload: Sequence[bytes]) -> AdminStepResult:
        provider = self._providers.get(step.adapter)
        if provider is None:
            return _refusal(step, "unavailable", "the adapter is not running")
        known = {info.participant_id for info in provider.adapter.participants()}
        if not provider.adapter.capabilities.admin:
            return _refusal(step, "unsupported", provider.adapter.capabilities.admin_refusal)
        if not known:
            # The engine has not been seen yet, or is away; its ranks may be there on the retry.
            return _refusal(step, "unavailable", "the engine has not told its participants")
        if not known.issuperset(step.participant_ids) or not step.participant_ids:
            return _refusal(step, "unknown_participant", "the engine has no such participant")
        try:
            body = self._codec.decode_step(step.request, payload)
        except IopError as exc:
            return _refusal(step, "unsupported", exc.message)
        if step.operation_id.startswith(JUDGEMENT_PREFIX) and not isinstance(body, JudgeReconfigureStep):
            return _refusal(step, "unsupported", "a judgement must not change anything")
        call = StepCall(
            operation_id=OperationId(step.operation_id),
            ordinal=step.ordinal,
            step=step.step,
            group_id=GroupId(step.group_id),
            participant_ids=tuple(map(ParticipantId, step.participant_ids)),
            body=body,
            timeout_s=min(step.timeout_ms / 1000, STEP_TIMEOUT_MAX_S) or STEP_TIMEOUT_MAX_S,
        )
        return await self._call_adapter(step, call, provider)

    async def _call_adapter(self, step: AdminStep, call: StepCall, provider: Provider) -> AdminStepResult:
        if isinstance(call.body, PauseStep) and call.body.pause.mode is PauseMode.KEEP:
            # Before the engine freezes: a cancel that comes meanwhile must already wait.
            self._work.freeze(provider)
        try:
            async with asyncio.timeout(call.timeout_s):
                result = await provider.adapter.execute_step(
                    call, lambda progress: self._report(step, progress)
                )
        except TimeoutError:
            result = _failed(call, AdminErrorCode.DEADLINE_EXCEEDED, "the step's time was up", retryable=True)
        except Unsupported as exc:
            return _refusal(step, "unsupported", exc.message)
        except Unavailable as exc:
            return _refusal(step, "unavailable", exc.message)
        except (InvalidRequest, PreconditionFailed) as exc:
            result = _failed(call, AdminErrorCode.PARTICIPANT_FAILED, exc.message, changed=False)
        except IopError as exc:
            result = _failed(call, AdminErrorCode.PARTICIPANT_FAILED, exc.message, retryable=exc.retryable)
        except Exception:  # noqa: BLE001 - one broken adapter must not end the node
            _log.exception("step.failed operation=%s step=%s", step.operation_id, step.step)
            result = _failed(call, AdminErrorCode.INTERNAL, "the adapter failed")
        is_ok = all(outcome.error is None for outcome in result.participants)
        if _steps_again(call.body, is_ok=is_ok):
            self._work.thaw(provider)
        return AdminStepResult(
            operation_id=step.operation_id, step=step.step, outcome=self._codec.encode_result(result)
        )

    def _report(self, step: AdminStep, progress: StepProgress) -> None:
        event = AdminStepEvent(
            operation_id=step.operation_id, step=step.step, progress=self._codec.encode_progress(progress)
        )
        for waiter in self._book.waiters(key_of(step)):
            waiter.emit(event)


def _is_superseded(step: AdminStep, *, by: AdminStep) -> bool:
    """Whether a step that still runs was given up: the Edge sends nobody a newer one before.

    What it still does must not come after what the newer one does, an undo for instance.
    """
    return step.adapter == by.adapter and not set(step.participant_ids).isdisjoint(by.participant_ids)


async def _have_let_go(older: Sequence[_UnderWay]) -> bool:
    """Wait until steps that were given up have let go of their engine; whether they have."""
    try:
        async with asyncio.timeout(GIVEN_UP_S):
            for each in older:
                await each.ended.wait()
    except TimeoutError:
        return False
    return True


def _steps_again(body: Step, *, is_ok: bool) -> bool:
    """Whether no KEEP pause holds the engine after this step."""
    if isinstance(body, ResumeStep):
        return is_ok
    return isinstance(body, PauseStep) and (not is_ok or body.pause.mode is not PauseMode.KEEP)


def _refusal(step: AdminStep, code: str, reason: str) -> AdminStepResult:
    return AdminStepResult(
        operation_id=step.operation_id, step=step.step, refused_code=code, refused_reason=reason
    )


def _failed(
    call: StepCall, code: AdminErrorCode, message: str, *, retryable: bool = False, changed: bool = True
) -> StepResult:
    """The same failure of every participant."""
    error = ParticipantError(code=code, message=message, step=ParticipantPhase.APPLYING, retryable=retryable)
    return StepResult(
        participants=tuple(
            ParticipantOutcome(participant_id=participant_id, error=error, changed=changed)
            for participant_id in call.participant_ids
        )
    )
