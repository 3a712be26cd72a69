"""The event-stream watcher: what it gives out, and how it takes a stream's end."""

from __future__ import annotations

import pytest

from iop.api.http.errors import Dialect
from iop.api.http.sse import SseEnding, SseWatcher, event_data

A = b'data: {"choices":[{"index":0,"delta":{"content":"a [DONE] \\"finish_reason\\":\\"stop\\""}}]}\n\n'
B = b'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":null}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
STOP_1 = b'data: {"choices":[{"index":1,"delta":{},"finish_reason" : "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def watch(
    *parts: bytes, dialect: Dialect = Dialect.CHAT, choices: int = 1, limit: int = 1 << 20
) -> tuple[bytes, SseEnding, SseWatcher]:
    watcher = SseWatcher(dialect, choices=choices, event_bytes_max=limit)
    out = b"".join(watcher.feed(part) for part in parts)
    ending, rest = watcher.finish()
    return out + rest, ending, watcher


@pytest.mark.case("P-02")
@pytest.mark.clause("SF-14")
@pytest.mark.parametrize(
    ("tail", "expected", "ending"),
    [
        (STOP + DONE, STOP + DONE, SseEnding.TERMINATED),
        (STOP + b"data:[DONE]\n\n", STOP + b"data:[DONE]\n\n", SseEnding.TERMINATED),
        (STOP + DONE + DONE, STOP + DONE, SseEnding.TERMINATED),
        (STOP, STOP + DONE, SseEnding.FINISHED),
        (b"", b"", SseEnding.CUT),
        (STOP + b"data: [DONE]", STOP + DONE, SseEnding.TERMINATED),
        (STOP + b"data: [DONE]\n", STOP + DONE, SseEnding.TERMINATED),
        (STOP + DONE + b"rubbish" * 6, STOP + DONE, SseEnding.TERMINATED),
        (STOP + b"data: [DO", STOP + DONE, SseEnding.FINISHED),
        (STOP[:-1], b"", SseEnding.CUT),
        (STOP[:20], b"", SseEnding.CUT),
        (b'data: {"error":{"message":"x"}}\n\n', b'data: {"error":{"message":"x"}}\n\n', SseEnding.FAILED),
    ],
    ids=["a", "b", "c", "d", "e", "f", "f-newline", "g", "half terminator", "half finish", "cut", "error"],
)
def test_ways_to_end_a_chat_stream(tail: bytes, expected: bytes, ending: SseEnding) -> None:
    data = A + B + tail
    assert watch(data)[:2] == (A + B + expected, ending)
    crlf = watch(data.replace(b"\n", b"\r\n"))
    assert crlf[:2] == ((A + B + expected).replace(b"\n", b"\r\n"), ending)


@pytest.mark.case("P-01")
@pytest.mark.clause("SF-03", "SF-05")
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_any_split_gives_the_same_bytes(newline: bytes) -> None:
    data = (
        b": hello\n\n"
        + A
        + b": waiting\nevent: x\n: inside\ndata: {\ndata: }\n\n"
        + B
        + "data: 東京🚀\n\n".encode()
        + b"\n:\n"
        + STOP
        + DONE
    ).replace(b"\n", newline)
    whole = watch(data)[:2]
    assert whole == (data, SseEnding.TERMINATED)
    assert watch(*(bytes([byte]) for byte in data))[:2] == whole
    for cut in range(len(data)):
        assert watch(data[:cut], data[cut:])[:2] == whole


@pytest.mark.case("P-04")
@pytest.mark.clause("SF-05")
def test_comments_pass_before_any_data() -> None:
    watcher = SseWatcher(Dialect.CHAT, choices=1, event_bytes_max=1000)
    assert watcher.feed(b": wait") == b""
    assert watcher.feed(b"ing\n") == b": waiting\n"
    assert watcher.feed(b":\n") == b":\n"
    assert watcher.feed(b"data: 1\n: in between\n") == b""
    assert watcher.feed(b"data: 2\n\n") == b"data: 1\n: in between\ndata: 2\n\n"


@pytest.mark.clause("SF-14")
def test_every_choice_must_finish() -> None:
    assert watch(A + STOP, choices=2)[1] is SseEnding.CUT
    assert watch(A + STOP + STOP, choices=2)[1] is SseEnding.CUT
    assert watch(A + STOP + STOP_1, choices=2)[1] is SseEnding.FINISHED


@pytest.mark.clause("SF-03")
def test_an_event_over_its_limit_ends_the_stream() -> None:
    out, ending, watcher = watch(B, b"data: " + b"x" * 600, b"x" * 600, DONE, limit=1000)
    assert (out, ending) == (B, SseEnding.CUT)
    assert watcher.is_too_large


