"""One slot, every route, every ending, a capacity that changes meanwhile: no lease is lost or given twice (P-09)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from iop.testing.process_fleet import ProcessFleet, eventually, provider
from iop.testing.stub_engine import StubCall, StubEngine, sse_events, whole_answer
from iop.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ROUTES = ("chat/completions", "completions", "messages", "responses", "embeddings")
ROUNDS = int(os.environ.get("IOP_LEASE_ROUNDS", "1"))
SOAK_ROUNDS = int(os.environ.get("IOP_LEASE_SOAK_ROUNDS", "50"))
FIRST_BYTE_TIMEOUT_S = 0.15
"""Where running into it is the subject; elsewhere a busy machine must not."""


async def end_ok(call: StubCall) -> None:
    if call.json.get("stream"):
        await call.start_events()
        await call.chunk(*sse_events(["x"]))
        await call.end_chunks()
    else:
        await call.write(whole_answer(b"{}"))


async def end_500(call: StubCall) -> None:
    await call.write(whole_answer(b'{"error":{}}', status=b"500 Internal Server Error"))


async def end_reset(call: StubCall) -> None:
    if call.json.get("stream"):
        await call.start_events()
        await call.chunk(b"data: {")
    call.reset()


async def end_bad_json(call: StubCall) -> None:
    await call.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{{{")
    call.close()


async def hold(call: StubCall) -> None:
    await call.wait_gone(within_s=30)


Ending = Callable[[StubCall], Awaitable[None]]
ENDINGS: dict[str, Ending] = {
    "ok": end_ok,
    "500": end_500,
    "reset": end_reset,
    "bad JSON": end_bad_json,
    "time-out": hold,
    "gone": hold,
}


class Engine:
    """Answers as its caller's ``user`` field says, and counts how many it answers at once."""

    def __init__(self) -> None:
        self.running: set[StubCall] = set()
        self.running_max = 0
        self.arrived = asyncio.Event()

    async def __call__(self, call: StubCall) -> None:
        self.running.add(call)
        # A stub looks for those who left now and then only; what has been closed does not run any more.
        self.running_max = max(self.running_max, sum(not item.is_closed for item in self.running))
        self.arrived.set()
        try:
            await ENDINGS[call.json["user"]](call)
        finally:
            self.running.discard(call)


def fleet_for(directory: Path, stub: StubEngine, *, first_byte_timeout_s: float = PATIENCE_S) -> ProcessFleet:
    return ProcessFleet(
        directory,
        {"n1": [provider(stub.endpoint, capacity=1)]},
        model={"queue": {"max": 100, "timeout_sec": 30}},
        edge={
            "breaker": {"failures": 10_000},  # engines fail on purpose here
            "limits": {"first_byte_timeout_sec": first_byte_timeout_s},
        },
    )


async def run_once(fleet: ProcessFleet, engine: Engine, route: str, ending: str, *, stream: bool) -> None:
    """One request with one ending; leaves the fleet as it found it, or the gauge shows it."""
    engine.arrived.clear()
    caller = await fleet.ask(
        {"model": "fast", "stream": stream, "messages": [], "user": ending},
        "connection: close",
        path=f"/v1/{route}",
    )
    if ending == "gone":
        async with asyncio.timeout(PATIENCE_S):
            await engine.arrived.wait()
        caller.reset()
    else:
        await caller.read_to_end()
        await caller.close()


