"""Settings of the public listeners reach their processes: strangers, rules, what is shown (SF-11, SF-13, SF-15)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from iop.testing.process_fleet import ProcessFleet, provider
from iop.testing.stub_engine import StubCall, StubEngine, whole_answer

pytestmark = pytest.mark.slow

TURNS = [{"role": "user", "content": "hi"}, {"role": "developer", "content": "be brief"}]


@pytest.mark.case("P-17")
@pytest.mark.clause("SF-11", "SF-12", "SF-13", "SF-15")
async def test_an_edge_process_keeps_to_its_settings_of_the_public_api(tmp_path: Path) -> None:
    async def script(call: StubCall) -> None:
        message = {"role": "assistant", "content": "ok", "reasoning": "hm"}
        await call.write(whole_answer(json.dumps({"choices": [{"index": 0, "message": message}]}).encode()))

    edge = {
        "api_keys": [{"name": "mine", "key": "sha256:" + hashlib.sha256(b"good").hexdigest()}],
        "limits": {"strangers_per_minute": 2},
        "dispatch": {"show_provider": False},
        "models": [
            {
                "id": "fast",
                "rewrites": ["merge_system", "reasoning_names"],
                "providers": [{"node": "n1", "adapter": "main", "target": "real"}],
            }
        ],
    }
    async with (
        StubEngine(script) as stub,
        ProcessFleet(tmp_path, {"n1": [provider(stub.endpoint)]}, edge=edge) as fleet,
    ):
        await fleet.start()
        body = {"model": "fast", "messages": TURNS}
        for status in (401, 401, 429, 429):
            caller = await fleet.ask(body, "x-api-key: bad")
            got, fields, _ = await caller.read_answer()
            assert got == status
            assert (b"retry-after" in fields) == (status == 429)
        stub.calls.clear()
        got, fields, answer = await (await fleet.ask(body, "x-api-key: good")).read_answer()
        assert got == 200
        assert b"x-iop-provider" not in fields
        assert json.loads(answer)["choices"][0]["message"]["reasoning_content"] == "hm"
        (call,) = stub.calls
        assert [message["role"] for message in call.json["messages"]] == ["system", "user"]
