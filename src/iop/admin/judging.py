"""Asks participants what they would make of a reconfiguration, before it is accepted (AD-47).

A judgement has no effect, so no fence concerns it (AD-36): it is answered whatever ran before, and it makes no step
older. An operation that is accepted meanwhile may have a lower ordinal than the time at which the question was asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from iop.admin.enums import ChangeDisposition
from iop.admin.participant import ParticipantDriver
from iop.admin.profile import ParticipantInfo
from iop.admin.requests import MutationRequest, ReconfigureServingRequest
from iop.admin.results import ChangeResult
from iop.admin.steps import JudgeReconfigureStep, StepCall
from iop.admin.targets import group_members, select
from iop.core.errors import IopError, PreconditionFailed, Unavailable
from iop.core.ids import OperationId

__all__ = ["JUDGEMENT_PREFIX", "judge_changes"]

JUDGEMENT_PREFIX: Final = "judge-"
"""Begins the operation id of judgements: they belong to no operation, and change nothing."""


async def judge_changes(
    driver: ParticipantDriver,
    request: MutationRequest,
    *,
    operation_id: OperationId,
    ordinal: int,
    participants: Sequence[ParticipantInfo],
    timeout_s: float,
) -> tuple[IopError, ...]:
    """Refusals that the judgements amount to: one that lists all of them, if any field is rejected."""
    assert isinstance(request, ReconfigureServingRequest)
    step = JudgeReconfigureStep(changes=request.changes)
    calls = [
        StepCall(
            operation_id=OperationId(f"{JUDGEMENT_PREFIX}{operation_id}"),
            ordinal=ordinal,
            step=0,
            group_id=group.group_id,
            participant_ids=group.participant_ids,
            body=step,
            timeout_s=timeout_s,
        )
        for group in group_members(select(request.target, participants).chosen)
    ]
    judgements: list[ChangeResult] = []
    failures: list[IopError] = []

    async def ask(call: StepCall) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                result = await driver.execute(call, lambda _progress: None)
        except (IopError, TimeoutError):
            failures.append(Unavailable(f"{call.group_id} did not judge the change", reason="NOT_JUDGED"))
            return
        for outcome in result.participants:
            if outcome.error is not None:
                failures.append(Unavailable(outcome.error.message, reason="NOT_JUDGED"))
            judgements.extend(outcome.changes)

    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            tasks.create_task(ask(call), name=f"judge {call.group_id}")
    return (*failures[:1], *_rejected(judgements))


def _rejected(judgements: Sequence[ChangeResult]) -> tuple[IopError, ...]:
    if not any(j.disposition is ChangeDisposition.REJECTED for j in judgements):
        return ()
    told = {
        f"{j.participant_id}/{j.field.name}": f"{j.disposition.name} {j.detail}".strip() for j in judgements
    }
    words = "; ".join(f"{key}: {value}" for key, value in told.items())
    return (PreconditionFailed(f"a change was rejected: {words}", reason="CHANGE_REJECTED", details=told),)
