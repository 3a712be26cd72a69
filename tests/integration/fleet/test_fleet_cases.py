"""Shortened representatives of the cases that need a whole fleet: full and slow, changed while streaming, agents."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from iop.testing.process_fleet import ProcessFleet, eventually, post, provider
from iop.testing.stub_engine import StubCall, StubEngine, sse_events, whole_answer

pytestmark = pytest.mark.slow

STREAM = {"model": "fast", "stream": True, "messages": []}
PLAIN = {"model": "fast", "messages": []}
LONG = {"model": "fast", "messages": [{"role": "user", "content": "x" * 400}]}
CLOSE = "connection: close"


def named(name: str, go_on: asyncio.Event) -> Callable[[StubCall], Awaitable[None]]:
    """Streams say the engine's name and wait; all else is answered with it at once."""

    async def script(call: StubCall) -> None:
        if not call.json.get("stream"):
            await call.write(whole_answer(json.dumps({"engine": name}).encode()))
            return
        await call.start_events()
        await call.chunk(*sse_events([name], finish=None, is_done=False))
        await go_on.wait()
        await call.chunk(*sse_events(["end"]))
        await call.end_chunks()

    return script


async def engine_of(fleet: ProcessFleet) -> str:
    """Who answers a new request."""
    caller = await fleet.ask(PLAIN)
    status, _, body = await caller.read_answer()
    assert status == 200, body
    name: str = json.loads(body)["engine"]
    return name


# ---- P-21: the config changes while streams run ----


