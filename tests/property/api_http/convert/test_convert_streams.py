"""Random answers as streams, split anywhere: converted, they say what the whole answer says, converted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iop.api.http.convert.answers import AnswerConverter
from iop.api.http.convert.messages_writer import MessagesWriter
from iop.api.http.convert.readers import ChatReader, MessagesReader, Reader
from iop.api.http.convert.responses_reader import ResponsesReader
from iop.api.http.convert.responses_writer import ResponsesWriter
from iop.api.http.convert.sse_parser import SseEvent, SseParser
from iop.api.http.convert.writers import AnswerTerms, ChatWriter

WRITERS = {"chat": ChatWriter, "messages": MessagesWriter, "responses": ResponsesWriter}
TERMS = AnswerTerms(request_id="r1", created=7, has_usage=True)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
CALLS = st.lists(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.one_of(st.integers(0, 9), TEXT), max_size=3),
    max_size=3,
)


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    calls = draw(CALLS)
    return {
        "thought": draw(TEXT),
        "text": draw(TEXT),
        "calls": [json.dumps(call) if call or draw(st.booleans()) else "" for call in calls],
        "reason": "tool_calls" if calls else draw(st.sampled_from(["stop", "length"])),
    }


def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def chat_streams(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """An answer, and one of the ways in which an engine might stream it (P-11, P-12, P-14)."""
    answer = draw(answers())
    deltas: list[dict[str, Any]] = [{"role": "assistant"}, {"content": "", "tool_calls": []}]
    name = draw(st.sampled_from(["reasoning", "reasoning_content"]))
    deltas += [{name: piece} for piece in pieces(draw, answer["thought"])]
    texts = [{"content": piece} for piece in pieces(draw, answer["text"])]
    queues = []
    start, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    for number, arguments in enumerate(answer["calls"]):
        index = start + number * step
        head = {"index": index, "id": f"c{number}", "function": {"name": f"f{number}", "arguments": ""}}
        rest = [{"index": index, "function": {"arguments": piece}} for piece in pieces(draw, arguments)]
        queues.append([head, *rest])
    if queues and texts and draw(st.booleans()):
        texts[-1]["tool_calls"] = [queues[0].pop(0)]  # type: ignore[assignment]  # text and a call in one delta
    deltas += texts
    # The calls begin in their order; after that their arguments may come mixed.
    begun = 0
    while any(queues):
        ready = [n for n, queue in enumerate(queues) if queue and n <= begun]
        chosen = draw(st.sampled_from(ready))
        begun = max(begun, chosen + 1)
        deltas.append({"tool_calls": [queues[chosen].pop(0)]})
    newline = draw(st.sampled_from([b"\n", b"\r\n"]))
    space = draw(st.sampled_from([b"", b" "]))
    chunks = [{"model": "m", "choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    chunks.append({"model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": answer["reason"]}]})
    chunks.append({"model": "m", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    events = [json.dumps(c, ensure_ascii=False).encode() for c in chunks] + [b"[DONE]"]
    return answer, b"".join(b"data:" + space + event + newline * 2 for event in events)


def whole_chat(answer: dict[str, Any]) -> bytes:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": f"f{n}", "arguments": arguments}}
        for n, arguments in enumerate(answer["calls"])
    ]
    message = {"content": answer["text"], "reasoning_content": answer["thought"], "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": answer["reason"]}
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    return json.dumps({"model": "m", "choices": [choice], "usage": usage}).encode()


def reader_of(source: str) -> Reader:
    if source == "messages":
        return MessagesReader()
    return ResponsesReader() if source == "responses" else ChatReader(id_base="r1")


def convert(data: list[bytes], source: str, target: str) -> bytes:
    reader = reader_of(source)
    converter = AnswerConverter(reader, WRITERS[target](TERMS))
    out = [converter.feed(part) for part in data]
    return b"".join([*out, converter.finish()])


def whole(body: bytes, target: str) -> dict[str, Any]:
    return json.loads(AnswerConverter(ChatReader(id_base="r1"), WRITERS[target](TERMS)).whole(body))


def split(draw: st.DataObject, data: bytes) -> list[bytes]:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def events_of(stream: bytes) -> list[dict[str, Any]]:
    return [
        json.loads(item.data)
        for item in SseParser().feed(stream)
        if isinstance(item, SseEvent) and item.data != b"[DONE]"
    ]


# ---- what clients make of it: each rebuilds the answer from its dialect's events, and checks their order ----


def rebuilt_messages(stream: bytes) -> dict[str, Any]:
    message: dict[str, Any] = {}
    open_block = None
    inputs: dict[int, str] = {}
    for event in events_of(stream):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                block, delta = message["content"][open_block], event["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[open_block] = inputs.get(open_block, "") + delta["partial_json"]
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] += delta[key]
            case "content_block_stop":
                assert event["index"] == open_block
                if open_block in inputs:
                    message["content"][open_block]["input"] = json.loads(inputs[open_block])
                open_block = None
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert open_block is None
    return message


def rebuilt_responses(stream: bytes) -> dict[str, Any]:
    events = events_of(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    opened: list[str] = []
    grown: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            opened.append(event["item"]["id"])
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == opened[-1]
            grown[event["item_id"]] = grown.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == opened[-1]
    last = events[-1]["response"]
    for item in last["output"]:
        text = item["arguments"] if item["type"] == "function_call" else next(iter(item["content"]))["text"]
        assert grown[item["id"]] == text
    assert b"[DONE]" not in stream
    return last


def rebuilt_chat(stream: bytes) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    finish = None
    for event in events_of(stream):
        answer = {**event}
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                if key in delta:
                    message[key] = message.get(key, "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": call["function"]})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    choices = [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}]
    assert stream.endswith(b"data: [DONE]\n\n")
    return answer | {"object": "chat.completion", "choices": choices}


def plain(value: Any) -> Any:
    """With arguments as what they mean: an object that became text again may be spaced otherwise."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {k: json.loads(v) if k == "arguments" else plain(v) for k, v in value.items()}
    return value


