"""Streams and answers of odd shape, converted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iop.api.http.convert.answers import AnswerConverter, BrokenAnswerError, failure_of_body
from iop.api.http.convert.messages_writer import MessagesWriter
from iop.api.http.convert.readers import ChatReader, MessagesReader
from iop.api.http.convert.responses_writer import ResponsesWriter
from iop.api.http.convert.sse_parser import SseComment, SseEvent, SseParser
from iop.api.http.convert.writers import AnswerTerms, ChatWriter

WRITERS = {"chat": ChatWriter, "messages": MessagesWriter, "responses": ResponsesWriter}


def converter(target: str, *, source: str = "chat", **terms: Any) -> AnswerConverter:
    reader = MessagesReader() if source == "messages" else ChatReader(id_base="r")
    return AnswerConverter(reader, WRITERS[target](AnswerTerms(request_id="r", created=1, **terms)))


def delta(finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return b"data: " + json.dumps({"model": "m", "choices": [choice]}).encode() + b"\n\n"


def call(index: int, **function: str) -> dict[str, Any]:
    return {"index": index, "function": function}


def events(stream: bytes) -> list[dict[str, Any]]:
    items = SseParser().feed(stream)
    return [json.loads(i.data) for i in items if isinstance(i, SseEvent) and i.data != b"[DONE]"]


def run(target: str, *parts: bytes, **terms: Any) -> bytes:
    one = converter(target, **terms)
    return b"".join([*(one.feed(part) for part in parts), one.finish()])


@pytest.mark.case("P-04")
@pytest.mark.clause("SF-05")
def test_the_parser_joins_data_lines_and_gives_comments_between_the_lines_of_an_event() -> None:
    stream = b"\xef\xbb\xbfevent: a\r\n: life\r\ndata: 1\r\ndata:2\r\n\r\n:\ndata\n\nid: 7\n\n"
    for size in (1, 2, 5, len(stream)):
        parser = SseParser()
        items = [item for at in range(0, len(stream), size) for item in parser.feed(stream[at : at + size])]
        assert items == [
            SseComment(text=b" life"),
            SseEvent(name="a", data=b"1\n2"),
            SseComment(text=b""),
            SseEvent(name="", data=b""),
        ]


@pytest.mark.clause("SF-10", "SF-14")
@pytest.mark.parametrize(
    ("ending", "is_success"),
    [
        ([delta("stop"), b"data: [DONE]\n\n"], True),
        ([delta("stop"), b"data:[DONE]\n\n"], True),
        ([delta("stop"), b"data: [DONE]\n\ndata: [DONE]\n\n"], True),
        ([delta("stop")], True),
        ([], False),
        ([delta("stop"), b"data: [DONE]"], True),
        ([b"data: [DONE]"], True),
        ([delta("abort"), b"data: [DONE]\n\n"], False),
    ],
)
def test_each_way_to_end_a_stream_is_told_as_what_it_is(ending: list[bytes], is_success: bool) -> None:
    parts = [delta(content="one "), delta(content="two"), *ending]
    messages = run("messages", *parts)
    assert messages.count(b"event: message_stop\n") == int(is_success)
    assert messages.count(b"event: error\n") == int(not is_success)
    responses = events(run("responses", *parts))
    assert responses[-1]["type"] == ("response.completed" if is_success else "response.failed")


@pytest.mark.case("P-11")
@pytest.mark.clause("SF-10")
def test_indices_that_begin_at_one_and_skip_become_dense_blocks() -> None:
    parts = [
        delta(content="Hm"),
        delta(tool_calls=[{"id": "a", **call(1, name="f", arguments="")}]),
        delta(tool_calls=[{"id": "b", **call(3, name="g", arguments='{"x"')}]),
        delta(tool_calls=[call(1, arguments='{"y":')]),
        delta(tool_calls=[call(3, arguments=":1}")]),
        delta(tool_calls=[call(1, arguments="2}")]),
        delta("tool_calls"),
    ]
    got = events(run("messages", *parts))
    starts = [event for event in got if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    assert [event["content_block"]["type"] for event in starts] == ["text", "tool_use", "tool_use"]
    inputs = {1: "", 2: ""}
    for event in got:
        if event["type"] == "content_block_delta" and event["index"]:
            inputs[event["index"]] += event["delta"]["partial_json"]
    assert inputs == {1: '{"y":2}', 2: '{"x":1}'}
    chat = events(run("chat", *parts))
    indices = [c["index"] for e in chat for x in e["choices"] for c in x["delta"].get("tool_calls", ())]
    assert sorted(set(indices)) == [0, 1]
    done = events(run("responses", *parts))[-1]["response"]["output"]
    assert [item["type"] for item in done] == ["message", "function_call", "function_call"]


@pytest.mark.case("P-12")
@pytest.mark.clause("SF-10")
def test_an_empty_list_of_calls_starts_nothing_and_empty_arguments_become_an_object() -> None:
    parts = [
        delta(content="a", tool_calls=[]),
        delta(tool_calls=[{"id": "a", **call(0, name="f", arguments="")}]),
        delta("stop"),
    ]
    got = events(run("messages", *parts))
    assert [e["content_block"]["type"] for e in got if e["type"] == "content_block_start"] == [
        "text",
        "tool_use",
    ]
    assert [e["delta"]["partial_json"] for e in got if e.get("index") == 1 and "delta" in e] == ["{}"]
    assert got[-2]["delta"]["stop_reason"] == "tool_use"  # whatever the engine called it
    assert events(run("responses", *parts))[-1]["response"]["output"][1]["arguments"] == "{}"


@pytest.mark.case("P-14")
@pytest.mark.clause("SF-10")
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_one_thinking_block_under_either_name(name: str) -> None:
    parts = [
        delta(content="", **{name: "a"}),
        delta(content=None, **{name: "b"}),
        delta(content="c"),
        delta("stop"),
    ]
    got = events(run("messages", *parts))
    thoughts = [e["delta"]["thinking"] for e in got if e.get("delta", {}).get("type") == "thinking_delta"]
    assert "".join(thoughts) == "ab"
    assert sum(e["type"] == "content_block_start" for e in got) == 2
    both = [delta(reasoning="a", reasoning_content="a"), delta("stop")]
    response = events(run("responses", *both))[-1]["response"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "a"}]


@pytest.mark.case("P-13")
@pytest.mark.clause("SF-10")
def test_a_responses_stream_opens_items_before_deltas_and_closes_them_after() -> None:
    parts = [
        delta(content="Hi"),
        delta(tool_calls=[{"id": "a", **call(0, name="f", arguments="{}")}]),
        delta("tool_calls"),
        b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}\n\n',
        b"data: [DONE]\n\n",
    ]
    stream = run("responses", *parts, echo={"temperature": 0.5})
    got = events(stream)
    assert [event["type"].removeprefix("response.") for event in got] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    response = got[-1]["response"]
    assert response["id"] == got[0]["response"]["id"] == "resp_r"
    assert response["model"] == "m"
    assert len(response["output"]) == 2
    assert response["usage"]["total_tokens"] == 6
    assert response["temperature"] == 0.5
    assert b"[DONE]" not in stream


@pytest.mark.case("P-13")
@pytest.mark.clause("SF-10")
def test_a_failure_told_inside_the_stream_is_the_last_word() -> None:
    parts = [delta(content="a"), b'data: {"error":{"message":"oom","code":"x"}}\n\n', delta("stop")]
    got = events(run("responses", *parts))
    assert got[-1]["type"] == "response.failed"
    assert got[-1]["response"]["error"] == {"code": "x", "message": "oom"}
    assert events(run("messages", *parts))[-1]["error"]["message"] == "oom"


@pytest.mark.case("P-03")
@pytest.mark.clause("SF-10")
def test_usage_is_never_summed_and_cached_tokens_are_counted_as_each_dialect_counts_them() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    chunk = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    first = b'data: {"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    parts = [first, delta(content="a"), delta("stop"), chunk, chunk]
    told = next(e for e in events(run("messages", *parts)) if e["type"] == "message_delta")["usage"]
    assert (told["input_tokens"], told["cache_read_input_tokens"], told["output_tokens"]) == (5, 4, 2)
    last = [e for e in events(run("chat", *parts, has_usage=True)) if e["choices"] == []]
    assert [e["usage"]["prompt_tokens"] for e in last] == [9]
    assert not any(e["choices"] == [] for e in events(run("chat", *parts)))


@pytest.mark.clause("SF-10")
def test_calls_without_ids_or_with_one_shared_index_stay_apart() -> None:
    parts = [
        delta(tool_calls=[{"id": "a", **call(0, name="f", arguments="{}")}]),
        delta(tool_calls=[{"id": "b", **call(0, name="g", arguments="{}")}]),
        delta(tool_calls=[{"function": {"name": "h", "arguments": "{}"}, "index": 5}]),
        delta("tool_calls"),
    ]
    output = events(run("responses", *parts))[-1]["response"]["output"]
    assert [(item["name"], item["call_id"]) for item in output] == [("f", "a"), ("g", "b"), ("h", "call_r_2")]


@pytest.mark.clause("SF-10")
def test_a_provider_that_streams_unasked_or_not_although_asked_is_understood() -> None:
    stream = delta(content="Hi") + delta("length") + b"data: [DONE]\n\n"
    whole = json.loads(converter("messages").gathered(stream))
    assert (whole["content"], whole["stop_reason"]) == ([{"type": "text", "text": "Hi"}], "max_tokens")
    body = json.dumps({"choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "length"}]})
    streamed = events(converter("responses").streamed(body.encode()))
    assert streamed[-1]["type"] == "response.incomplete"
    assert streamed[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.clause("SF-14")
@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'{"error":{"message":"x"}}', b'{"choices":[]}'])
def test_a_body_that_is_no_answer_is_no_success(body: bytes) -> None:
    for source in ("chat", "messages"):
        with pytest.raises(BrokenAnswerError):
            converter("messages", source=source).whole(body)


@pytest.mark.clause("SF-06")
def test_only_an_error_object_lends_its_words_to_the_callers_error() -> None:
    assert failure_of_body(b'{"error":{"message":"too long","code":"c"}}', 400).message == "too long"
    assert failure_of_body(b'{"detail":"no"}', 422).message == "no"
    page = failure_of_body(b"<html>10.0.0.1</html>", 502)
    assert page.message == "The provider answered with status 502."


@pytest.mark.clause("SF-10")
def test_a_stop_sequence_is_named_where_the_provider_names_it() -> None:
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "stop_reason": "END"}
    whole = json.loads(converter("messages").whole(json.dumps({"choices": [choice]}).encode()))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.clause("SF-10")
def test_half_a_character_in_a_chunk_breaks_no_stream() -> None:
    half = b'data: {"model":"m","choices":[{"index":0,"delta":{"content":"a\\ud83d"}}]}\n\n'
    got = events(run("messages", half, delta("stop")))
    assert got[-1]["type"] == "message_stop"
    (text,) = [e["delta"]["text"] for e in got if e["type"] == "content_block_delta"]
    assert text.startswith("a")


@pytest.mark.clause("SF-14")
def test_a_chunk_that_cannot_be_read_is_no_silent_loss() -> None:
    got = events(run("messages", delta(content="a"), b"data: {oops\n\n", delta("stop")))
    assert got[-1]["type"] == "error"


BIG = 2**64 + 1
"""Beyond what 64 bits hold: as an id in the arguments of a call, say."""


@pytest.mark.case("P-15")
@pytest.mark.clause("SF-10")
@pytest.mark.parametrize("value", [BIG, -(10**40), "half \ud83d", [[[{"maximum": BIG}]]]])
def test_what_a_response_repeats_of_its_request_is_written_whatever_it_is(value: Any) -> None:
    terms = {"echo": {"metadata": {"a": value}, "tools": [value], "user": value}}
    body = json.dumps(
        {"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}
    ).encode()
    whole = json.loads(converter("responses", **terms).whole(body))
    assert (whole["metadata"], whole["tools"], whole["user"]) == ({"a": value}, [value], value)
    streamed = [
        *events(run("responses", delta(content="a"), delta("stop"), **terms)),
        *events(converter("responses", **terms).streamed(body)),
        *events(run("responses", delta(content="a"), **terms)),  # cut
    ]
    assert {event["type"] for event in streamed} >= {"response.completed", "response.failed"}
    assert all(event["response"]["user"] == value for event in streamed if "response" in event)


@pytest.mark.case("P-15")
@pytest.mark.clause("SF-10")
@pytest.mark.parametrize("target", WRITERS)
def test_large_integers_in_the_arguments_of_a_call_stay_what_they_are(target: str) -> None:
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"id": BIG, "big": 10**30}}
    answer = {"type": "message", "model": "m", "content": [use], "stop_reason": "tool_use"}
    chat = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(use["input"])}}
    choice = {"index": 0, "message": {"content": None, "tool_calls": [chat]}, "finish_reason": "tool_calls"}
    for source, body in (("messages", answer), ("chat", {"choices": [choice]})):
        whole = json.loads(converter(target, source=source).whole(json.dumps(body).encode()))
        match target:
            case "chat":
                given = json.loads(whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
            case "messages":
                given = whole["content"][0]["input"]
            case _:
                given = json.loads(whole["output"][0]["arguments"])
        assert given == use["input"]


@pytest.mark.clause("SF-10")
def test_half_a_character_in_the_arguments_of_a_call_makes_no_text_of_the_object() -> None:
    told = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    choice = {"index": 0, "message": {"tool_calls": [told]}, "finish_reason": "tool_calls"}
    whole = json.loads(converter("messages").whole(json.dumps({"choices": [choice]}).encode()))
    assert whole["content"][0]["input"] == {"a": "\ud83d"}


@pytest.mark.clause("SF-06", "SF-10")
@pytest.mark.parametrize("target", sorted(WRITERS))
def test_arguments_nested_too_deeply_to_be_written_are_a_broken_answer(target: str) -> None:
    """As an object, which some engines send instead of a text; the decoder takes a little more than the encoder."""
    depth = 1000
    arguments = '{"a":' * depth + "1" + "}" * depth
    asked = '{"id":"c","index":0,"function":{"name":"f","arguments":' + arguments + "}}"
    told = '{"choices":[{"index":0,"finish_reason":"tool_calls","%s":{"tool_calls":[' + asked + "]}}]}"
    with pytest.raises(BrokenAnswerError):
        converter(target).whole((told % "message").encode())
    stream = b"data: %b\n\n" % (told % "delta").encode()
    out = run(target, stream)
    assert b"could not be read" in out
    assert b"[DONE]" not in out
