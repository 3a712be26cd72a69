"""Large bodies read in steps: what one step may cost, and where commas may stand."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from iop.api.http import bulk
from iop.api.http.bulk import SLICE_BYTES, STEP_BYTES, BulkFields, BulkReader
from iop.api.http.estimate import prompt_bytes
from iop.api.http.long_strings import LONG_STRING_BYTES
from iop.api.http.splice import read_fields
from iop.core.errors import InvalidRequest
from iop.core.limits import KIB, MIB

PARTS_BYTES = 250_000
"""About what the loop reads at once."""


def read_bulk(body: bytes, *, each: int = PARTS_BYTES) -> tuple[BulkFields, BulkReader, int]:
    reader = BulkReader([body[at : at + each] for at in range(0, len(body), each)], depth_max=128)
    steps = 1
    while not reader.step():
        steps += 1
    return reader.fields(), reader, steps


def shapes() -> dict[str, bytes]:
    size = 2 * MIB
    return {
        "one picture": b'{"model":"fast","messages":[{"url":"' + b"A" * size + b'"}]}',
        "one text with escapes": b'{"model":"fast","prompt":"'
        + b'a\\n\\"\\ud83d\\ude80\xc3\xa9' * (size // 20)
        + b'"}',
        "backslashes": b'{"model":"fast","prompt":"' + b"\\\\" * (size // 2) + b'"}',
        "numbers": b'{"model":"fast","input":[' + b"123,-4.5e6," * (size // 11) + b"1]}",
        "short strings": b'{"model":"fast","input":[' + b'"ab","",' * (size // 8) + b'""]}',
        "strings just short": b'{"model":"fast","input":['
        + b",".join([b'"%b"' % (b"x" * (LONG_STRING_BYTES - 2))] * (size // LONG_STRING_BYTES))
        + b"]}",
        "messages": b'{"model":"fast","messages":['
        + b",".join([b'{"role":"user","content":[{"type":"text","text":"hi"}]}'] * (size // 56))
        + b'],"stream":true}',
        "empty lists": b'{"model":"fast","input":[' + b"[]," * 300_000 + b"1]}",
        "nested": b'{"model":"fast","input":[' + b",".join([b"[" * 100 + b"]" * 100] * 5000) + b"]}",
    }


@pytest.mark.clause("EN-101", "SF-12")
@pytest.mark.parametrize("shape", shapes())
def test_no_step_looks_at_more_than_a_few_blocks_whatever_the_body_is(shape: str) -> None:
    body = shapes()[shape]
    fields, reader, steps = read_bulk(body)
    assert reader.worked_bytes <= 3 * STEP_BYTES + SLICE_BYTES
    assert steps >= len(body) // STEP_BYTES
    whole = read_fields(body, depth_max=128)
    assert prompt_bytes(fields) == prompt_bytes(whole)
    assert b"".join(fields.with_model("x")) == b"".join(whole.with_model("x"))
    assert fields.is_stream == whole.is_stream


@pytest.mark.clause("SF-03")
def test_a_provider_gets_the_callers_own_pieces_but_for_the_two_around_the_name() -> None:
    body = b'{"prompt":"' + b"x" * MIB + b'","model":"fast"}'
    parts = [body[at : at + PARTS_BYTES] for at in range(0, len(body), PARTS_BYTES)]
    reader = BulkReader(parts, depth_max=128)
    while not reader.step():
        pass
    sent = reader.fields().with_model("other")
    assert sum(any(piece is part for part in parts) for piece in sent) == len(parts) - 1


@pytest.mark.clause("SF-03")
def test_a_comma_where_none_may_stand_is_found_in_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STEP_BYTES", 8)
    monkeypatch.setattr(bulk, "SLICE_BYTES", 1)
    body = json.dumps({"model": "fast", "a": [1, [2, 3], {"b": 4, "c": []}, "x"], "d": {"e": [{}]}}).encode()
    read_bulk(body)
    for place in range(len(body) + 1):
        damaged = body[:place] + b"," + body[place:]
        assert _is_refused(lambda damaged=damaged: read_fields(damaged, depth_max=128)) == _is_refused(
            lambda damaged=damaged: read_bulk(damaged)
        ), damaged


@pytest.mark.clause("SF-12")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"model":"a","x":[' + b"[]," * (bulk.BRACKETS_MAX + 1) + b"1]}", "JSON_TOO_DEEP"),
        (b'{"model":"a","x":' + b"[" * 129, "JSON_TOO_DEEP"),
        (b'{"model":"a","x":' + b"[1," * 129, "JSON_TOO_DEEP"),
        (b'{"model":"a"' + b" " * (600 * KIB) + b"}", "INVALID_JSON"),
        (b'{"model":"a",' + b",".join(b'"%d":0' % n for n in range(10_001)) + b"}", "INVALID_REQUEST"),
        (b'{"model":"' + b"m" * MIB + b'"}', "INVALID_REQUEST"),
        (b'{"model":{"a":"' + b"m" * MIB + b'"}}', "INVALID_REQUEST"),
        (b'{"x":"' + b'\\"' * MIB, "INVALID_JSON"),
        (b'{"x":"' + b"\\" * MIB, "INVALID_JSON"),
        (b"]" * MIB, "INVALID_JSON"),
    ],
)
def test_a_hostile_body_is_refused_with_its_reason(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_bulk(body)
    assert caught.value.reason == reason


@pytest.mark.clause("SF-03")
def test_a_callers_imitation_of_a_mark_is_text_like_any_other() -> None:
    imitation = "~\x01" + "0" * 32 + ":0~"
    body = json.dumps({"model": "fast", "prompt": imitation + "x" * MIB + imitation}).encode()
    fields, _, _ = read_bulk(body)
    assert fields.counted_text_bytes == prompt_bytes(read_fields(body, depth_max=128))
    assert json.loads(b"".join(fields.strings.expand(fields.body))) == json.loads(body)


def _is_refused(read: Callable[[], object]) -> bool:
    try:
        read()
    except InvalidRequest:
        return True
    return False


@pytest.mark.case("P-15")
@pytest.mark.clause("SF-03")
@pytest.mark.parametrize(
    "text",
    [
        rb'"' + rb"\ud83d\ude00 \ude00x\ud83d" * 30_000 + b'"',
        b"[" + rb'"\ud83d","\ud83d\ude00",' * 30_000 + rb'"\ude00"]',
    ],
    ids=["one long string", "many short ones"],
)
def test_half_a_character_in_a_large_body_is_the_providers_to_judge(text: bytes) -> None:
    body = b'{"prompt":' + text + b',"model":"fast"}'
    for each in (PARTS_BYTES, 4099):
        fields, _, _ = read_bulk(body, each=each)
        assert b"".join(fields.with_model("X")) == body.replace(b'"fast"', b'"X"')
        assert json.loads(b"".join(fields.strings.expand(fields.body))) == json.loads(body)
        assert fields.strings.restore(json.loads(fields.body)) == json.loads(body)
