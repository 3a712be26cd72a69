"""Cancel the Node's own waits at every point: nothing is left behind, nothing is half done."""

from __future__ import annotations

import asyncio

import pytest
from node_doubles import (
    FakeCodec,
    FakeMaker,
    adapter_config,
    inbound_step,
    node_config,
    run_request,
    tunnel_request,
)

from iop.adapters.base import AdapterServices
from iop.node.providers import ProviderSet
from iop.node.step_runner import StepRunner
from iop.node.tasks import OwnedTasks
from iop.node.work import NodeWork
from iop.testing.adapter_suite import RunRecorder, SystemTestClock, TunnelRecorder
from iop.testing.cancel_sweep import SweepPoint, sweep
from iop.testing.waiting import eventually
from iop.wire.messages import NodeConfig


@pytest.mark.clause("EN-80", "EN-114")
async def test_a_config_that_is_called_off_at_any_point_leaves_the_old_one_whole() -> None:
    maker = FakeMaker()
    async with OwnedTasks() as tasks:
        providers = ProviderSet(maker, AdapterServices(clock=SystemTestClock()), tasks)
        await providers.apply(node_config(1, adapter_config("a"), adapter_config("b")), is_whole=True)
        old = dict(providers.providers)
        revision = 1

        async def apply() -> None:
            wanted: NodeConfig = node_config(revision + 1, adapter_config("a"), adapter_config("c"))
            await providers.apply(wanted, is_whole=True)

        async def check(point: SweepPoint) -> None:
            nonlocal old
            if point.was_cancelled:
                assert providers.config.config_revision == 1
                assert dict(providers.providers) == old
                kept = {id(provider.adapter) for provider in providers.providers.values()}
                for adapter in maker.made:
                    if id(adapter) in kept:
                        assert not adapter.is_closed
                    else:
                        await eventually(lambda adapter=adapter: adapter.is_closed)  # type: ignore[misc]
            else:
                assert set(providers.providers) == {"a", "c"}

        assert await sweep(apply, check) > 1
        await providers.aclose(within_s=1)
        tasks.cancel_children()


@pytest.mark.clause("EN-95", "EN-117")
async def test_work_that_dies_at_any_point_gives_its_place_back() -> None:
    maker = FakeMaker()
    async with OwnedTasks() as tasks:
        providers = ProviderSet(maker, AdapterServices(clock=SystemTestClock()), tasks)
        await providers.apply(node_config(1), is_whole=True)
        gate = providers.providers["main"].gate

        async def serve() -> None:
            async with OwnedTasks() as own:
                work = NodeWork(providers, own)
                run = RunRecorder(run_request("r"))
                work.open_run(run)  # type: ignore[arg-type]
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                run.cancel()
                await work.wait_idle()

        async def check(point: SweepPoint) -> None:
            await eventually(lambda: gate.in_flight == 0)

        assert await sweep(serve, check) > 1
        await providers.aclose(within_s=1)
        tasks.cancel_children()


@pytest.mark.clause("EN-117")
async def test_a_step_that_is_called_off_at_any_point_answers_its_waiter_and_may_be_sent_again() -> None:
    maker = FakeMaker()
    async with OwnedTasks() as tasks:
        providers = ProviderSet(maker, AdapterServices(clock=SystemTestClock()), tasks)
        await providers.apply(node_config(1), is_whole=True)

        async def run_step() -> None:
            async with OwnedTasks() as own:
                work = NodeWork(providers, own)
                steps = StepRunner(providers, work, FakeCodec(), own)
                inbound = inbound_step()
                steps.receive(inbound)
                try:
                    await steps.wait_idle()
                finally:
                    own.cancel_children()
                    last.append((steps, inbound.results))

        last: list[tuple[StepRunner, list[object]]] = []

        async def check(point: SweepPoint) -> None:
            steps, results = last[-1]
            assert steps.running_count == 0
            assert len(results) == 1

        assert await sweep(run_step, check) >= 1
        await providers.aclose(within_s=1)
        tasks.cancel_children()


@pytest.mark.clause("EN-95")
async def test_the_gate_is_empty_after_every_ending() -> None:
    maker = FakeMaker()
    async with OwnedTasks() as tasks:
        providers = ProviderSet(maker, AdapterServices(clock=SystemTestClock()), tasks)
        await providers.apply(
            node_config(1, adapter_config(capacity=1, long_context_capacity=1)), is_whole=True
        )
        provider = providers.providers["main"]
        adapter = maker.made[0]
        work = NodeWork(providers, tasks)
        for number in range(50):
            for is_long in (False, True):
                for ending in ("finish", "cancel", "session"):
                    tunnel = TunnelRecorder(
                        tunnel_request(f"t-{number}", long_context=is_long, session_id="s")
                    )
                    work.open_tunnel(tunnel)  # type: ignore[arg-type]
                    assert provider.gate.in_flight == 1
                    if ending == "finish":
                        adapter.finish()
                    elif ending == "cancel":
                        tunnel.cancel()
                    else:
                        work.terminate_session("s")
                    assert tunnel.is_terminal
                    assert (provider.gate.in_flight, provider.gate.long_in_flight, work.in_flight) == (
                        0,
                        0,
                        0,
                    )
        for target in ("m", "broken", "silent"):
            run = RunRecorder(run_request("r", target=target))
            work.open_run(run)  # type: ignore[arg-type]
            run.cancel()
            await eventually(lambda: provider.gate.in_flight == 0)
            assert run.terminal is not None
        await providers.aclose(within_s=1)
        tasks.cancel_children()
