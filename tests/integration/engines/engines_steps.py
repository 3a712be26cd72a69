"""Steps at an adapter in front of a stand-in, and what several tests tell it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

from engines_rig import config_of, running
from replay_engine import ReplayEngine

from iop.adapters.base import Adapter
from iop.admin.enums import (
    AdmissionPolicy,
    DistributedBackend,
    PauseMode,
    ResourceKind,
    TensorDtype,
)
from iop.admin.requests import DistributedSource, PauseSpec, TensorSpec
from iop.admin.results import ParticipantError
from iop.admin.steps import PauseStep, Step, StepResult
from iop.testing.adapter_suite import step_call

PAUSE = PauseStep(pause=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE))
GROUP = DistributedSource(
    backend=DistributedBackend.NCCL,
    master_host="trainer",
    master_port=29_500,
    world_size=3,
    rank_offset=1,
    group_name="g1",
    tensors=(TensorSpec(name="head", dtype=TensorDtype.BFLOAT16, shape=(2, 3)),),
)
"""A trainer and an engine of two ranks."""


@contextlib.asynccontextmanager
async def facing(
    kind: str, engine: ReplayEngine, *targets: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Adapter]:
    """The registry's adapter of a kind in front of it; what the start asked is forgotten."""
    async with (
        engine.upstream().serving() as upstream,
        running(config_of(kind, upstream.endpoint, *targets), environment) as adapter,
    ):
        engine.forget()
        yield adapter


async def do(adapter: Adapter, body: Step, operation: str = "op-1") -> StepResult:
    """One step at all its participants."""
    return await adapter.execute_step(step_call(adapter, body, operation=operation), lambda _: None)


async def error_of(adapter: Adapter, body: Step) -> ParticipantError:
    """What the only participant says of a step that fails."""
    (outcome,) = (await do(adapter, body)).participants
    assert outcome.error is not None
    return outcome.error


async def released(adapter: Adapter) -> frozenset[ResourceKind] | None:
    """What the first participant does not hold."""
    (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
    return back.released