@pytest.mark.case("P-21")
@pytest.mark.clause("EN-80", "EN-81", "EN-114")
async def test_streams_finish_under_the_config_that_they_began_with(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    async with StubEngine(named("old", go_on)) as old, StubEngine(named("new", go_on)) as new:
        adapters = {"n1": [provider(old.endpoint), {**provider(old.endpoint), "name": "other"}]}
        async with ProcessFleet(tmp_path, adapters) as fleet:
            await fleet.start()
            streams = [await fleet.ask(STREAM, CLOSE, f"x-request-id: s{n}") for n in range(3)]
            for stream in streams:
                await stream.read_until(b"old")

            async def take() -> int:
                """Push what stands in ``fleet`` and wait for the verdict; returns the revision that runs."""
                seen = fleet.log("edge").count("config.")
                fleet.write_edge()
                fleet.signal("edge", signal.SIGHUP)
                await eventually(lambda: fleet.log("edge").count("config.") > seen, what="the verdict")
                revision: int = (await fleet.status())["config_revision"]
                return revision

            async def refreshed(revision: int) -> bool:
                return bool((await fleet.node("n1"))["config_revision"] == revision)

            main, other = fleet.adapters["n1"]
            other["capacity"] = 3  # an unrelated provider
            assert await take() == 2
            await eventually(lambda: refreshed(2), what="the Node took revision 2")
            assert await engine_of(fleet) == "old"

            main["endpoint"] = new.endpoint  # this provider's address
            assert await take() == 3
            await eventually(lambda: refreshed(3), what="the Node took revision 3")
            assert await engine_of(fleet) == "new"

            fleet.more = {"models": [{"id": "fast", "providers": []}]}  # an invalid one
            assert await take() == 3
            (told,) = (line for line in fleet.log("edge").splitlines() if "config.refused" in line)
            assert "models[0].providers: is empty" in told, "the reason is visible"
            assert await engine_of(fleet) == "new"

            fleet.more = {}  # the same one twice has no effect, so nothing is said of it
            fleet.write_edge()
            fleet.signal("edge", signal.SIGHUP)
            fleet.signal("edge", signal.SIGHUP)
            assert await engine_of(fleet) == "new"
            assert (await fleet.status())["config_revision"] == 3

            for capacity in (5, 6):  # two in one breath
                main["capacity"] = capacity
                fleet.write_edge()
                fleet.signal("edge", signal.SIGHUP)
                await asyncio.sleep(0.01)
            await eventually(lambda: _capacity(fleet, 6), what="the newest revision runs")

            fleet.more = {"models": [{"id": "fast", "providers": [_member("other")]}]}
            fleet.adapters["n1"] = [other]  # this provider goes
            await take()
            assert await engine_of(fleet) == "old", "the removed provider takes nothing new"
            assert len((await fleet.status())["leases"]) == 3, "what runs on it goes on"

            go_on.set()
            for n, stream in enumerate(streams):
                assert b"[DONE]" in await stream.read_to_end()
                assert await fleet.ended(f"s{n}") == "complete"
            await fleet.settled()
            assert [item["id"] for item in (await fleet.node("n1"))["providers"]] == ["other"]


def _member(adapter: str) -> dict[str, str]:
    return {"node": "n1", "adapter": adapter, "target": "real"}


async def _capacity(fleet: ProcessFleet, capacity: int) -> bool:
    return bool((await fleet.node("n1"))["providers"][0]["capacity"] == capacity)


# ---- P-19: full, slow, empty ----


@pytest.mark.case("P-19")
@pytest.mark.clause("EN-110", "EN-111", "EN-14")
async def test_a_full_a_slow_and_an_empty_pool_answer_as_they_must(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(call: StubCall) -> None:
        await go_on.wait()
        await call.write(whole_answer(b"{}"))

    async with StubEngine(script) as stub:
        # Two models on the same slots: who waits for one of them is in no hurry.
        models = [
            {
                "id": name,
                "long_context_tokens": 50,
                "queue": {"max": 2, "timeout_sec": timeout_s, "no_capacity_grace_sec": 0.5},
                "providers": [{"node": "n1", "adapter": "main", "target": "real"}],
            }
            for name, timeout_s in (("fast", 60), ("hasty", 0.3))
        ]
        async with ProcessFleet(
            tmp_path,
            {"n1": [provider(stub.endpoint, capacity=2, long_context_capacity=1)]},
            edge={"models": models},
        ) as fleet:
            await fleet.start()

            async def live(number: int) -> bool:
                return bool((await fleet.status())["counters"]["requests_live"] == number)

            # The long slot is busy: a second long one waits in its class and holds up no short one.
            first = await fleet.ask(LONG)
            await eventually(lambda: len(stub.calls) == 1, what="one runs")
            second_long = await fleet.ask(LONG)
            await eventually(lambda: live(2), what="one waits")
            short = await fleet.ask(PLAIN)
            await eventually(lambda: len(stub.calls) == 2, what="the short one runs beside")
            assert await live(3)

            # Both slots are busy: who waits has a time, another waits beside, the third is told so at once.
            hasty = await fleet.ask({**PLAIN, "model": "hasty"})
            status, fields, _ = await hasty.read_answer()
            assert (status, fields[b"x-iop-reason"]) == (429, b"queue_timeout")
            assert b"retry-after" in fields
            waiting = await fleet.ask(PLAIN)
            await eventually(lambda: live(4), what="it waits")
            refused = await fleet.ask(PLAIN)
            status, fields, _ = await refused.read_answer()
            assert (status, fields[b"x-iop-reason"]) == (429, b"queue_full")
            # One who leaves frees the place at once.
            waiting.reset()
            await eventually(lambda: live(3), what="its place is free")
            waiting = await fleet.ask(PLAIN)
            await eventually(lambda: live(4), what="another has it")
            go_on.set()
            for caller in (first, second_long, short, waiting):
                assert (await caller.read_answer())[0] == 200
            await fleet.settled()

            unknown = await fleet.ask({**PLAIN, "model": "nobody"})
            assert (await unknown.read_answer())[0] == 404
            fleet.kill("n1")
            alone = await fleet.ask(PLAIN)
            status, fields, _ = await alone.read_answer()
            assert (status, fields[b"x-iop-reason"]) == (503, b"no_capacity")
            assert b"retry-after" in fields


@pytest.mark.case("P-19")
@pytest.mark.clause("EN-109", "EN-110")
async def test_nobody_waits_for_what_a_node_that_stops_still_does(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(call: StubCall) -> None:
        await go_on.wait()
        await call.write(whole_answer(b"{}"))

    async with StubEngine(script) as stub:
        fleet = ProcessFleet(
            tmp_path,
            {"n1": [provider(stub.endpoint, capacity=1)]},
            model={"queue": {"timeout_sec": 60, "no_capacity_grace_sec": 0.5}},
        )
        async with fleet:
            await fleet.start()
            running = await fleet.ask(PLAIN)
            await eventually(lambda: len(stub.calls) == 1, what="one runs")
            waiting = await fleet.ask(PLAIN)
            fleet.signal("n1", signal.SIGTERM)
            for caller in (waiting, await fleet.ask(PLAIN)):
                status, fields, _ = await caller.read_answer()
                assert (status, fields[b"x-iop-reason"]) == (503, b"no_capacity")
            (shown,) = (await fleet.node("n1"))["providers"]
            assert (shown["status"], shown["in_flight"]) == ("draining", 1)
            go_on.set()
            assert (await running.read_answer())[0] == 200, "what ran has finished"
            await fleet.settled()


# ---- P-10: agents ----

STUBBORN = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tag = sys.argv[1]
print(json.dumps({"type": "text", "text": "started"}), flush=True)
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", sleep, tag], start_new_session=True)
while True:
    print(json.dumps({"type": "text", "text": " more"}), flush=True)
    time.sleep(0.05)
"""
ASKING = "import sys, time; sys.stdin.read(); time.sleep(600)"
WRITING = """
import os, sys
said = sys.stdin.read()
open("notes", "a").write(said)
print(oct(os.stat(".").st_mode & 0o777), os.getcwd(), open("notes").read().count("NOTE"))
"""


def agent(file: Path, code: str, *arguments: str, **more: object) -> dict[str, object]:
    file.write_text(code)
    name = file.stem
    settings = {"command": [sys.executable, "-S", str(file), *arguments], "start_timeout_sec": 60, **more}
    return {"name": name, "type": "cli", "cli": settings}


def tagged(tag: str) -> list[int]:
    """Living processes that carry a tag in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        is_tagged = process.pid != os.getpid() and tag in (process.info["cmdline"] or ())
        if is_tagged and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.mark.case("P-10")
@pytest.mark.clause("EN-42", "EN-56", "SF-16")
async def test_agents_that_will_not_die_that_ask_and_that_write_side_by_side(tmp_path: Path) -> None:
    tag = f"agent-of-{os.getpid()}-{tmp_path.name}"
    agents = [
        agent(tmp_path / "stubborn.py", STUBBORN, tag, output="json_lines"),
        agent(tmp_path / "asking.py", ASKING, start_timeout_sec=2),
        agent(tmp_path / "writing.py", WRITING),
    ]
    models = [
        {"id": item["name"], "providers": [{"node": "n1", "adapter": item["name"], "target": "agent"}]}
        for item in agents
    ]
    async with ProcessFleet(tmp_path, {"n1": agents}, edge={"models": models}) as fleet:
        await fleet.start()

        def request(model: str, *, stream: bool = False, text: str = "NOTE") -> dict[str, object]:
            return {"model": model, "stream": stream, "messages": [{"role": "user", "content": text}]}

        caller = await fleet.ask(request("stubborn", stream=True), "x-request-id: left")
        await caller.read_until(b"more")
        assert len(tagged(tag)) >= 2, "the agent and its grandchild"
        caller.reset()
        await eventually(lambda: not tagged(tag), what="the agent and all of its processes are gone")
        await fleet.settled()
        assert await fleet.ended("left") == "client_cancelled"

        asking = await fleet.ask(request("asking"))
        status, _, body = await asking.read_answer()
        assert status >= 500, body
        assert "output" in json.loads(body)["error"]["message"], body

        both = [await fleet.ask(request("writing")) for _ in range(2)]
        seen = []
        for caller in both:
            status, _, body = await caller.read_answer()
            assert status == 200, body
            seen.append(json.loads(body)["choices"][0]["message"]["content"].split())
        assert [mode for mode, _, _ in seen] == ["0o700", "0o700"]
        assert len({directory for _, directory, _ in seen}) == 2, "no shared working directory"
        assert [notes for _, _, notes in seen] == ["1", "1"], "no crossing"
        await fleet.settled()


# ---- an engine that hangs, beside one that does not ----


@pytest.mark.clause("EN-116", "EN-118")
async def test_a_hanging_engine_delays_no_other_provider_of_its_node(tmp_path: Path) -> None:
    async def hang(call: StubCall) -> None:
        await call.wait_gone(within_s=60)

    async with StubEngine(hang) as hanging, StubEngine() as well:
        adapters = [provider(hanging.endpoint, capacity=4), {**provider(well.endpoint), "name": "other"}]
        models = [
            {"id": name, "providers": [{"node": "n1", "adapter": adapter, "target": "real"}]}
            for name, adapter in (("stuck", "main"), ("fast", "other"))
        ]
        async with ProcessFleet(tmp_path, {"n1": adapters}, edge={"models": models}) as fleet:
            await fleet.start()
            stuck = [await fleet.ask({**PLAIN, "model": "stuck"}) for _ in range(6)]
            await eventually(lambda: len(hanging.calls) == 4, what="every slot of the hanging one is taken")
            caller = await fleet.call()
            for _ in range(20):
                async with asyncio.timeout(20):
                    await caller.send(post(PLAIN))
                    assert (await caller.read_answer())[0] == 200

            async def are_the_stuck() -> bool:
                nonlocal leases
                leases = (await fleet.status())["leases"]
                return [lease["provider"] for lease in leases] == ["main"] * 4

            leases: list[dict[str, str]] = []
            await eventually(are_the_stuck, what="only the hanging ones hold a lease")
            assert len({lease["run_id"] for lease in leases}) == 4
            for caller in stuck:
                caller.reset()
            await fleet.settled()
