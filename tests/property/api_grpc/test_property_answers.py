"""Any split of a provider's answer tells the same, and any damage ends it once (SF-05, SF-14, SF-20)."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iop.api.grpc import ports
from iop.api.grpc.answer_stream import AnswerStream
from iop.api.grpc.completion_sink import CompletionSink
from iop.api.grpc.run_sink import EngineRunSink
from iop.pb.openengine.v1 import generation_pb2 as pb
from iop.wire.messages import BodyFraming, RunEvent, RunEventType, StreamError

T = TypeVar("T")
OUTPUTS = 2
TERMINAL = (ports.OutputFinished, ports.RequestFailed)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def read(answer: AnswerStream) -> list[tuple[Any, Any]]:
    async with asyncio.timeout(30):
        return [event async for event in answer]


def pieces_of(data: Sequence[Any], cuts: list[int]) -> list[Any]:
    marks = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(marks)]


def joined(events: list[tuple[Any, Any]]) -> Any:
    """What was said, however it was cut into events."""
    texts = dict.fromkeys(range(OUTPUTS), "")
    for event, _ in events:
        if isinstance(event, ports.OutputTokens):
            texts[event.output_index] += event.text
    return texts, [(event, usage) for event, usage in events if isinstance(event, TERMINAL)]


texts = st.lists(st.tuples(st.integers(0, OUTPUTS - 1), st.text(max_size=8)), max_size=6)
newline = st.sampled_from(["\n", "\r\n"])


def completion(said: list[tuple[int, str]], *, is_chat: bool, newline: str) -> bytes:
    choices = [
        {"index": index, "delta": {"content": text}} if is_chat else {"index": index, "text": text}
        for index, text in said
    ]
    choices += [{"index": index, "finish_reason": "stop"} for index in range(OUTPUTS)]
    values = [{"choices": [choice]} for choice in choices]
    values.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
    lines = [json.dumps(value, ensure_ascii=False) for value in values] + ["[DONE]"]
    return "".join(f"data: {line}{newline}{newline}" for line in lines).encode()


async def of_completion(pieces: list[bytes], *, is_chat: bool) -> list[tuple[Any, Any]]:
    answer = AnswerStream(caller="", outputs=OUTPUTS)
    sink = CompletionSink(answer, outputs=OUTPUTS, is_chat=is_chat)
    headers = [(b"content-type", b"text/event-stream")]
    sink.on_response_start(status=200, headers=headers, framing=BodyFraming.CHUNKED)
    for piece in pieces:
        sink.on_body(piece)
    sink.on_end()
    return await read(answer)


@pytest.mark.clause("SF-05", "SF-20")
@settings(max_examples=300, deadline=None)
@given(said=texts, cuts=st.lists(st.integers(0, 5000), max_size=12), is_chat=st.booleans(), newline=newline)
def test_any_split_of_a_completion_tells_the_same(
    said: list[tuple[int, str]], cuts: list[int], is_chat: bool, newline: str
) -> None:
    data = completion(said, is_chat=is_chat, newline=newline)
    events = run(of_completion(pieces_of(data, cuts), is_chat=is_chat))
    told, ends = joined(events)
    for index in range(OUTPUTS):
        assert told[index] == "".join(text for where, text in said if where == index)
    assert [type(event) for event, _ in ends] == [ports.OutputFinished] * OUTPUTS
    assert [usage is not None for _, usage in events] == [False] * (len(events) - 1) + [True]


@pytest.mark.clause("SF-14", "SF-20")
@settings(max_examples=300, deadline=None)
@given(
    said=texts,
    is_chat=st.booleans(),
    damage=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=4),
    keep=st.integers(0, 5000),
)
def test_damage_ends_a_completion_once_and_a_cut_one_never_well(
    said: list[tuple[int, str]], is_chat: bool, damage: list[tuple[int, int]], keep: int
) -> None:
    data = bytearray(completion(said, is_chat=is_chat, newline="\n"))
    for place, value in damage:
        data[place % len(data)] = value
    events = run(of_completion([bytes(data[: keep % (len(data) + 1)])], is_chat=is_chat))
    ends = [event for event, _ in events if isinstance(event, TERMINAL)]
    assert isinstance(events[-1][0], TERMINAL)
    assert not any(isinstance(event, TERMINAL) for event, _ in events[: len(events) - len(ends)])
    failures = [event for event in ends if isinstance(event, ports.RequestFailed)]
    assert len(failures) + (len(ends) == OUTPUTS) == 1


def lines_of(said: list[tuple[int, str]]) -> str:
    messages = [
        pb.GenerateResponse(token=pb.TokenOutput(output_index=index, text=text)) for index, text in said
    ]
    messages += [
        pb.GenerateResponse(finished=pb.GenerationFinished(output_index=index, reason=pb.FINISH_REASON_STOP))
        for index in range(OUTPUTS)
    ]
    return "".join(base64.b64encode(m.SerializeToString()).decode() + "\n" for m in messages)


async def of_engine(pieces: list[str], *, last: RunEvent) -> list[tuple[Any, Any]]:
    answer = AnswerStream(caller="", outputs=OUTPUTS)
    sink = EngineRunSink(answer, outputs=OUTPUTS)
    sink.on_run_event(RunEvent(type=RunEventType.START))
    for piece in pieces:
        sink.on_run_event(RunEvent(type=RunEventType.DELTA, delta=piece))
    sink.on_run_event(last)
    return await read(answer)


@pytest.mark.clause("SF-20", "SF-24")
@settings(max_examples=300, deadline=None)
@given(said=texts, cuts=st.lists(st.integers(0, 5000), max_size=12))
def test_any_split_of_an_engines_messages_tells_the_same(
    said: list[tuple[int, str]], cuts: list[int]
) -> None:
    pieces = pieces_of(lines_of(said), cuts)
    events = run(of_engine(pieces, last=RunEvent(type=RunEventType.COMPLETE)))
    told, ends = joined(events)
    for index in range(OUTPUTS):
        assert told[index] == "".join(text for where, text in said if where == index)
    assert len(ends) == OUTPUTS


@pytest.mark.clause("SF-20", "SF-24")
@settings(max_examples=300, deadline=None)
@given(
    said=texts,
    damage=st.lists(st.tuples(st.integers(0, 5000), st.characters(codec="ascii")), max_size=4),
    is_well=st.booleans(),
)
def test_damage_ends_an_engines_answer_once(
    said: list[tuple[int, str]], damage: list[tuple[int, str]], is_well: bool
) -> None:
    data = list(lines_of(said))
    for place, value in damage:
        data[place % len(data)] = value
    error = StreamError(code="upstream_error")
    last = RunEvent(type=RunEventType.COMPLETE if is_well else RunEventType.ERROR, error=error)
    events = run(of_engine(["".join(data)], last=last))
    failures = [event for event, _ in events if isinstance(event, ports.RequestFailed)]
    assert isinstance(events[-1][0], TERMINAL)
    assert len(failures) == (0 if isinstance(events[-1][0], ports.OutputFinished) else 1)
    if not is_well:
        assert failures