def test_usage_is_the_last_one_seen_and_never_summed() -> None:
    one = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
    two = b'data: {"choices":[],"usage": {"prompt_tokens":1,"completion_tokens":5}}\n\n'
    _, _, watcher = watch(A + one + STOP + two + DONE)
    assert watcher.usage == {"prompt_tokens": 1, "completion_tokens": 5}


MESSAGE = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3,"output_tokens":1}}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"message_stop"}}\n\n'
)
MESSAGE_END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"output_tokens":7}}\n\n'
)
MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.clause("SF-14")
def test_ways_to_end_a_messages_stream() -> None:
    out, ending, watcher = watch(MESSAGE + MESSAGE_END + MESSAGE_STOP + b"more", dialect=Dialect.MESSAGES)
    assert (out, ending) == (MESSAGE + MESSAGE_END + MESSAGE_STOP, SseEnding.TERMINATED)
    assert watcher.usage == {"input_tokens": 3, "output_tokens": 7}
    assert watch(MESSAGE + MESSAGE_END, dialect=Dialect.MESSAGES)[:2] == (
        MESSAGE + MESSAGE_END + MESSAGE_STOP,
        SseEnding.FINISHED,
    )
    assert watch(MESSAGE, dialect=Dialect.MESSAGES)[1] is SseEnding.CUT
    error = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'
    assert watch(MESSAGE + error, dialect=Dialect.MESSAGES)[1] is SseEnding.FAILED


@pytest.mark.clause("SF-14")
def test_ways_to_end_a_responses_stream() -> None:
    delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'
    done = b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":1}}}\n\n'
    out, ending, watcher = watch(delta + done + DONE, dialect=Dialect.RESPONSES)
    assert (out, ending, watcher.usage) == (delta + done, SseEnding.TERMINATED, {"input_tokens": 1})
    assert watch(delta, dialect=Dialect.RESPONSES)[1] is SseEnding.CUT


def test_event_data_joins_lines() -> None:
    assert event_data(b"event: x\ndata: a\ndata:b\r\ndata:  c\n\n") == b"a\nb\n c"
    assert event_data(b": comment\n\n") is None


ABORT = b'data: {"choices":[{"index":0,"delta":{"content":"c"},"finish_reason":"abort"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'


@pytest.mark.clause("SF-06", "SF-14", "EN-112")
def test_an_answer_that_its_engine_gave_up_is_no_success_and_its_success_marker_is_dropped() -> None:
    data = A + ABORT + USAGE + DONE
    out, ending, watcher = watch(data)
    assert out == A + ABORT + USAGE
    assert ending is SseEnding.CUT
    assert watcher.usage == {"completion_tokens": 3}
    byte_by_byte = watch(*(data[i : i + 1] for i in range(len(data))))
    assert byte_by_byte[:2] == (out, ending)
    assert watch(A + ABORT)[1] is SseEnding.CUT
    assert watch(A + STOP_1 + ABORT + DONE, choices=2)[:2] == (A + STOP_1 + ABORT, SseEnding.CUT)
    crlf = watch(data.replace(b"\n", b"\r\n"))
    assert crlf[:2] == (out.replace(b"\n", b"\r\n"), SseEnding.CUT)


@pytest.mark.clause("SF-06", "SF-14")
def test_a_message_that_stops_for_no_reason_was_given_up() -> None:
    delta = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":%b}}\n\n'
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    given_up = delta % b"null"
    assert watch(given_up + stop, dialect=Dialect.MESSAGES)[:2] == (given_up, SseEnding.CUT)
    whole = delta % b"null" + delta % b'"end_turn"' + stop
    assert watch(whole, dialect=Dialect.MESSAGES)[:2] == (whole, SseEnding.TERMINATED)
    assert watch(stop, dialect=Dialect.MESSAGES)[:2] == (stop, SseEnding.TERMINATED)


@pytest.mark.clause("SF-03", "SF-14")
def test_a_terminator_behind_the_providers_own_error_passes_and_makes_no_success_of_it() -> None:
    error = b'data: {"error":{"message":"x"}}\n\n'
    out, ending, watcher = watch(A + error + DONE)
    assert (out, ending) == (A + error + DONE, SseEnding.TERMINATED)
    assert watcher.has_failed
    assert not watch(A + STOP + DONE)[2].has_failed
    failed = b'event: response.failed\ndata: {"type":"response.failed","response":{}}\n\n'
    assert watch(failed, dialect=Dialect.RESPONSES)[2].has_failed
