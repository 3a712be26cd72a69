"""In a pool of tunnels and runs a request goes where all of it can be said, and is refused only where nobody is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from described_engine import speak_all, speak_ollama
from http_fleet import KEY, SECOND, HttpFleet, fleet_of
from http_fleet import post as request

from iop.edge.calls import Outcome
from iop.edge.snapshot import QueueSpec
from iop.testing.stub_engine import StubCall, StubEngine, whole_answer
from iop.testing.waiting import eventually

ASK: dict[str, Any] = {"model": "fast", "messages": [{"role": "user", "content": "hi"}]}
PICTURE = {"type": "image_url", "image_url": {"url": "https://pictures.test/a.png"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
UNSAID: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "n": {"n": 2},
    "logit_bias": {"logit_bias": {"5": 1}},
    "modalities": {"modalities": ["text", "audio"]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "messages[0].content": {"messages": [{"role": "user", "content": [PICTURE]}]},
}
"""What Ollama cannot be told, by the field that its refusal names."""

PATIENT = QueueSpec(max_waiters=4, timeout_s=20.0)


def only(path: bytes) -> Any:
    """How an engine with this one POST route answers GETs: it knows wrong methods from unknown paths."""

    def on_get(asked: bytes) -> bytes:
        status = b"405 Method Not Allowed" if asked == path else b"404 Not Found"
        return whole_answer(b'{"detail":"no"}', status=status)

    return on_get


def said(fleet: HttpFleet) -> Mapping[str, str]:
    report = fleet.edge.nodes.probed(*SECOND)
    return {} if report is None else report.capabilities


def why(fleet: HttpFleet, headers: dict[bytes, bytes]) -> dict[str, str]:
    record = fleet.edge.outcomes.find(headers[b"x-request-id"].decode())
    assert record is not None and record.outcome is Outcome.COMPLETE
    return {str(each.key): each.why for each in record.candidates}


@pytest.mark.clause("SF-01", "SF-10", "EN-60")
async def test_what_a_run_cannot_be_told_goes_to_the_tunnel_of_its_pool_and_the_rest_to_both() -> None:
    async with (
        StubEngine(speak_all) as tunnel,
        fleet_of(is_ollama=True, second_endpoint=tunnel.endpoint) as fleet,
    ):
        fleet.stub.script = speak_ollama
        for field, more in UNSAID.items():
            for is_stream in (False, True):
                tunnel.calls.clear()
                body = json.dumps(ASK | more | {"stream": is_stream}).encode()
                for _ in range(2):  # whoever of both is next in turn
                    status, headers, _ = await fleet.post(body)
                    assert status == 200, field
                    assert why(fleet, headers)[str(SECOND)] == "has room", field
                assert [call.json | {"model": "fast"} for call in tunnel.calls] == [json.loads(body)] * 2, (
                    field
                )
        assert fleet.stub.calls == [], "refused before the engine was asked"
        tunnel.calls.clear()
        shown = set()
        for _ in range(4):
            status, headers, _ = await fleet.post(json.dumps(ASK).encode())
            shown.add(headers[b"x-iop-provider"])
        assert (len(shown), len(tunnel.calls), len(fleet.stub.calls)) == (2, 2, 2)
        await fleet.settled()


@pytest.mark.clause("SF-10", "EN-112")
async def test_explain_tells_who_could_not_be_told_a_request() -> None:
    async with (
        StubEngine(speak_all) as tunnel,
        fleet_of(is_ollama=True, second_endpoint=tunnel.endpoint) as fleet,
    ):
        status, headers, _ = await fleet.post(json.dumps(ASK | UNSAID["n"]).encode())
        assert status == 200
        assert why(fleet, headers) == {
            str(KEY): "cannot be told a field of this request",
            str(SECOND): "has room",
        }
        told = fleet.edge.status.explain(headers[b"x-request-id"].decode())
        tried = [(each["provider"], each["error"]) for each in told["tries"]]
        assert tried == [(str(KEY), "invalid_request"), (str(SECOND), "")]
        await fleet.settled()


@pytest.mark.clause("SF-10", "SF-06")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_where_nobody_can_be_told_it_the_refusal_names_the_field(is_stream: bool) -> None:
    async with fleet_of(is_ollama=True) as fleet:
        for field, more in UNSAID.items():
            status, headers, body = await fleet.post(json.dumps(ASK | more | {"stream": is_stream}).encode())
            assert (status, headers[b"x-iop-reason"]) == (400, b"invalid_request"), field
            assert json.loads(body)["error"]["param"] == field
        assert fleet.stub.calls == []
        await fleet.settled()


@pytest.mark.clause("SF-10", "EN-110")
async def test_while_the_tunnel_is_busy_the_request_waits_for_it_rather_than_for_the_run() -> None:
    async def hold(call: StubCall) -> None:
        if len(tunnel.calls) == 1:
            await eventually(lambda: fleet.edge.pools.waiting == 1)
        await speak_all(call)

    async with (
        StubEngine(hold) as tunnel,
        fleet_of(is_ollama=True, second_endpoint=tunnel.endpoint, second_capacity=1, queue=PATIENT) as fleet,
    ):
        body = json.dumps(ASK | UNSAID["n"]).encode()
        first, second = await fleet.call(), await fleet.call()
        for caller in (first, second):
            await caller.send(request(body))
        for caller in (first, second):
            status, _, _ = await caller.read_answer()
            assert status == 200
        assert (len(tunnel.calls), fleet.stub.calls) == (2, [])
        await fleet.settled()


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/messages", {"max_tokens": 9, "stop_sequences": ["x"]}),
        ("/v1/chat/completions", {"stop": ["x"]}),
    ],
)
async def test_what_a_tunnel_of_another_dialect_cannot_be_told_goes_to_the_run(
    path: str, more: dict[str, Any]
) -> None:
    """The tunnel speaks responses alone, which know no stop words, and has more free slots than the run."""
    async with (
        StubEngine(speak_all, on_get=only(b"/v1/responses")) as tunnel,
        fleet_of(is_ollama=True, second_endpoint=tunnel.endpoint, second_capacity=100) as fleet,
    ):
        fleet.stub.script = speak_ollama
        await eventually(lambda: "absent_operations" in said(fleet))
        tunnel.calls.clear()
        status, headers, _ = await fleet.post(json.dumps(ASK | more).encode(), path=path)
        assert (status, len(fleet.stub.calls)) == (200, 1)
        assert why(fleet, headers) == {
            str(KEY): "has room",
            str(SECOND): "cannot be told a field of this request",
        }
        assert tunnel.calls == []
        plain = {name: value for name, value in (ASK | more).items() if not name.startswith("stop")}
        status, headers, _ = await fleet.post(json.dumps(plain).encode(), path=path)
        assert (status, headers[b"x-iop-converted"]) == (200, b"responses")
        # What neither can be told is refused by its name.
        field, value = (
            ("thinking", {"type": "enabled", "budget_tokens": 9}) if "max_tokens" in more else ("n", 2)
        )
        status, _, answer = await fleet.post(json.dumps(ASK | more | {field: value}).encode(), path=path)
        assert (status, field in json.loads(answer)["error"]["message"].split(": ")[0]) == (400, True), answer
        await fleet.settled()
