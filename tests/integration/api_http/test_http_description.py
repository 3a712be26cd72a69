"""The OpenAPI description is true: schemathesis, unmodified, finds nothing on any kind of provider.

``IOP_API_EXAMPLES`` is how many requests it makes up for each operation (``make api-fuzz`` asks for many).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
from described_engine import speak_all, speak_ollama
from http_fleet import HttpFleet, fleet_of

from iop.api.http.keys import ApiKeySpec
from iop.api.http.openapi import describe
from iop.testing.waiting import eventually

EXAMPLES = int(os.environ.get("IOP_API_EXAMPLES", "4"))
IS_LONG = "IOP_API_EXAMPLES" in os.environ
KEY = ApiKeySpec(name="caller", sha256=hashlib.sha256(b"caller-key").digest())
HERE = Path(__file__).parent

TARGETS = {
    # Whoever is tunnelled to judges the fields itself, and this engine takes everything.
    "tunnel": ({}, ["negative_data_rejection"]),
    # A conversion refuses what the other dialect cannot say, and lets pass what only hints.
    "chat": (
        {"operations": frozenset({"chat_completions"})},
        ["negative_data_rejection", "positive_data_acceptance"],
    ),
    "messages": (
        {"operations": frozenset({"messages"})},
        ["negative_data_rejection", "positive_data_acceptance"],
    ),
    "run": ({"is_ollama": True}, ["negative_data_rejection", "positive_data_acceptance"]),
}


async def describing(fleet: HttpFleet) -> dict:
    caller = await fleet.call()
    await caller.send(b"GET /openapi.json HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer caller-key\r\n\r\n")
    status, headers, body = await caller.read_answer()
    assert status == 200 and headers[b"content-type"] == b"application/json"
    return json.loads(body)


@pytest.mark.slow
@pytest.mark.timeout(600 + 4 * EXAMPLES)
@pytest.mark.clause("SF-01", "SF-06", "SF-11")
@pytest.mark.parametrize("target", TARGETS)
async def test_schemathesis_finds_nothing(target: str, tmp_path: Path) -> None:
    options, unasked = TARGETS[target]
    # The boundary values of each field take a thousand requests, whatever the number of examples.
    phases = "coverage,fuzzing" if target == "tunnel" or IS_LONG else "fuzzing"
    async with fleet_of(keys=(KEY,), bound_s=600.0 + 4 * EXAMPLES, **options) as fleet:  # type: ignore[arg-type]
        fleet.stub.script = speak_ollama if target == "run" else speak_all
        described = tmp_path / "openapi.json"
        described.write_text(json.dumps(await describing(fleet)))
        tool = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", str(described)),
            *("--url", fleet.url.removesuffix("/v1"), "--header", "Authorization: Bearer caller-key"),
            *("--max-examples", str(EXAMPLES), "--seed", "1", "--generation-deterministic", "--no-color"),
            *("--phases", phases),
            *("--checks", "all", "--exclude-checks", ",".join(unasked), "--continue-on-failure"),
            # How long an answer takes says something about the machine: by itself the tool allows ten seconds.
            *("--suppress-health-check", "all", "--request-timeout", "60", "--max-response-time", "60"),
            cwd=tmp_path,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert tool.stdout is not None
        said = (await tool.stdout.read()).decode()
        assert await tool.wait() == 0, said
        asked = re.search(r"(\d+) generated", said)
        assert asked is not None and int(asked[1]) >= 9 * EXAMPLES, said
        await fleet.settled()
        assert fleet.server.counters.requests >= 9 * EXAMPLES
        await eventually(lambda: fleet.surface.buffered_bytes == 0)


@pytest.mark.clause("SF-01")
async def test_every_route_is_described_and_every_description_is_a_route() -> None:
    async with fleet_of(keys=(KEY,)) as fleet:
        fleet.stub.script = speak_all
        told = await describing(fleet)
        caller = await fleet.call()
        await caller.send(b"GET /nowhere HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer caller-key\r\n\r\n")
        _, _, body = await caller.read_answer()
        served = {path.rstrip(".") for path in re.findall(r"/[\w/.]+", json.loads(body)["error"]["message"])}
    assert served == {path for path in told["paths"] if "{" not in path}


@pytest.mark.clause("SF-11")
async def test_the_description_says_whether_a_key_is_needed() -> None:
    assert {} not in describe("1", needs_key=True)["security"]
    async with fleet_of() as fleet:
        assert {} in (await describing(fleet))["security"]
    async with fleet_of(keys=(KEY,)) as fleet:
        assert {} not in (await describing(fleet))["security"]
        caller = await fleet.call()
        await caller.send(b"GET /openapi.json HTTP/1.1\r\nHost: e\r\n\r\n")
        assert (await caller.read_answer())[0] == 401
