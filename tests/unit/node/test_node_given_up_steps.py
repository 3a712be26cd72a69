"""A newer step ends what an older one still does at the engine; a judgement is fenced by nothing and fences nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from node_doubles import FakeAdapter, FakeCodec, FakeMaker, inbound_step, node_config

from iop.adapters.base import AdapterServices
from iop.admin.judging import JUDGEMENT_PREFIX
from iop.admin.participant import ProgressSink
from iop.admin.steps import JudgeReconfigureStep, StepCall, StepResult
from iop.node.providers import ProviderSet
from iop.node.step_runner import StepRunner
from iop.node.tasks import OwnedTasks
from iop.node.work import NodeWork
from iop.testing.adapter_suite import SystemTestClock
from iop.testing.waiting import eventually


class Bench:
    """A runner over one adapter whose first step holds the engine until it is told to let go."""

    def __init__(self, steps: StepRunner, adapter: FakeAdapter, codec: FakeCodec) -> None:
        self.steps, self.adapter, self.codec = steps, adapter, codec
        self.log: list[str] = []
        self.lets_go = asyncio.Event()
        self._execute = adapter.execute_step
        adapter.execute_step = self.execute  # type: ignore[method-assign]

    async def execute(self, call: StepCall, report: ProgressSink) -> StepResult:
        self.log.append(f"{call.step} begins")
        try:
            return await self._execute(call, report)
        except asyncio.CancelledError:
            await self.lets_go.wait()
            raise
        finally:
            self.log.append(f"{call.step} ends")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    maker, codec = FakeMaker(), FakeCodec()
    codec.steps[b"judge"] = JudgeReconfigureStep(changes=())
    async with OwnedTasks() as tasks:
        providers = ProviderSet(maker, AdapterServices(clock=SystemTestClock()), tasks)
        await providers.apply(node_config(1), is_whole=True)
        yield Bench(StepRunner(providers, NodeWork(providers, tasks), codec, tasks), maker.made[0], codec)
        await providers.aclose(within_s=1)
        tasks.cancel_children()


@pytest.mark.clause("AD-36", "EN-120")
async def test_a_newer_step_waits_until_the_older_one_has_let_go_of_the_engine(bench: Bench) -> None:
    bench.adapter.step_gate.clear()
    older, newer = inbound_step(step=1), inbound_step(step=2)
    bench.steps.receive(older)
    await eventually(lambda: bench.log == ["1 begins"])
    bench.steps.receive(newer)
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.log == ["1 begins"]
    bench.adapter.step_gate.set()
    bench.lets_go.set()
    await eventually(lambda: newer.results != [])
    assert bench.log == ["1 begins", "1 ends", "2 begins", "2 ends"]
    assert older.results[0].refused_code == "unavailable"
    assert newer.results[0].refused_code == ""


@pytest.mark.clause("AD-36", "EN-120")
async def test_an_older_step_that_has_not_begun_never_touches_the_engine(bench: Bench) -> None:
    inbound = [inbound_step(step=number) for number in (1, 2, 3)]
    for each in inbound:
        bench.steps.receive(each)
    await eventually(lambda: all(each.results for each in inbound))
    assert bench.log == ["3 begins", "3 ends"]
    assert bench.steps.running_count == 0


@pytest.mark.clause("AD-36")
async def test_a_step_of_other_participants_ends_nothing(bench: Bench) -> None:
    bench.adapter.step_gate.clear()
    first, second = inbound_step(ids=("r0",)), inbound_step(operation="op-2", ordinal=2, ids=("r1",))
    bench.steps.receive(first)
    bench.steps.receive(second)
    await eventually(lambda: len(bench.log) == 2)
    bench.adapter.step_gate.set()
    await eventually(lambda: first.results != [] and second.results != [])
    assert {each.results[0].refused_code for each in (first, second)} == {""}


@pytest.mark.clause("AD-36", "AD-47")
async def test_a_judgement_makes_no_step_older_and_is_never_too_old(bench: Bench) -> None:
    judgement = JUDGEMENT_PREFIX + "op-9"
    asked = [
        inbound_step(b"judge", operation=judgement, ordinal=9, step=0),
        inbound_step(operation="op-8", ordinal=8),
        inbound_step(b"judge", operation=judgement, ordinal=1, step=0),
    ]
    for each in asked:
        bench.steps.receive(each)
        await eventually(lambda each=each: each.results != [])  # type: ignore[misc]
    assert {each.results[0].refused_code for each in asked} == {""}


@pytest.mark.clause("AD-36", "AD-47")
async def test_a_judgement_ends_no_step_and_may_not_be_one(bench: Bench) -> None:
    bench.adapter.step_gate.clear()
    step, judged = inbound_step(), inbound_step(b"judge", operation=JUDGEMENT_PREFIX + "op-9", ordinal=9)
    bench.steps.receive(step)
    bench.steps.receive(judged)
    disguised = inbound_step(operation=JUDGEMENT_PREFIX + "op-9", ordinal=9)
    bench.steps.receive(disguised)
    await eventually(lambda: disguised.results != [])
    assert disguised.results[0].refused_code == "unsupported"
    bench.adapter.step_gate.set()
    await eventually(lambda: step.results != [] and judged.results != [])
    assert step.results[0].refused_code == ""
