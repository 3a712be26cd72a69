"""Reading and splicing request bodies."""

from __future__ import annotations

import json
import time

import pytest

from iop.api.http.splice import JsonWatch, exceeds_depth, read_fields
from iop.core.errors import InvalidRequest


def splice(body: bytes, name: str = "org/Real-8B-Instruct") -> bytes:
    return b"".join(read_fields(body, depth_max=128).with_model(name))


@pytest.mark.clause("SF-03")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"fast"}', b'{"model":"X"}'),
        (
            b' { "a" : [ {"model":"fast"} ] ,\n"model" : "fast" , "b":1e-7} ',
            b' { "a" : [ {"model":"fast"} ] ,\n"model" : "X" , "b":1e-7} ',
        ),
        (
            b'{"model":"fast","text":"\\"model\\":\\"fast\\""}',
            b'{"model":"X","text":"\\"model\\":\\"fast\\""}',
        ),
        (b'{"text":"say \\"model","model":"fast"}', b'{"text":"say \\"model","model":"X"}'),
        (
            b'{"mod\\u0065l":"f\\u0061st","n":1152921504606846977}',
            b'{"mod\\u0065l":"X","n":1152921504606846977}',
        ),
        (
            b'{"big":' + b"9" * 300 + b',"model":"fast","z":null}',
            b'{"big":' + b"9" * 300 + b',"model":"X","z":null}',
        ),
        (b'{"a\\\\":"\\\\","model":"fast"}', b'{"a\\\\":"\\\\","model":"X"}'),
        ('{"ключ":"東京🚀","model":"fast"}'.encode(), '{"ключ":"東京🚀","model":"X"}'.encode()),
        (
            b'{"model":"fast","a":{"a":{"model":1}},"b":[[],{}]}',
            b'{"model":"X","a":{"a":{"model":1}},"b":[[],{}]}',
        ),
    ],
)
def test_only_the_bytes_of_the_top_level_model_change(body: bytes, expected: bytes) -> None:
    fields = read_fields(body, depth_max=128)
    assert fields.model == "fast"
    assert b"".join(fields.with_model("X")) == expected


def test_the_same_name_leaves_the_body_as_it_is() -> None:
    body = b'{"model":"fast"}'
    assert read_fields(body, depth_max=8).with_model("fast")[0] is body


def test_a_name_that_needs_escapes_is_escaped() -> None:
    assert json.loads(splice(b'{"model":"a"}', 'a"b\\c\n東'))["model"] == 'a"b\\c\n東'


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"hello", "INVALID_JSON"),
        (b"", "INVALID_JSON"),
        (b"[1]", "INVALID_JSON"),
        (b'{"model":"a"} x', "INVALID_JSON"),
        (b'{"model":"a",}', "INVALID_JSON"),
        (b'{"model":NaN}', "INVALID_JSON"),
        (b'\xef\xbb\xbf{"model":"a"}', "INVALID_JSON"),
        ('{"model":"a"}'.encode("utf-16"), "INVALID_JSON"),
        (b'{"model":"a","x":[1,2}', "INVALID_JSON"),
        (b'{"messages":[]}', "INVALID_REQUEST"),
        (b'{"model":null}', "INVALID_REQUEST"),
        (b'{"model":7}', "INVALID_REQUEST"),
        (b'{"model":""}', "INVALID_REQUEST"),
        (b'{"model":"' + b"m" * 600 + b'"}', "INVALID_REQUEST"),
        (b'{"model":"a","model":"b"}', "DUPLICATE_KEY"),
        (b'{"model":"a","model":"a"}', "DUPLICATE_KEY"),
        (b'{"x":1,"model":"a","x":12}', "DUPLICATE_KEY"),
        (b'{"x":12,"model":"a","x":1}', "DUPLICATE_KEY"),
        (b'{"x":"ab","model":"a","x":"a","y":1}', "DUPLICATE_KEY"),
        (b'{"model":"a","mod\\u0065l":"b"}', "DUPLICATE_KEY"),
        (b'{"x":"a\\",\\"model\\":\\"evil\\"","model":"a","x":"a\\\\"}', "DUPLICATE_KEY"),
        (b'{"model":"a","x":' + b"[" * 200 + b"]" * 200 + b"}", "JSON_TOO_DEEP"),
        (b'{"model":"a","x":' + b"[" * 90000 + b"]" * 90000 + b"}", "JSON_TOO_DEEP"),
    ],
)
def test_a_body_that_cannot_be_routed_is_refused_with_its_reason(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_fields(body, depth_max=128)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("depth", "is_over"), [(127, False), (128, False), (129, True)])
def test_depth_is_counted_exactly(depth: int, is_over: bool) -> None:
    nested = b"[" * depth + b"]" * depth
    wide = b"[" + b",".join([b'{"a":"[[[{{{"}'] * 500) + b"]"
    assert exceeds_depth(nested, 128) is is_over
    assert not exceeds_depth(wide, 3)
    assert exceeds_depth(wide, 1)


