"""The one list of what clients do, through two Edges that speak OpenEngine to each other (SF-02, SF-24)."""

from __future__ import annotations

from pathlib import Path

import pytest
from chain_site import Chain, chained
from client_scenarios import SCENARIOS, Bench, Driver, scripted
from dialect_clients import TALKS

from iop.testing.stub_engine import StubEngine

ENGINES = {"chat": "openai_compat", "run": "ollama"}


class Both:
    """Two Edges to a scenario that knows one."""

    def __init__(self, chain: Chain, stub: StubEngine) -> None:
        self.stub = stub
        self._chain = chain

    async def settled(self) -> None:
        await self._chain.settled()


@pytest.mark.slow
@pytest.mark.clause("SF-02", "SF-10", "SF-24")
@pytest.mark.parametrize("engine", ENGINES)
async def test_every_scenario_passes_through_two_edges_that_speak_openengine(
    engine: str, tmp_path: Path
) -> None:
    async with StubEngine(scripted(engine)) as stub:
        adapter = {"type": ENGINES[engine], "endpoint": stub.endpoint}
        async with chained(tmp_path, "openengine", adapter) as chain:
            both = Both(chain, stub)
            for dialect in TALKS:
                url = f"http://127.0.0.1:{chain.outer.http_port}/v1"
                async with Driver(dialect, url, is_sync=False) as driver:
                    # To its callers the inner Edge is a provider of runs: what these cannot be told is refused alike.
                    bench = Bench(
                        driver=driver,
                        fleet=both,
                        dialect=dialect,
                        kind="run",
                        model="fast",
                        tells_reasoning=False,
                    )
                    for scenario in SCENARIOS:
                        if dialect not in scenario.dialects or scenario.takes_a_second:
                            continue
                        try:
                            await scenario.check(bench)
                            await both.settled()
                        except BaseException as error:
                            error.add_note(f"scenario: {scenario.name}, {dialect}")
                            raise