REBUILT = {"messages": rebuilt_messages, "responses": rebuilt_responses, "chat": rebuilt_chat}


@pytest.mark.case("P-11", "P-12")
@pytest.mark.clause("SF-02", "SF-10")
@pytest.mark.parametrize("target", ["messages", "responses", "chat"])
@given(case=chat_streams(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_chat_stream_converts_to_what_its_whole_answer_converts_to(
    target: str, case: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    answer, stream = case
    assert REBUILT[target](convert(split(data, stream), "chat", target)) == whole(whole_chat(answer), target)


@pytest.mark.clause("SF-02", "SF-10")
@pytest.mark.parametrize("target", ["chat", "responses"])
@given(case=chat_streams(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_messages_stream_converts_to_what_its_whole_answer_converts_to(
    target: str, case: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    answer, stream = case
    messages = convert([stream], "chat", "messages")
    once = convert(split(data, messages), "messages", target)
    told = json.dumps(whole(whole_chat(answer), "messages")).encode()
    again = json.loads(AnswerConverter(MessagesReader(), WRITERS[target](TERMS)).whole(told))
    assert plain(REBUILT[target](once)) == plain(again)


@st.composite
def response_streams(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A response, and one of the ways in which an engine might stream it: with deltas, or pieces told at their end."""
    answer = draw(answers())
    items: list[dict[str, Any]] = []
    if answer["thought"]:
        key = draw(st.sampled_from(["content", "summary"]))
        part = {"type": "reasoning_text" if key == "content" else "summary_text", "text": answer["thought"]}
        items.append({"type": "reasoning", "id": "rs", "content": [], "summary": [], key: [part]})
    if answer["text"]:
        part = {"type": "output_text", "text": answer["text"], "annotations": []}
        items.append({"type": "message", "id": "msg", "role": "assistant", "content": [part]})
    items += [
        {"type": "function_call", "id": f"fc{n}", "call_id": f"c{n}", "name": f"f{n}", "arguments": arguments}
        for n, arguments in enumerate(answer["calls"])
    ]
    is_short = answer["reason"] == "length"
    response = {
        "id": "resp",
        "object": "response",
        "model": "m",
        "status": "incomplete" if is_short else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_short else None,
        "error": None,
        "output": items,
        "usage": {"input_tokens": 5, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 2}},
    }
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response | {"output": [], "status": "in_progress"}},
        {"type": "response.in_progress", "response": response | {"output": [], "status": "in_progress"}},
    ]
    is_terse = draw(st.booleans()) and draw(st.booleans())  # the closing event tells everything
    for index, item in enumerate([] if is_terse else items):
        place = {"output_index": index}
        empty = item | (
            {"arguments": ""} if item["type"] == "function_call" else {"content": [], "summary": []}
        )
        if draw(st.booleans()) or item["type"] == "function_call":
            events.append({"type": "response.output_item.added", **place, "item": empty})
        if draw(st.booleans()):
            match item["type"]:
                case "function_call":
                    name, text = "function_call_arguments", item["arguments"]
                case "message":
                    name, text = "output_text", answer["text"]
                case _:
                    name = "reasoning_text" if item["content"] else "reasoning_summary_text"
                    text = answer["thought"]
            delta = f"response.{name}.delta"
            events += [{"type": delta, **place, "delta": piece} for piece in pieces(draw, text)]
            events.append({"type": f"response.{name}.done", **place, "text": text, "arguments": text})
        events.append({"type": "response.output_item.done", **place, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    newline = draw(st.sampled_from([b"\n", b"\r\n"]))
    lines = [
        b"event: %b%bdata: %b"
        % (event["type"].encode(), newline, json.dumps(event, ensure_ascii=False).encode())
        for event in events
    ]
    return response, b"".join(line + newline * 2 for line in lines)


@pytest.mark.case("P-13")
@pytest.mark.clause("SF-02", "SF-10")
@pytest.mark.parametrize("target", ["chat", "messages", "responses"])
@given(case=response_streams(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_responses_stream_converts_to_what_its_whole_answer_converts_to(
    target: str, case: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    response, stream = case
    streamed = convert(split(data, stream), "responses", target)
    assert streamed == convert([stream], "responses", target)
    body = json.dumps(response).encode()
    again = json.loads(AnswerConverter(ResponsesReader(), WRITERS[target](TERMS)).whole(body))
    assert plain(REBUILT[target](streamed)) == plain(again)


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize("target", ["chat", "messages"])
@given(case=chat_streams())
@settings(max_examples=60, deadline=None)
def test_what_went_by_way_of_responses_says_what_it_said(
    target: str, case: tuple[dict[str, Any], bytes]
) -> None:
    _, stream = case
    direct = REBUILT[target](convert([stream], "chat", target))
    around = REBUILT[target](convert([convert([stream], "chat", "responses")], "responses", target))
    assert plain(around) == plain(direct)


@pytest.mark.clause("SF-14")
@given(case=response_streams(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_responses_stream_cut_before_its_end_is_never_a_success(
    case: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    response, stream = case
    before = stream[: stream.rindex(b"event: response." + response["status"].encode())]
    cut = before[: data.draw(st.integers(0, len(before)))]
    messages, responses, chat = (convert([cut], "responses", t) for t in ("messages", "responses", "chat"))
    assert b"message_stop" not in messages and events_of(messages)[-1]["type"] == "error"
    assert b"response.completed" not in responses and events_of(responses)[-1]["type"] == "response.failed"
    assert b"[DONE]" not in chat and "error" in events_of(chat)[-1]


@pytest.mark.clause("SF-14")
@given(case=response_streams(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_responses_streams_break_nothing(
    case: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    _, stream = case
    damaged = bytearray(stream)
    for place in data.draw(st.lists(st.integers(0, len(stream) - 1), min_size=1, max_size=6)):
        damaged[place] = data.draw(st.integers(0, 255))
    for target in WRITERS:
        convert(split(data, bytes(damaged)), "responses", target)


@pytest.mark.case("P-01")
@pytest.mark.clause("SF-05")
@given(case=chat_streams(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_no_split_changes_a_byte(case: tuple[dict[str, Any], bytes], data: st.DataObject) -> None:
    _, stream = case
    for target in WRITERS:
        assert convert(split(data, stream), "chat", target) == convert([stream], "chat", target)


@pytest.mark.case("P-02")
@pytest.mark.clause("SF-14")
@given(case=chat_streams(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_stream_cut_before_its_finish_is_never_a_success(
    case: tuple[dict[str, Any], bytes], data: st.DataObject
) -> None:
    _, stream = case
    before = stream[: stream.index(b'"finish_reason": "')]
    cut = before[: data.draw(st.integers(0, len(before)))]
    messages, responses, chat = (convert([cut], "chat", t) for t in ("messages", "responses", "chat"))
    assert b"message_stop" not in messages and events_of(messages)[-1]["type"] == "error"
    assert b"response.completed" not in responses and events_of(responses)[-1]["type"] == "response.failed"
    assert b"[DONE]" not in chat and "error" in events_of(chat)[-1]


@pytest.mark.clause("SF-14")
@given(noise=st.lists(st.binary(max_size=40), max_size=6))
@settings(max_examples=100, deadline=None)
def test_rubbish_makes_no_crash_and_no_success(noise: list[bytes]) -> None:
    for source in ("chat", "messages", "responses"):
        for target in WRITERS:
            out = convert([b"data: " + part + b"\n\n" for part in noise], source, target)
            assert b"message_stop" not in out and b"response.completed" not in out
