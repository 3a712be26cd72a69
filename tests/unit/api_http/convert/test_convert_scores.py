"""Log probabilities between chats and responses, which both tell (SF-10)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iop.api.http.convert.answers import AnswerConverter
from iop.api.http.convert.events import Text
from iop.api.http.convert.plan import plan_request
from iop.api.http.convert.readers import SCORES_HELD_MAX, ChatReader
from iop.api.http.convert.responses_reader import ResponsesReader
from iop.api.http.convert.responses_writer import ResponsesWriter
from iop.api.http.convert.sse_parser import SseEvent, SseParser
from iop.api.http.convert.writers import AnswerTerms, ChatWriter

pytestmark = pytest.mark.clause("SF-10")

TERMS = AnswerTerms(request_id="r", created=1)
ASK = "message.output_text.logprobs"


def score(token: str, logprob: float = -0.5, **more: Any) -> dict[str, Any]:
    other = {"token": token.upper(), "logprob": -1.5, "bytes": None}
    return {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": [other], **more}


A, B, C = score("a"), score("b", 0), score("c", bytes=[99])


def to_responses() -> AnswerConverter:
    return AnswerConverter(ChatReader(id_base="r"), ResponsesWriter(TERMS))


def to_chat() -> AnswerConverter:
    return AnswerConverter(ResponsesReader(), ChatWriter(TERMS))


def sse(*values: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)


def chunk(text: str | None, *scores: Any, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    said = delta | ({} if text is None else {"content": text})
    told = {"content": list(scores), "refusal": None} if scores else None
    return {"choices": [{"index": 0, "delta": said, "logprobs": told, "finish_reason": finish}]}


def events(out: bytes) -> list[dict[str, Any]]:
    items = SseParser().feed(out)
    return [json.loads(i.data) for i in items if isinstance(i, SseEvent) and i.data != b"[DONE]"]


def played(converter: AnswerConverter, stream: bytes, size: int) -> list[dict[str, Any]]:
    parts = [converter.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    return events(b"".join([*parts, converter.finish()]))


def bare(scores: list[dict[str, Any]]) -> list[tuple[str, float, list[str]]]:
    return [
        (each["token"], each["logprob"], [other["token"] for other in each["top_logprobs"]])
        for each in scores
    ]


WANTED = bare([A, B, C])


@pytest.mark.parametrize(
    ("source", "said", "target", "made"),
    [
        (
            "chat_completions",
            {"logprobs": True, "top_logprobs": 3},
            "responses",
            {"include": [ASK], "top_logprobs": 3},
        ),
        ("chat_completions", {"logprobs": True}, "responses", {"include": [ASK]}),
        ("chat_completions", {"logprobs": False, "top_logprobs": 0}, "responses", {}),
        ("responses", {"include": [ASK]}, "chat_completions", {"logprobs": True}),
        ("responses", {"top_logprobs": 2}, "chat_completions", {"logprobs": True, "top_logprobs": 2}),
        ("responses", {"include": [], "top_logprobs": 0}, "chat_completions", {}),
    ],
)
def test_each_dialect_is_asked_in_its_words(source: str, said: Any, target: str, made: Any) -> None:
    body = {"model": "m", **said}
    body |= {"input": "hi"} if source == "responses" else {"messages": [{"role": "user", "content": "hi"}]}
    plan = plan_request(source, target, json.dumps(body).encode(), model="real")
    out = json.loads(plan.body)
    assert {name: out[name] for name in ("logprobs", "top_logprobs", "include") if name in out} == made
    assert plan.has_scores is (target == "chat_completions" and bool(made))


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_chats_scores_stand_beside_their_text_in_a_response(size: int) -> None:
    stream = sse(
        chunk("", role="assistant"),
        chunk("a", A),
        chunk(None, B),  # a token that ends no character
        chunk("bc", C),
        chunk(None, finish="stop"),
    )
    got = played(to_responses(), stream, size)
    deltas = [event for event in got if event["type"] == "response.output_text.delta"]
    assert [bare(event["logprobs"]) for event in deltas] == [WANTED[:1], WANTED[1:]]
    (done,) = [event for event in got if event["type"] == "response.output_text.done"]
    (part,) = [event for event in got if event["type"] == "response.content_part.done"]
    item = got[-1]["response"]["output"][0]
    for told in (done["logprobs"], part["part"]["logprobs"], item["content"][0]["logprobs"]):
        assert bare(told) == WANTED
        assert [each["bytes"] for each in told] == [[], [], [99]]


def test_a_whole_chats_scores_are_those_of_the_response() -> None:
    message = {"role": "assistant", "content": "abc"}
    choice = {"index": 0, "message": message, "logprobs": {"content": [A, B, C]}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice]}).encode()
    whole = json.loads(to_responses().whole(body))
    assert bare(whole["output"][0]["content"][0]["logprobs"]) == WANTED
    streamed = events(to_responses().streamed(body))
    assert bare(streamed[-1]["response"]["output"][0]["content"][0]["logprobs"]) == WANTED


def delta(text: str, *scores: Any) -> dict[str, Any]:
    place = {"output_index": 0, "content_index": 0, "item_id": "o"}
    return {"type": "response.output_text.delta", **place, "delta": text, "logprobs": list(scores)}


def ended(*scores: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": "abc", "annotations": [], "logprobs": list(scores)}
    item = {"type": "message", "id": "o", "role": "assistant", "content": [part]}
    return {"id": "r", "model": "m", "status": "completed", "output": [item]}


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_responses_scores_stand_beside_their_text_in_a_chat(size: int, is_late: bool) -> None:
    """Late: an engine tells them only with the text as a whole."""
    told = [delta("a"), delta("bc")] if is_late else [delta("a", A), delta("bc", B, C)]
    done = {
        "type": "response.output_text.done",
        "output_index": 0,
        "content_index": 0,
        "item_id": "o",
        "text": "abc",
    }
    done["logprobs"] = [A, B, C]  # type: ignore[assignment]
    stream = sse(*told, done, {"type": "response.completed", "response": ended(A, B, C)})
    got = played(to_chat(), stream, size)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in got) == "abc"
    told = [each for event in got for each in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert bare(told) == WANTED
    assert [each["bytes"] for each in told] == [None, None, [99]]


def test_a_whole_responses_scores_are_those_of_the_chat() -> None:
    whole = json.loads(to_chat().whole(json.dumps(ended(A, B, C)).encode()))
    assert bare(whole["choices"][0]["logprobs"]["content"]) == WANTED
    none = json.loads(to_chat().whole(json.dumps(ended()).encode()))
    assert none["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "odd", [None, 5, "x", {}, [None, 5, "x", {}, {"token": 5, "logprob": 1}, {"token": "a"}]]
)
def test_what_is_no_score_is_left_out(odd: Any) -> None:
    stream = sse(
        {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": odd}}]},
        {"choices": [{"index": 0, "delta": {}, "logprobs": odd, "finish_reason": "stop"}]},
    )
    got = played(to_responses(), stream, 10_000)
    assert got[-1]["response"]["output"][0]["content"][0]["logprobs"] == []
    body = ended()
    body["output"][0]["content"][0]["logprobs"] = odd
    assert json.loads(to_chat().whole(json.dumps(body).encode()))["choices"][0]["logprobs"] is None


def test_scores_of_a_call_alone_make_no_text() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    got = played(
        to_responses(), sse(chunk(None, A, tool_calls=[call]), chunk(None, finish="tool_calls")), 10_000
    )
    assert [item["type"] for item in got[-1]["response"]["output"]] == ["function_call"]


def test_scores_of_reasoning_and_of_calls_are_none_of_the_text() -> None:
    """Engines tell those of every token; a response has a place for those of the text alone."""
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    stream = sse(
        chunk(None, score("hm"), reasoning_content="hm"),
        chunk(None, score("</think>")),
        chunk("a", A),
        chunk("bc", B, C),
        chunk(None, score("{}"), tool_calls=[call]),
        chunk(None, score("<eos>"), finish="tool_calls"),
    )
    message = {"reasoning_content": "hm", "content": "abc", "tool_calls": [call]}
    told = [score("hm"), score("</think>"), A, B, C, score("{}"), score("<eos>")]
    choice = {"index": 0, "message": message, "logprobs": {"content": told}, "finish_reason": "tool_calls"}
    whole = json.loads(to_responses().whole(json.dumps({"choices": [choice]}).encode()))
    streamed = played(to_responses(), stream, 10_000)[-1]["response"]
    for output in (whole["output"], streamed["output"]):
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert bare(output[1]["content"][0]["logprobs"]) == WANTED


def test_scores_that_do_not_meet_the_text_beside_reasoning_are_all_told() -> None:
    message = {"reasoning_content": "hm", "content": "abcd"}
    choice = {"index": 0, "message": message, "logprobs": {"content": [A, B, C]}, "finish_reason": "stop"}
    whole = json.loads(to_responses().whole(json.dumps({"choices": [choice]}).encode()))
    assert bare(whole["output"][1]["content"][0]["logprobs"]) == WANTED


def test_scores_without_end_and_without_text_are_not_held() -> None:
    reader = ChatReader(id_base="r")
    for _ in range(50):
        reader.feed(chunk(None, *[A] * 100))
    (text, _) = reader.feed(chunk("a", A, finish="stop"))
    assert isinstance(text, Text)
    assert len(text.scores) == SCORES_HELD_MAX + 1


def test_a_stream_to_a_chat_keeps_no_scores_that_it_has_told() -> None:
    writer = ChatWriter(TERMS)
    converter = AnswerConverter(ResponsesReader(), writer)
    assert len(played(converter, sse(delta("a", A), delta("b", B)), 10_000)) == 4
    assert [block.scores for block in writer.blocks.all] == [[]]


def test_late_scores_are_told_once_for_each_part_of_a_response() -> None:
    def done(part: int, *scores: Any) -> dict[str, Any]:
        place = {"output_index": 0, "content_index": part, "item_id": "o"}
        return {"type": "response.output_text.done", **place, "text": "a", "logprobs": list(scores)}

    second = delta("bc") | {"content_index": 1}
    got = played(to_chat(), sse(delta("a"), done(0, A), done(0, A), second, done(1, B, C)), 10_000)
    told = [event["choices"][0]["logprobs"] for event in got if event.get("choices")]
    assert bare([each for logprobs in told for each in (logprobs or {}).get("content", [])]) == WANTED
