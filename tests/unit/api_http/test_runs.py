"""Normalised runs worded as OpenAI answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iop.api.http.errors import Dialect, error_body, error_status
from iop.api.http.exchange import Exchange
from iop.api.http.limits import HttpLimits
from iop.api.http.protocol import HttpConnection
from iop.api.http.runs import RunRelay
from iop.api.http.server import HttpServer
from iop.testing.http_site import Recorder, SilentTransport, SystemClock
from iop.wire.messages import RunEvent, RunEventType, StreamError, Usage
from iop.wire.scored_deltas import ScoredToken, scored_line


class FakeHandle:
    def __init__(self) -> None:
        self.consumed_bytes = 0
        self.cancels: list[object] = []
        self.is_truncated = False

    def consumed(self, size_bytes: int) -> None:
        self.consumed_bytes += size_bytes

    def cancel(self, reason: object) -> None:
        self.cancels.append(reason)

    def note_truncated(self) -> None:
        self.is_truncated = True


class Scene:
    """One exchange over a transport that only remembers, and the relay that answers it."""

    def __init__(self, *, dialect: Dialect = Dialect.CHAT, **options: Any) -> None:
        self.transport = SilentTransport()
        handler = Recorder()
        handler.on_exchange = lambda exchange, body: None
        server = HttpServer(handler, limits=HttpLimits(), clock=SystemClock())
        self.connection = HttpConnection(server)
        self.connection.connection_made(self.transport)
        self.connection.data_received(b"GET / HTTP/1.1\r\nHost: e\r\n\r\n")
        self.exchange = handler.exchanges[0]
        self.handle = FakeHandle()
        settings: dict[str, Any] = {
            "request_id": "r1",
            "model": "org/Real",
            "created": 7,
            "is_stream": False,
            "has_usage": False,
            "has_tools": False,
            "bytes_max": 1000,
        }
        self.relay = RunRelay(
            self.exchange,
            dialect=dialect,
            begin=lambda exchange, handle, status: [(b"x-ours", b"1")],
            fail=self.fail,
            **(settings | options),
        )
        self.relay.bind(self.handle)  # type: ignore[arg-type]  # the part of a handle that relays use

    def fail(self, exchange: Exchange, error: Any) -> None:
        exchange.respond(error_status(error), [], error_body(error, Dialect.CHAT, "r1"))

    def play(self, *events: RunEvent) -> Scene:
        for event in events:
            self.relay.on_run_event(event)
        return self

    @property
    def head(self) -> bytes:
        return b"".join(self.transport.written).partition(b"\r\n\r\n")[0]

    @property
    def body(self) -> bytes:
        head, _, body = b"".join(self.transport.written).partition(b"\r\n\r\n")
        if b"chunked" not in head:
            return body
        out = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            out += body[: int(size, 16)]
            body = body[int(size, 16) + 2 :]
        return out

    @property
    def events(self) -> list[Any]:
        parts = self.body.decode().split("\n\n")[:-1]
        assert parts[-1] == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


START = RunEvent(type=RunEventType.START)
HELLO = RunEvent(type=RunEventType.DELTA, delta="Héllo ", reasoning_delta="hm")
WORLD = RunEvent(type=RunEventType.DELTA, delta="world")
USAGE = Usage(prompt_tokens=3, completion_tokens=5, cached_prompt_tokens=2)
DONE = RunEvent(type=RunEventType.COMPLETE, finish_reasons=("stop",), usage=USAGE)
CALLS = [{"id": "call_9", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
CALLED = RunEvent(
    type=RunEventType.COMPLETE,
    finish_reasons=("stop",),
    metadata={"openai_tool_calls": json.dumps(CALLS)},
)
TOLD = '{"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}'


@pytest.mark.clause("SF-10", "EN-40")
def test_a_whole_chat_answer_has_everything() -> None:
    scene = Scene().play(START, HELLO, WORLD, DONE)
    value = json.loads(scene.body)
    assert (value["id"], value["object"], value["created"], value["model"]) == (
        "chatcmpl-r1",
        "chat.completion",
        7,
        "org/Real",
    )
    assert value["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Héllo world", "reasoning_content": "hm"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert value["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert b"x-ours: 1" in scene.head
    assert scene.handle.consumed_bytes == len("Héllo hmworld".encode())


@pytest.mark.clause("SF-10", "EN-40")
def test_a_streamed_chat_answer_says_the_same_role_first() -> None:
    events = Scene(is_stream=True, has_usage=True).play(START, HELLO, WORLD, DONE).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events[1:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Héllo world"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "stop"]
    assert (events[-1]["choices"], events[-1]["usage"]["total_tokens"]) == ([], 8)


@pytest.mark.clause("SF-10")
def test_a_stream_without_wish_for_usage_has_none() -> None:
    events = Scene(is_stream=True).play(START, HELLO, DONE).events
    assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize("is_stream", [True, False])
def test_completions_speak_of_text(is_stream: bool) -> None:
    scene = Scene(dialect=Dialect.COMPLETIONS, is_stream=is_stream).play(START, WORLD, DONE)
    if is_stream:
        assert [event["choices"][0]["text"] for event in scene.events] == ["world", ""]
        assert scene.events[0]["object"] == "text_completion"
    else:
        assert json.loads(scene.body)["choices"][0]["text"] == "world"


@pytest.mark.clause("SF-10")
def test_alternatives_keep_their_index() -> None:
    second = RunEvent(type=RunEventType.DELTA, delta="two", output_index=1)
    done = RunEvent(type=RunEventType.COMPLETE, finish_reasons=("stop", "length"))
    choices = json.loads(Scene().play(START, WORLD, second, done).body)["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "world", "stop"),
        (1, "two", "length"),
    ]
    events = Scene(is_stream=True).play(START, second, WORLD, done).events
    assert {
        (e["choices"][0]["index"], e["choices"][0]["finish_reason"])
        for e in events
        if e["choices"][0]["finish_reason"]
    } == {
        (0, "stop"),
        (1, "length"),
    }


@pytest.mark.clause("SF-10", "EN-65")
def test_native_tool_calls_are_restored() -> None:
    choice = json.loads(Scene(has_tools=True).play(START, CALLED).body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": CALLS}
    events = Scene(is_stream=True, has_tools=True).play(START, HELLO, CALLED).events
    assert [
        e["choices"][0]["delta"]["tool_calls"] for e in events if "tool_calls" in e["choices"][0]["delta"]
    ] == [[{"index": 0, **CALLS[0]}]]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.clause("EN-65", "EN-66")
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_marked", [True, False])
def test_text_becomes_tool_calls_only_under_the_mark(is_stream: bool, is_marked: bool) -> None:
    done = RunEvent(
        type=RunEventType.COMPLETE,
        finish_reasons=("stop",),
        metadata={"openai_text_tool_fallback": "true"} if is_marked else {},
    )
    parts = [RunEvent(type=RunEventType.DELTA, delta=text) for text in (" ", TOLD[:9], TOLD[9:])]
    scene = Scene(is_stream=is_stream, has_tools=True).play(START, *parts, done)
    if is_stream:
        deltas = [event["choices"][0]["delta"] for event in scene.events]
        text = "".join(delta.get("content", "") for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        reason = scene.events[-1]["choices"][0]["finish_reason"]
    else:
        choice = json.loads(scene.body)["choices"][0]
        text = choice["message"]["content"] or ""
        calls = choice["message"].get("tool_calls", [])
        reason = choice["finish_reason"]
    if is_marked:
        assert (text, reason) == ("", "tool_calls")
        assert calls[0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    else:
        assert (text, reason, calls) == (" " + TOLD, "stop", [])


@pytest.mark.clause("SF-10", "EN-65", "EN-66")
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_native", [True, False])
def test_a_caller_that_wants_one_call_gets_the_first(is_stream: bool, is_native: bool) -> None:
    two = [{"name": name, "arguments": {}} for name in ("first", "second")]
    native = [{"id": "c", "type": "function", "function": {**call, "arguments": "{}"}} for call in two]
    metadata = (
        {"openai_tool_calls": json.dumps(native)} if is_native else {"openai_text_tool_fallback": "true"}
    )
    told = "" if is_native else json.dumps({"tool_calls": two})
    done = RunEvent(type=RunEventType.COMPLETE, finish_reasons=("stop",), metadata=metadata)
    for has_one_call, names in ((True, ["first"]), (False, ["first", "second"])):
        scene = Scene(is_stream=is_stream, has_tools=True, has_one_call=has_one_call)
        scene.play(START, RunEvent(type=RunEventType.DELTA, delta=told), done)
        if is_stream:
            deltas = [event["choices"][0]["delta"] for event in scene.events]
            calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        else:
            calls = json.loads(scene.body)["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == names


SCORED = RunEvent(type=RunEventType.START, metadata={"iop-scored-deltas": "1"})
SCORES = [
    ScoredToken(token="Hé", logprob=-0.5, candidates=(("Hé", -0.5), ("Ha", -1.5))),
    ScoredToken(token="llo", logprob=None),
]


def scored(*parts: str) -> list[RunEvent]:
    return [RunEvent(type=RunEventType.DELTA, delta=part) for part in parts]


@pytest.mark.clause("SF-10", "EN-43")
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("has_tools", [True, False])
def test_scores_of_a_run_are_told_in_the_form_of_chats(is_stream: bool, has_tools: bool) -> None:
    lines = scored_line("Hé", SCORES[:1]) + scored_line("", []) + scored_line("llo", SCORES[1:])
    scene = Scene(is_stream=is_stream, has_tools=has_tools).play(SCORED, *scored(lines[:7], lines[7:]), DONE)
    choices = (
        [event["choices"][0] for event in scene.events if event["choices"]]
        if is_stream
        else json.loads(scene.body)["choices"]
    )
    said = [choice["delta" if is_stream else "message"].get("content") or "" for choice in choices]
    assert "".join(said) == "Héllo"
    told = [one for choice in choices if choice.get("logprobs") for one in choice["logprobs"]["content"]]
    assert told == [
        {
            "token": "Hé",
            "logprob": -0.5,
            "bytes": [72, 195, 169],
            "top_logprobs": [
                {"token": "Hé", "logprob": -0.5, "bytes": [72, 195, 169]},
                {"token": "Ha", "logprob": -1.5, "bytes": [72, 97]},
            ],
        },
        {"token": "llo", "logprob": None, "bytes": [108, 108, 111], "top_logprobs": []},
    ]


@pytest.mark.clause("SF-10", "EN-43")
def test_scores_of_a_run_are_told_in_the_form_of_completions() -> None:
    lines = scored_line("Hé", SCORES[:1]) + scored_line("llo", SCORES[1:])
    whole = json.loads(Scene(dialect=Dialect.COMPLETIONS).play(SCORED, *scored(lines), DONE).body)
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["Hé", "llo"],
        "token_logprobs": [-0.5, None],
        "top_logprobs": [{"Hé": -0.5, "Ha": -1.5}, {}],
        "text_offset": [0, 2],
    }
    scene = Scene(dialect=Dialect.COMPLETIONS, is_stream=True).play(SCORED, *scored(lines), DONE)
    offsets = [event["choices"][0]["logprobs"] for event in scene.events]
    assert [at for told in offsets if told for at in told["text_offset"]] == [0, 2]


@pytest.mark.clause("SF-06", "SF-14")
def test_scores_that_cannot_be_read_end_the_answer_as_no_success() -> None:
    scene = Scene(is_stream=True).play(SCORED, *scored(scored_line("a", []), "rubbish\n"), DONE)
    assert b"upstream_error" in scene.body and b"[DONE]" not in scene.body


@pytest.mark.clause("SF-06", "SF-14")
@pytest.mark.parametrize("is_stream", [True, False])
def test_scores_that_were_cut_make_no_success(is_stream: bool) -> None:
    lines = scored_line("a", []) + scored_line("lost", [])
    scene = Scene(is_stream=is_stream).play(SCORED, *scored(lines[:-1]), DONE)
    assert b"upstream_error" in scene.body and b"[DONE]" not in scene.body


@pytest.mark.clause("SF-06", "EN-101")
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_nodes_number_of_outputs_costs_nothing(is_stream: bool) -> None:
    far = RunEvent(type=RunEventType.DELTA, delta="x", output_index=2**31 - 1)
    scene = Scene(is_stream=is_stream).play(START, far, DONE)
    assert b"upstream_error" in scene.body and b"[DONE]" not in scene.body


@pytest.mark.clause("SF-10", "EN-66")
def test_text_that_is_no_call_does_not_wait_for_the_end() -> None:
    scene = Scene(is_stream=True, has_tools=True).play(START, HELLO)
    assert "Héllo".encode() in scene.body


@pytest.mark.clause("SF-06", "SF-14")
@pytest.mark.parametrize("is_stream", [True, False])
def test_an_error_before_the_first_byte_is_a_status(is_stream: bool) -> None:
    error = StreamError(code="invalid_request", message="tools: must be a list")
    scene = Scene(is_stream=is_stream).play(START, RunEvent(type=RunEventType.ERROR, error=error))
    assert scene.head.startswith(b"HTTP/1.1 400")
    assert json.loads(scene.body)["error"]["message"] == "tools: must be a list"
    lost = StreamError(code="node_lost", message="10.0.0.1 went away")
    scene = Scene(is_stream=is_stream).play(START, RunEvent(type=RunEventType.ERROR, error=lost))
    assert scene.head.startswith(b"HTTP/1.1 503")
    assert b"10.0.0.1" not in scene.body


@pytest.mark.clause("SF-06", "SF-14")
@pytest.mark.parametrize("kind", [RunEventType.ERROR, RunEventType.CANCELLED])
def test_an_error_after_the_first_byte_is_an_event_and_no_success(kind: RunEventType) -> None:
    error = StreamError(code="upstream_truncated") if kind is RunEventType.ERROR else None
    scene = Scene(is_stream=True).play(START, HELLO, RunEvent(type=kind, error=error))
    assert b"[DONE]" not in scene.body
    assert b'"error":{' in scene.body
    assert b'finish_reason":"stop' not in scene.body


def test_a_whole_answer_that_grows_too_large_is_given_up() -> None:
    scene = Scene(bytes_max=10).play(START, HELLO, WORLD, WORLD)
    assert scene.head.startswith(b"HTTP/1.1 502")
    assert len(scene.handle.cancels) == 1
    assert scene.handle.is_truncated


@pytest.mark.clause("SF-07", "SF-08")
def test_a_slow_caller_holds_back_credit_and_one_that_leaves_cancels() -> None:
    scene = Scene(is_stream=True).play(START)
    scene.connection.pause_writing()
    scene.play(HELLO)
    assert scene.handle.consumed_bytes == 0
    scene.connection.resume_writing()
    assert scene.handle.consumed_bytes == len("Héllo hm".encode())
    scene.connection.connection_lost(None)
    assert len(scene.handle.cancels) == 1


@pytest.mark.clause("SF-10", "EN-66")
@pytest.mark.parametrize("is_stream", [True, False])
def test_large_integers_in_calls_that_were_written_as_text_stay_what_they_are(is_stream: bool) -> None:
    told = json.dumps({"tool_calls": [{"name": "f", "arguments": {"id": 2**70}}]})
    done = RunEvent(
        type=RunEventType.COMPLETE, finish_reasons=("stop",), metadata={"openai_text_tool_fallback": "true"}
    )
    scene = Scene(is_stream=is_stream, has_tools=True)
    scene.play(START, RunEvent(type=RunEventType.DELTA, delta=told), done)
    choices = (
        [event["choices"][0] for event in scene.events] if is_stream else json.loads(scene.body)["choices"]
    )
    calls = [
        call
        for choice in choices
        for call in choice.get("delta", choice.get("message")).get("tool_calls", [])
    ]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"id": 2**70}]
