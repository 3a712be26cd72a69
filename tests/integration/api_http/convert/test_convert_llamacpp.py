"""A real llama.cpp that may be asked in one dialect only: every official client gets its own all the same."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_scenarios import Driver
from dialect_clients import TALKS, Ask
from http_fleet import KEY, fleet_of

from iop.edge.snapshot import PoolMember

ROOT = Path(__file__).resolve().parents[4]
ANSWER = "The sea is wide and the sky is blue today."
OPERATIONS = {"chat": "chat_completions", "messages": "messages", "responses": "responses"}


ASK = Ask("weather?", with_tools=True, max_tokens=512)


def known_tool(driver: Driver) -> dict[str, Any]:
    """The tool under the name that the scripted model calls; another one it could only be forced to."""
    tools = json.dumps(driver.talk.params(ASK)["tools"]).replace('"weather"', '"get_weather"')
    return {"tools": json.loads(tools), "extra_body": {"temperature": 0.0}}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """llama.cpp's own server in front of the scripted model; ends with its standard input."""
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    spec = importlib.util.spec_from_file_location("scripted_model_tool", ROOT / "tools" / "scripted_model.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    directory = tmp_path_factory.mktemp("sea")
    tool.make_model(directory, "sea", ANSWER)
    server = ROOT / "tests" / "integration" / "engines" / "llamacpp_server.py"
    with subprocess.Popen(
        [sys.executable, str(server), str(directory / "sea.gguf"), "", "sea", "0", "8192"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.clause("SF-01", "SF-02", "SF-10", "EN-65")
@pytest.mark.parametrize("spoken", OPERATIONS)
@pytest.mark.parametrize("dialect", TALKS)
async def test_official_clients_on_a_real_engine_of_one_dialect(
    endpoint: str, dialect: str, spoken: str
) -> None:
    async with fleet_of(
        endpoint=endpoint,
        operations=frozenset({OPERATIONS[spoken]}),
        members=(PoolMember(key=KEY, target="sea"),),
    ) as fleet:
        for is_sync in (False, True):
            async with Driver(dialect, fleet.url, is_sync=is_sync) as driver:
                # Its own streams of responses do not number their events, which is between it and its client.
                for is_stream in (False,) if dialect == spoken == "responses" else (False, True):
                    plain = await driver.say(Ask("hello"), is_stream=is_stream)
                    assert (plain.text, plain.stop) == (ANSWER, "stop")
                    assert plain.tokens is not None and min(plain.tokens) > 0
                    called = await driver.say(ASK, is_stream=is_stream, **known_tool(driver))
                    assert called.calls == [("get_weather", {"city": "Oslo"})]
                    assert called.stop == "tool_calls"
                    short = await driver.say(Ask("hello", max_tokens=3), is_stream=is_stream)
                    assert ANSWER.startswith(short.text)
                    # Its responses say `completed` where the limit was met, on a tunnel, too.
                    assert short.stop == ("stop" if spoken == "responses" else "length")
        await fleet.settled()