def test_stream_is_true_only_where_it_says_true() -> None:
    for text, expected in (
        (b"true", True),
        (b"false", False),
        (b"null", False),
        (b'"true"', False),
        (b"1", False),
    ):
        assert read_fields(b'{"model":"a","stream":%b}' % text, depth_max=8).is_stream is expected


def test_integers_are_read_where_they_are_some() -> None:
    fields = read_fields(b'{"model":"a","n":3,"m":"3","big":' + b"1" * 300 + b"}", depth_max=8)
    assert [fields.integer(name, 1) for name in ("n", "m", "big", "none")] == [3, 1, 1, 1]


@pytest.mark.slow
def test_a_body_of_many_small_values_does_not_hold_up_the_loop() -> None:
    body = b'{"model":"a","x":[' + b"[]," * 2_000_000 + b"1]}"
    started = time.thread_time()
    with pytest.raises(InvalidRequest):
        read_fields(body, depth_max=128)
    assert time.thread_time() - started < 2.0


@pytest.mark.clause("SF-03")
@pytest.mark.parametrize(
    "body", [b'{"a":"}\\"]","b":[1,{"c":"\\\\"}]}', b"[]", b'"text"', b" 12 ", '{"ü":"🚀{"}'.encode()]
)
def test_a_json_body_is_complete_at_its_end_and_at_no_byte_before(body: bytes) -> None:
    for cut in range(len(body)):
        watch = JsonWatch()
        watch.feed(body[:cut])
        if body[0] in b'{["' and cut < len(body):
            assert not watch.is_complete
        watch.feed(body[cut:])
        assert watch.is_complete
    watch = JsonWatch()
    for byte in body:
        watch.feed(bytes([byte]))
    assert watch.is_complete


@pytest.mark.case("P-15")
@pytest.mark.clause("SF-03")
@pytest.mark.parametrize(
    "half", [rb"\ud83d", rb"\uDE00 x", rb"\ud83d\n", rb"\ud83dA", rb"\ud83d\ud83d\ude00", rb"\\\ud83d"]
)
def test_half_a_character_is_the_providers_to_judge(half: bytes) -> None:
    """As it comes from callers who cut a text by UTF-16 units. A wrong escape beside it is no JSON all the same."""
    body = b'{"text":["%b"],"model":"fast","%b":{"a":"%b"}}' % (half, half, half)
    fields = read_fields(body, depth_max=128)
    assert b"".join(fields.with_model("X")) == body.replace(b'"fast"', b'"X"')
    for bad in (rb'"\ud83d \x"', b'"' + half, b'{"a":' + b"[" * 200 + b'"' + half + b'"' + b"]" * 200 + b"}"):
        with pytest.raises(InvalidRequest):
            read_fields(b'{"model":"fast","text":' + bad + b"}", depth_max=128)
