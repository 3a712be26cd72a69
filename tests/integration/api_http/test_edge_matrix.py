"""What `GET /v1/models` says of a pool is what the pool then does (SF-01)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from described_engine import speak_all
from http_fleet import KEY, SECOND, HttpFleet, fleet_of, post

from iop.edge.calls import Outcome, ProviderKey
from iop.edge.snapshot import QueueSpec
from iop.testing.stub_engine import StubCall, StubEngine, whole_answer
from iop.testing.waiting import eventually

MODEL = "org/Real-8B-Instruct"
LISTED = {"object": "list", "data": [{"id": MODEL, "max_model_len": 8192}]}
NO_METHOD = whole_answer(b'{"detail":"Method Not Allowed"}', status=b"405 Method Not Allowed")
NO_PAGE = whole_answer(b'{"detail":"Not Found"}', status=b"404 Not Found")
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}


def having(*paths: bytes) -> Any:
    """An engine with these POST routes, which knows wrong methods."""

    def on_get(path: bytes) -> bytes:
        if path == b"/v1/models":
            return whole_answer(json.dumps(LISTED).encode())
        return NO_METHOD if path in paths else NO_PAGE

    async def script(call: StubCall) -> None:
        if call.path in paths:
            await speak_all(call)
        else:
            await call.write(NO_PAGE)

    return on_get, script


def said(fleet: HttpFleet, key: ProviderKey = KEY) -> Mapping[str, str]:
    report = fleet.edge.nodes.probed(*key)
    return {} if report is None else report.capabilities


async def shown(fleet: HttpFleet) -> dict[str, Any]:
    caller = await fleet.call()
    await caller.send(b"GET /v1/models/fast HTTP/1.1\r\nHost: e\r\n\r\n")
    _, _, body = await caller.read_answer()
    return json.loads(body)["iop"]


@pytest.mark.clause("SF-01", "SF-10", "EN-51")
@pytest.mark.parametrize("route", [b"/v1/chat/completions", b"/v1/messages", b"/v1/responses"])
async def test_routes_that_an_engine_lacks_are_found_out_told_and_converted(route: bytes) -> None:
    on_get, script = having(route)
    async with fleet_of(on_get=on_get) as fleet:
        fleet.stub.script = script
        await eventually(lambda: "absent_operations" in said(fleet))
        told = await shown(fleet)
        assert told["endpoints"][route.decode()] == ["tunnel"]
        for path, body in BODIES.items():
            status, headers, _ = await fleet.post(json.dumps({"model": "fast", **body}).encode(), path=path)
            ways = told["endpoints"].get(path)
            if ways is None:
                assert status == 404, path
            elif ways == ["estimate"]:
                assert (status, headers[b"x-iop-estimate"]) == (200, b"1"), path
            else:
                assert status == 200, path
                assert ways == (["converted"] if b"x-iop-converted" in headers else ["tunnel"]), path
        assert set(told["endpoints"]) >= {"/v1/chat/completions", "/v1/messages", "/v1/responses"}
        assert "/v1/embeddings" not in told["endpoints"]


@pytest.mark.clause("SF-01")
async def test_what_the_engine_says_is_shown_and_what_it_does_not_say_is_unknown() -> None:
    on_get, _ = having(b"/v1/chat/completions")
    async with fleet_of(on_get=on_get, capacity=3) as fleet:
        await eventually(lambda: f"model:{MODEL}" in said(fleet))
        told = await shown(fleet)
        assert told["context_window"] == {"min": 8192, "max": 8192}
        assert told["modalities"] == {"text": True, "image": None, "audio": None}
        assert told["tools"] is None
        assert told["limits"]["concurrent"] == 3 and told["limits"]["queue"] == 2
        assert (told["providers_configured"], told["providers_live"]) == (1, 1)
        await fleet.stop_node()
        gone = await shown(fleet)
        assert gone["context_window"] == {"min": None, "max": None}
        assert (gone["providers_live"], gone["limits"]["concurrent"]) == (0, 0)


@pytest.mark.clause("SF-01")
async def test_an_engine_that_answers_all_alike_is_believed_its_profile() -> None:
    async with fleet_of() as fleet:
        await eventually(lambda: fleet.edge.nodes.probed(*KEY) is not None)
        told = await shown(fleet)
        assert told["endpoints"] == {path: ["tunnel"] for path in BODIES}
        assert told["context_window"] == {"min": None, "max": None}


def asked(stub: StubEngine, path: str) -> int:
    return sum(1 for call in stub.calls if call.path == path.encode() and call.method == b"POST")


@pytest.mark.clause("SF-01", "EN-51")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/messages/count_tokens"])
async def test_in_a_mixed_pool_only_those_that_have_the_route_are_asked(path: str) -> None:
    """The chats-only engine would answer 404, and be picked as often as the other."""
    on_get, script = having(b"/v1/chat/completions")
    able_get, able_script = having(b"/v1/chat/completions", path.encode())
    async with (
        StubEngine(able_script, on_get=able_get) as able,
        fleet_of(on_get=on_get, second_endpoint=able.endpoint) as fleet,
    ):
        fleet.stub.script = script
        await eventually(lambda: all("absent_operations" in said(fleet, key) for key in (KEY, SECOND)))
        assert (await shown(fleet))["endpoints"][path] == ["tunnel"]
        for _ in range(6):
            status, headers, _ = await fleet.post(
                json.dumps({"model": "fast", **BODIES[path]}).encode(), path=path
            )
            assert (status, headers.get(b"x-iop-estimate")) == (200, None)
        assert (asked(fleet.stub, path), asked(able, path)) == (0, 6)
        why = {
            str(each.key): each.why
            for each in fleet.edge.outcomes.find(headers[b"x-request-id"].decode()).candidates  # type: ignore[union-attr]
        }
        assert why[str(SECOND)] == "has room"
        assert why[str(KEY)] == "its engine was found to lack a route for this operation"


@pytest.mark.clause("SF-01", "SF-06")
async def test_a_route_that_no_engine_of_the_pool_has_is_refused_by_name_and_never_asked_for() -> None:
    on_get, script = having(b"/v1/chat/completions")
    async with (
        StubEngine(script, on_get=on_get) as other,
        fleet_of(on_get=on_get, second_endpoint=other.endpoint) as fleet,
    ):
        fleet.stub.script = script
        await eventually(lambda: all("absent_operations" in said(fleet, key) for key in (KEY, SECOND)))
        status, headers, body = await fleet.post(b'{"model":"fast","input":"x"}', path="/v1/embeddings")
        assert (status, headers[b"x-iop-reason"]) == (404, b"operation_not_supported")
        assert b"chat_completions" in body and b"embeddings" not in body.partition(b"it offers")[2]
        assert asked(fleet.stub, "/v1/embeddings") == asked(other, "/v1/embeddings") == 0


@pytest.mark.clause("SF-01")
async def test_embeddings_pass_a_provider_of_runs_over() -> None:
    _, script = having(b"/v1/embeddings")
    async with StubEngine(script) as other, fleet_of(is_ollama=True, second_endpoint=other.endpoint) as fleet:
        for _ in range(4):
            status, _, _ = await fleet.post(b'{"model":"fast","input":"x"}', path="/v1/embeddings")
            assert status == 200


@pytest.mark.clause("SF-01", "SF-14")
async def test_tokens_are_estimated_only_where_messages_are_served() -> None:
    body = json.dumps({"model": "fast", **BODIES["/v1/messages/count_tokens"]}).encode()
    async with fleet_of(operations=frozenset({"embeddings"})) as fleet:
        assert list((await shown(fleet))["endpoints"]) == ["/v1/embeddings"]
        status, headers, _ = await fleet.post(body, path="/v1/messages/count_tokens")
        assert (status, headers[b"x-iop-reason"]) == (404, b"operation_not_supported")


@pytest.mark.clause("SF-10", "SF-01", "EN-112")
@pytest.mark.parametrize("is_busy", [False, True])
async def test_what_a_conversion_cannot_say_goes_to_who_speaks_the_dialect(is_busy: bool) -> None:
    """The chats-only engine comes first; what no chat can say is no reason to refuse while another takes messages."""
    on_get, script = having(b"/v1/chat/completions")
    able_get, able_script = having(b"/v1/messages")
    go_on = asyncio.Event()

    async def slow(call: StubCall) -> None:
        if is_busy:
            await go_on.wait()
        await able_script(call)

    odd = {"model": "fast", **BODIES["/v1/messages"], "container": "c"}
    async with (
        StubEngine(slow, on_get=able_get) as able,
        fleet_of(on_get=on_get, second_endpoint=able.endpoint, second_capacity=1, queue=QueueSpec()) as fleet,
    ):
        fleet.stub.script = script
        await eventually(lambda: all("absent_operations" in said(fleet, key) for key in (KEY, SECOND)))
        callers = [await fleet.call() for _ in range(3)]
        for caller in callers:
            await caller.send(post(json.dumps(odd).encode(), path="/v1/messages"))
        if is_busy:
            await eventually(lambda: asked(able, "/v1/messages") == 1 and fleet.edge.pools.waiting == 2)
            go_on.set()
        for caller in callers:
            status, headers, _ = await caller.read_answer()
            assert (status, headers.get(b"x-iop-converted")) == (200, None)
            record = fleet.edge.outcomes.find(headers[b"x-request-id"].decode())
            assert record is not None
            await eventually(lambda record=record: record.outcome is Outcome.COMPLETE)
        assert asked(able, "/v1/messages") == 3
        assert fleet.edge.outcomes.begun_total == 3, "one record for each request"
        await fleet.settled()


@pytest.mark.clause("SF-10")
async def test_what_nobody_can_be_told_is_refused_by_its_field_once() -> None:
    on_get, script = having(b"/v1/chat/completions")
    odd = {"model": "fast", **BODIES["/v1/messages"], "container": "c"}
    async with (
        StubEngine(script, on_get=on_get) as other,
        fleet_of(on_get=on_get, second_endpoint=other.endpoint) as fleet,
    ):
        await eventually(lambda: all("absent_operations" in said(fleet, key) for key in (KEY, SECOND)))
        status, headers, body = await fleet.post(json.dumps(odd).encode(), path="/v1/messages")
        assert (status, headers[b"x-iop-reason"]) == (400, b"unsupported_field")
        assert b"container" in body
        await fleet.settled()
        record = fleet.edge.outcomes.find(headers[b"x-request-id"].decode())
        assert record is not None and record.outcome is Outcome.REJECTED
        assert record.reason == "UNSUPPORTED_FIELD"
        assert fleet.edge.outcomes.begun_total == 1


@pytest.mark.clause("EN-51", "SF-01")
async def test_routes_that_a_profile_writes_out_are_believed_whatever_a_look_finds() -> None:
    """An engine may answer a GET of a route that it has with 404; the profile written out is the way to say so."""
    written = frozenset({"chat_completions", "completions", "embeddings"})
    on_get, _ = having(b"/v1/embeddings")
    async with fleet_of(on_get=on_get, operations=written) as fleet:
        fleet.stub.script = speak_all
        await eventually(lambda: "completions" in said(fleet).get("absent_operations", ""))
        assert (await shown(fleet))["endpoints"]["/v1/chat/completions"] == ["tunnel"]
        chat = json.dumps({"model": "fast", **BODIES["/v1/chat/completions"]}).encode()
        status, headers, _ = await fleet.post(chat)
        assert (status, headers.get(b"x-iop-converted")) == (200, None)
        status, headers, _ = await fleet.post(b'{"model":"fast","prompt":"x"}', path="/v1/completions")
        assert (status, headers[b"x-iop-reason"]) == (404, b"operation_not_supported")
