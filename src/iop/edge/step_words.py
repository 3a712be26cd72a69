"""Admin steps and their results, in the words of the two sides of the Edge. Pure.

The core speaks of public model names and of our participant ids; a Node of its engine's names and of its own ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from iop.admin.enums import AdminErrorCode, ParticipantPhase
from iop.admin.results import ParticipantError
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    ParticipantOutcome,
    PrepareWeightsStep,
    Step,
    StepCall,
    StepResult,
    UndoWeightsStep,
    VerifyWeightsStep,
    WorkCounts,
)
from iop.core.ids import ParticipantId
from iop.edge.calls import ProviderKey
from iop.edge.groups import Group
from iop.edge.scrub import scrub
from iop.edge.snapshot import EdgeSnapshot


def in_engine_words(step: Step, key: ProviderKey, snapshot: EdgeSnapshot) -> Step:
    """Model names as the provider knows them; callers and the core use public ones (AD-15)."""
    if not isinstance(
        step,
        PrepareWeightsStep | ApplyWeightsStep | VerifyWeightsStep | CommitWeightsStep | UndoWeightsStep,
    ):
        return step
    model = snapshot.find_model(step.model)
    if model is not None:
        for member in model.members:
            if member.key == key:
                return replace(step, model=member.target)
    return step


def in_our_words(
    group: Group, result: StepResult, name_artifact: Callable[[ProviderKey, str], str]
) -> StepResult:
    """A result with our participant ids for the Node's own, and without addresses (EN-04)."""
    ours = {local: participant for participant, local in group.local_of.items()}

    def name(participant: ParticipantId) -> ParticipantId:
        return ours.get(participant, participant)

    return replace(
        result,
        participants=tuple(
            replace(
                outcome,
                participant_id=name(outcome.participant_id),
                error=_scrubbed(outcome.error),
                caches=tuple(replace(c, participant_id=name(c.participant_id)) for c in outcome.caches),
                amounts=tuple(replace(a, participant_id=name(a.participant_id)) for a in outcome.amounts),
                changes=tuple(replace(c, participant_id=name(c.participant_id)) for c in outcome.changes),
                artifacts=tuple(
                    replace(a, participant_id=name(a.participant_id), uri=name_artifact(group.key, a.uri))
                    for a in outcome.artifacts
                ),
            )
            for outcome in result.participants
        ),
    )


def together(edge: WorkCounts, engine: WorkCounts) -> WorkCounts:
    """One count per request: the Edge's streams ended before the engine was asked, but frozen ones are in both."""
    return WorkCounts(
        drained=edge.drained + engine.drained,
        aborted=edge.aborted + engine.aborted,
        kept=max(edge.kept, engine.kept),
        resumed=engine.resumed,
    )


def _scrubbed(error: ParticipantError | None) -> ParticipantError | None:
    """The engine's own words, without where it lives (EN-04)."""
    return None if error is None else replace(error, message=scrub(error.message))


def same_failure(call: StepCall, code: AdminErrorCode, message: str, *, changed: bool = True) -> StepResult:
    """The same failure of every participant of a call."""
    error = ParticipantError(code=code, message=message[:500], step=ParticipantPhase.APPLYING, retryable=True)
    return StepResult(
        participants=tuple(
            ParticipantOutcome(participant_id=participant, error=error, changed=changed)
            for participant in call.participant_ids
        )
    )