async def run_matrix(directory: Path, endings: tuple[str, ...], *, rounds: int) -> None:
    engine = Engine()
    first_byte_timeout_s = FIRST_BYTE_TIMEOUT_S if "time-out" in endings else PATIENCE_S
    async with (
        StubEngine(engine) as stub,
        fleet_for(directory, stub, first_byte_timeout_s=first_byte_timeout_s) as fleet,
    ):
        await fleet.start()
        count = 0
        for ending in endings:
            for route in ROUTES:
                for stream in (False, True):
                    for _ in range(rounds):
                        await run_once(fleet, engine, route, ending, stream=stream)
                        count += 1
                    await fleet.settled()
                    # The next one starts at once.
                    await run_once(fleet, engine, route, "ok", stream=stream)
                    count += 1
        await fleet.settled()
        counters = (await fleet.status())["counters"]
        assert counters["leases_granted"] == counters["leases_returned"] == count
        assert engine.running_max == 1, "never more than the capacity"
        assert counters["late_settlements"] == counters["overdue_cancels"] == 0


@pytest.mark.case("P-09")
@pytest.mark.clause("EN-31", "EN-112", "SF-07")
@pytest.mark.parametrize(
    "endings",
    [tuple(ending for ending in ENDINGS if ending != "time-out"), ("time-out",)],
    ids=["all", "time-out"],
)
async def test_no_route_and_no_ending_leaks_a_lease_of_real_processes(
    tmp_path: Path, endings: tuple[str, ...]
) -> None:
    await run_matrix(tmp_path, endings, rounds=ROUNDS)


@pytest.mark.case("P-09")
@pytest.mark.soak
@pytest.mark.clause("EN-31", "EN-112", "SF-07")
@pytest.mark.parametrize("ending", ENDINGS)
async def test_no_route_and_no_ending_leaks_a_lease_in_fifty_rounds(tmp_path: Path, ending: str) -> None:
    await run_matrix(tmp_path, (ending,), rounds=SOAK_ROUNDS)


@pytest.mark.case("P-09")
@pytest.mark.clause("EN-31", "EN-91", "EN-114")
async def test_a_capacity_that_changes_under_running_requests_is_kept_and_leaks_nothing(
    tmp_path: Path,
) -> None:
    """Up while all slots are taken, then down below what runs: the rest end in peace, nothing new starts before."""
    go_on = asyncio.Event()
    running: set[StubCall] = set()
    seen: list[int] = []

    async def script(call: StubCall) -> None:
        running.add(call)
        seen.append(len(running))
        await call.start_events()
        await go_on.wait()
        await call.chunk(*sse_events(["x"]))
        running.discard(call)
        await call.end_chunks()

    async with StubEngine(script) as stub, fleet_for(tmp_path, stub) as fleet:
        await fleet.start()

        async def figures() -> tuple[int, int, int]:
            (shown,) = (await fleet.node("n1"))["providers"]
            return shown["capacity"], shown["in_flight"], shown["queued"]

        async def come(*wanted: int) -> None:
            async def is_so() -> bool:
                return (await figures())[-len(wanted) :] == wanted

            await eventually(is_so, what=f"capacity, in flight and queued are {wanted}")

        async def resize(capacity: int) -> None:
            fleet.adapters["n1"][0]["capacity"] = capacity
            fleet.write_edge()
            fleet.signal("edge", signal.SIGHUP)

        callers = [
            await fleet.ask({"model": "fast", "stream": True, "messages": []}, "connection: close")
            for _ in range(12)
        ]
        await come(1, 1, 11)
        await eventually(lambda: len(running) == 1, what="it has reached the engine")
        await resize(4)
        await eventually(lambda: len(running) == 4, what="three more start at once")
        await come(4, 4, 8)
        await resize(2)
        await come(2, 4, 8)
        assert len(running) == 4
        seen.clear()
        go_on.set()
        for caller in callers:
            assert b"[DONE]" in await caller.read_to_end()
        assert max(seen) <= 2, "nothing starts while more than the new capacity run"
        await fleet.settled()
        counters = (await fleet.status())["counters"]
        # The Edge knows the new capacity a moment before the Node, whose own gate then refuses (EN-95, EN-117).
        assert counters["leases_granted"] == counters["leases_returned"] == 12 + counters["repeats"]
        assert counters["outcome_complete"] == 12
        await come(2, 0, 0)
