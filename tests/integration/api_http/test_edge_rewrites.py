"""Opt-in rules of a model through the whole fleet, and what happens without them: nothing (SF-15)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from http_fleet import HttpFleet, fleet_of

from iop.testing.stub_engine import StubCall, sse_events, whole_answer

ASK: dict[str, Any] = {"model": "fast", "messages": [{"role": "user", "content": "hi"}]}
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
EVERY_RULE = frozenset({"merge_system", "reasoning_names", "include_usage"})


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def usage_event(**more: Any) -> bytes:
    return event({"id": "c", "choices": [], "usage": USAGE | more})


def streaming(*events: bytes) -> Any:
    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*events)
        await call.end_chunks()

    return script


async def ask(
    fleet: HttpFleet, path: str = "/v1/chat/completions", **more: Any
) -> tuple[dict[bytes, bytes], bytes]:
    status, headers, body = await fleet.post(json.dumps(ASK | more).encode(), path=path)
    assert status == 200, body
    await fleet.settled()
    return headers, body


def recorded(fleet: HttpFleet, headers: dict[bytes, bytes]) -> tuple[int | None, int | None]:
    record = fleet.edge.outcomes.find(headers[b"x-request-id"].decode())
    assert record is not None and record.usage is not None
    return record.usage.prompt_tokens, record.usage.completion_tokens


# ---- usage ----


@pytest.mark.case("P-03")
@pytest.mark.clause("SF-03", "SF-05")
async def test_the_usage_chunk_that_the_caller_asked_for_passes_unchanged_and_is_recorded() -> None:
    events = [*sse_events(["a"], is_done=False), usage_event(), b"data: [DONE]\n\n"]
    async with fleet_of() as fleet:
        fleet.stub.script = streaming(*events)
        headers, body = await ask(fleet, stream=True, stream_options={"include_usage": True})
        assert body == b"".join(events)
        assert recorded(fleet, headers) == (7, 5)


@pytest.mark.case("P-03")
@pytest.mark.clause("SF-15")
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}], ids=["unsaid", "no"])
async def test_with_its_rule_a_stream_is_asked_for_usage_and_without_it_nothing_is_added(
    options: Any,
) -> None:
    events = [*sse_events(["a"], is_done=False), usage_event(), b"data: [DONE]\n\n"]
    for rules in (frozenset[str](), frozenset({"include_usage"})):
        async with fleet_of(rewrites=rules) as fleet:
            fleet.stub.script = streaming(*events)
            headers, body = await ask(fleet, stream=True, **options)
            asked = fleet.stub.calls[0].json
            assert asked.get("stream_options") == (
                {"include_usage": True} if rules else options.get("stream_options")
            )
            assert body == b"".join(events), "on a tunnel the caller sees the chunk"
            assert recorded(fleet, headers) == (7, 5)


@pytest.mark.case("P-03")
@pytest.mark.clause("SF-15", "SF-10")
async def test_on_converted_routes_nobody_sees_a_usage_chunk_that_nobody_asked_for() -> None:
    message = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "real",
        "content": [],
        "stop_reason": None,
    }
    events = [
        event(
            {"type": "message_start", "message": message | {"usage": {"input_tokens": 7, "output_tokens": 0}}}
        ),
        event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}),
        event({"type": "content_block_stop", "index": 0}),
        event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}}),
        event({"type": "message_stop"}),
    ]
    rules = frozenset({"include_usage"})
    async with fleet_of(operations=frozenset({"messages"}), rewrites=rules) as fleet:
        fleet.stub.script = streaming(*events)
        for options in ({}, {"stream_options": {"include_usage": False}}):
            headers, body = await ask(fleet, stream=True, **options)
            assert b'"usage"' not in body and body.endswith(b"data: [DONE]\n\n")
            assert recorded(fleet, headers) == (7, 5)
        _, body = await ask(fleet, stream=True, stream_options={"include_usage": True})
        last = json.loads(body.split(b"\n\n")[-3].removeprefix(b"data: "))
        assert last["choices"] == [] and last["usage"]["total_tokens"] == 12


@pytest.mark.case("P-03")
@pytest.mark.clause("SF-05", "SF-14")
async def test_usage_on_every_chunk_is_not_summed_and_a_first_chunk_without_choices_is_harmless() -> None:
    def said(text: str, **usage: int) -> bytes:
        return event(
            {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], "usage": USAGE | usage}
        )

    end = event({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE})
    events = [
        event({"id": "c", "choices": []}),
        said("a", completion_tokens=1),
        said("b"),
        end,
        b"data: [DONE]\n\n",
    ]
    async with fleet_of() as fleet:
        fleet.stub.script = streaming(*events)
        headers, body = await ask(fleet, stream=True)
        assert body == b"".join(events)
        assert recorded(fleet, headers) == (7, 5)


# ---- reasoning ----


def thinking(name: str) -> list[bytes]:
    deltas: list[dict[str, Any]] = [
        {name: "Hm, "},
        {name: "東京", "content": ""},
        {"content": "", "vendor": {"a": [1]}},
    ]
    chunks = [event({"id": "c", "choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    return [*chunks, *sse_events(["42"])]


def joined(body: bytes, name: str) -> str:
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get(name) or "" for line in lines)


@pytest.mark.case("P-14")
@pytest.mark.clause("SF-15", "SF-03", "SF-10")
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_reasoning_passes_under_its_own_name_or_with_the_rule_under_both(name: str) -> None:
    events = thinking(name)
    async with fleet_of() as fleet:
        fleet.stub.script = streaming(*events)
        assert (await ask(fleet, stream=True))[1] == b"".join(events)
    async with fleet_of(rewrites=frozenset({"reasoning_names"})) as fleet:
        fleet.stub.script = streaming(*[bytes([byte]) for byte in b"".join(events)])
        _, body = await ask(fleet, stream=True)
        for each in ("reasoning", "reasoning_content"):
            assert joined(body, each) == "Hm, 東京"
        assert joined(body, "content") == "42"
        assert b'"vendor": {"a": [1]}' in body
        fleet.stub.script = streaming(*events)
        message = {"role": "assistant", name: "Hm", "content": "42"}

        async def whole(call: StubCall) -> None:
            await call.write(
                whole_answer(json.dumps({"choices": [{"index": 0, "message": message}]}).encode())
            )

        fleet.stub.script = whole
        _, body = await ask(fleet)
        told = json.loads(body)["choices"][0]["message"]
        assert told == message | {"reasoning": "Hm", "reasoning_content": "Hm"}
    async with fleet_of(operations=frozenset({"chat_completions"}), rewrites=EVERY_RULE) as fleet:
        fleet.stub.script = streaming(*events)
        _, body = await ask(fleet, "/v1/messages", stream=True, max_tokens=9)
        assert body.count(b'"type":"thinking"') == 1
        deltas = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: ")]
        thought = "".join(
            each["delta"].get("thinking", "") for each in deltas if each["type"] == "content_block_delta"
        )
        assert thought == "Hm, 東京"


@pytest.mark.case("P-14")
@pytest.mark.clause("SF-15", "SF-10")
@pytest.mark.parametrize("is_stream", [True, False])
async def test_converted_chats_say_reasoning_under_both_names_too(is_stream: bool) -> None:
    answer = {
        "id": "m", "type": "message", "role": "assistant", "model": "real", "stop_reason": "end_turn",
        "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "42"}],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }  # fmt: skip

    async def script(call: StubCall) -> None:
        await call.write(whole_answer(json.dumps(answer).encode()))

    rules = frozenset({"reasoning_names"})
    async with fleet_of(operations=frozenset({"messages"}), rewrites=rules) as fleet:
        fleet.stub.script = script
        _, body = await ask(fleet, stream=is_stream)
        for name in ("reasoning", "reasoning_content"):
            told = joined(body, name) if is_stream else json.loads(body)["choices"][0]["message"][name]
            assert told == "Hm"


# ---- roles ----

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "developer", "content": "be brief"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},  # noqa: E501
    {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    {"role": "system", "content": [{"type": "text", "text": "late"}]},
    {"role": "user", "content": []},
]  # fmt: skip


async def strict(call: StubCall) -> None:
    """A template that takes one leading system message and no other."""
    roles = [message["role"] for message in call.json["messages"]]
    if "developer" in roles or "system" in roles[1:]:
        await call.write(whole_answer(b'{"error":{"message":"roles"}}', status=b"400 Bad Request"))
    else:
        await call.write(whole_answer(b'{"choices":[]}'))


@pytest.mark.case("P-17")
@pytest.mark.clause("SF-03", "SF-15")
async def test_roles_pass_as_they_are_and_the_templates_refusal_comes_back() -> None:
    body = json.dumps(ASK | {"messages": TURNS}).encode()
    async with fleet_of() as fleet:
        fleet.stub.script = strict
        status, headers, answer = await fleet.post(body)
        assert (status, answer) == (400, b'{"error":{"message":"roles"}}')
        assert b"x-iop-origin" not in headers
        assert fleet.stub.calls[0].body == body.replace(b'"fast"', b'"org/Real-8B-Instruct"')


@pytest.mark.case("P-17")
@pytest.mark.clause("SF-15")
@pytest.mark.parametrize("size", [0, 300_000], ids=["small", "large"])
async def test_with_its_rule_one_leading_system_message_holds_both_texts(size: int) -> None:
    turns = [*TURNS, {"role": "user", "content": "x" * size}]
    async with fleet_of(rewrites=frozenset({"merge_system"})) as fleet:
        fleet.stub.script = strict
        await ask(fleet, messages=turns)
        first, *others = fleet.stub.calls[0].json["messages"]
        assert first == {
            "role": "system",
            "content": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "late"}],
        }
        assert others == [turn for turn in turns if turn["role"] not in {"system", "developer"}]
        assert others[1]["content"] is None


@pytest.mark.clause("SF-15", "SF-10")
async def test_a_responses_request_that_becomes_a_chat_is_merged_too() -> None:
    items = [{"role": "user", "content": "hi"}, {"role": "developer", "content": "late"}]
    rules = frozenset({"merge_system"})
    async with fleet_of(operations=frozenset({"chat_completions"}), rewrites=rules) as fleet:
        fleet.stub.script = strict
        body = json.dumps({"model": "fast", "instructions": "be brief", "input": items}).encode()
        await fleet.post(body, path="/v1/responses")
        asked = fleet.stub.calls[0].json["messages"]
        assert [message["role"] for message in asked] == ["system", "user"]
        assert "be brief" in json.dumps(asked[0]) and "late" in json.dumps(asked[0])


# ---- the caller's name for the model ----

MESSAGES_STREAM = (
    b"event: message_start\n"
    b'data: {"type": "message_start", "message": {"id":"m","type":"message","role":"assistant", "model" : "dated-8b",'
    b'"content":[],"stop_reason":null,"usage":{"input_tokens":3,"output_tokens":1}}}\n\n'
    b'event: ping\ndata: {"type":"ping"}\n\n: note "model":"dated-8b"\n'
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
    b'"content_block":{"type":"text","text":""}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta",'
    b'"text":"\xf0\x9f\x9a\x80 \\"model\\":\\"dated-8b\\" \\u00e9"}}\n\n'
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"output_tokens":2}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
RESPONSES_STREAM = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,'
    b'"response":{"id":"r","object":"response",'
    b'"model":"dated-8b","status":"in_progress","output":[],'
    b' "metadata":{"model":"kept"},"big":1152921504606846977}}\n\n'
    b'event: response.output_text.delta\ndata:{"type":"response.output_text.delta","sequence_number":1,"item_id":"o",'
    b'"output_index":0,"content_index":0,"delta":"\xe6\x9d\xb1 \\"model\\""}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","sequence_number":2,"response": {"id":"r",'
    b'"object":"response","status":"completed","output":[],"model" :"dated-8b","usage":{"input_tokens":3,'
    b'"output_tokens":2,"total_tokens":5}} }\n\n'
)


@pytest.mark.case("P-16", "P-01")
@pytest.mark.clause("SF-03", "SF-05", "SF-15")
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize(
    ("path", "stream", "names"),
    [("/v1/messages", MESSAGES_STREAM, 1), ("/v1/responses", RESPONSES_STREAM, 2)],
    ids=["messages", "responses"],
)
async def test_a_stream_of_every_dialect_shows_the_callers_name_and_every_other_byte_as_it_was(
    path: str, stream: bytes, names: int, newline: bytes
) -> None:
    stream = stream.replace(b"\n", newline)
    told = re.sub(rb'("model" ?: ?)"dated-8b"(?=[,}])', rb'\1"fast-latest"', stream)
    assert told.count(b'"fast-latest"') == names, "not in comments, texts or other objects"
    pieces = [[stream], [stream[at : at + 1] for at in range(len(stream))]]
    pieces += [[stream[:at], stream[at:]] for at in range(1, len(stream), 61)]
    pieces += [[stream[at : at + size] for at in range(0, len(stream), size)] for size in (7, 64, 333)]
    async with fleet_of(response_model="alias") as fleet:
        caller = await fleet.call()
        for parts in pieces:
            fleet.stub.script = streaming(*parts)
            ask = json.dumps(ASK | {"model": "fast-latest", "max_tokens": 9, "stream": True}).encode()
            status, _, body = await fleet.post(ask, path=path, caller=caller)
            assert (status, body) == (200, told)
        assert all(call.json["model"] == "org/Real-8B-Instruct" for call in fleet.stub.calls)
        await fleet.settled()


@pytest.mark.case("P-16")
@pytest.mark.clause("SF-15", "SF-14")
@pytest.mark.parametrize(
    ("path", "stream"), [("/v1/messages", MESSAGES_STREAM), ("/v1/responses", RESPONSES_STREAM)]
)
async def test_a_cut_stream_shows_the_callers_name_in_what_came_and_ends_in_the_error(
    path: str, stream: bytes
) -> None:
    at = stream.rindex(b"event: ") + 20
    whole = stream[: stream.rindex(b"event: ")]
    if path == "/v1/messages":
        at = stream.index(b"event: content_block_delta") + 60
        whole = stream[: stream.index(b"event: content_block_delta")]
    async with fleet_of(response_model="alias") as fleet:
        fleet.stub.script = streaming(stream[:at])
        status, _, body = await fleet.post(
            json.dumps(ASK | {"max_tokens": 9, "stream": True}).encode(), path=path
        )
        assert status == 200
        shown, error, _ = body.partition(b"event: error\n")
        assert shown == re.sub(rb'("model" ?: ?)"dated-8b"(?=[,}])', rb'\1"fast"', whole)
        assert error
        await fleet.settled()
