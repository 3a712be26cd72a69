"""A model's opt-in rewrites change what they name and no other byte (SF-15)."""

from __future__ import annotations

import json

import pytest

from iop.api.http.bulk import BulkReader
from iop.api.http.rewrite import answer_rewrite, rewrite_chat, rewritten_parts, with_reasoning_names
from iop.api.http.splice import read_fields
from iop.core.errors import InvalidRequest

MERGE, USAGE, NAMES = {"merge_system"}, {"include_usage"}, {"reasoning_names"}
USER = b'{"role":"user","content":"caf\\u00e9","n": 1152921504606846977}'
CALL = b'{ "role":"assistant", "content":null, "tool_calls":[{"id":"c"}] }'
TOOL = b'{"role":"tool","tool_call_id":"c","content":"1e-7"}'


def chat(*messages: bytes, more: bytes = b"") -> bytes:
    return b'{"x": 1e-7, "model" : "fast", "messages": [%b]%b}' % (b" , ".join(messages), more)


def merged(*messages: bytes) -> bytes:
    return rewrite_chat(chat(*messages), MERGE, is_stream=False)


@pytest.mark.clause("SF-15")
def test_system_and_developer_messages_become_one_in_front_and_nothing_else_moves() -> None:
    late = b'{"role":"system","content":"be \\"late\\""}'
    developer = b'{"role": "developer", "content": "be brief"}'
    body = merged(USER, developer, CALL, TOOL, late)
    first = b'{"role":"system","content":"be brief\\n\\nbe \\"late\\""}'
    assert body == b'{"x": 1e-7, "model" : "fast", "messages": [%b]}' % b",".join((first, USER, CALL, TOOL))


@pytest.mark.clause("SF-15")
def test_texts_and_lists_of_parts_are_merged_as_parts() -> None:
    parts = b'{"role":"system","content":[{"type":"text","text":"two"},{"type":"text","text":"three"}]}'
    body = json.loads(merged(USER, b'{"role":"system","content":"one"}', parts))
    assert [part["text"] for part in body["messages"][0]["content"]] == ["one", "two", "three"]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


@pytest.mark.clause("SF-15")
@pytest.mark.parametrize(
    "messages",
    [
        [USER, CALL],
        [b'{"role":"system","content":"a"}', USER],
        [USER, b'{"role":"system","content":{"odd":1}}'],
        [b'"no message"', b'{"role":"system","content":"a"}'],
    ],
)
def test_what_is_merged_already_or_is_no_list_of_messages_stays_as_it_is(messages: list[bytes]) -> None:
    body = chat(*messages)
    assert rewrite_chat(body, MERGE, is_stream=False) is body


@pytest.mark.clause("SF-15")
def test_an_empty_or_null_system_message_leaves_the_others_text() -> None:
    body = json.loads(merged(USER, b'{"role":"system","content":null}', b'{"role":"system"}'))
    assert body["messages"][0] == {"role": "system", "content": ""}


@pytest.mark.clause("SF-15")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b'"stream_options":{"include_usage":true},'),
        (b'"stream_options": null,', b'"stream_options": {"include_usage":true},'),
        (
            b'"stream_options":{"include_usage": false,"x":1e-7},',
            b'"stream_options":{"include_usage":true,"x":1e-7},',
        ),
        (b'"stream_options":{ "include_usage": true },', b'"stream_options":{ "include_usage": true },'),
        (b'"stream_options":7,', b'"stream_options":7,'),
    ],
)
def test_a_stream_is_asked_for_its_usage(before: bytes, after: bytes) -> None:
    body = b'{%b"model":"fast","stream":true}' % before
    assert rewrite_chat(body, USAGE, is_stream=True) == b'{%b"model":"fast","stream":true}' % after
    assert rewrite_chat(body, USAGE, is_stream=False) is body


@pytest.mark.clause("SF-15", "SF-03")
def test_the_providers_name_goes_where_the_model_stands_in_a_rewritten_body_too() -> None:
    body = chat(USER, b'{"role":"developer","content":"a"}', more=b',"stream":true')
    fields = read_fields(body, depth_max=20)
    out = b"".join(rewritten_parts(fields, "real", MERGE | USAGE, is_chat=True))
    assert json.loads(out)["model"] == "real"
    assert json.loads(out)["messages"][0] == {"role": "system", "content": "a"}
    assert json.loads(out)["stream_options"] == {"include_usage": True}
    assert rewritten_parts(fields, "real", MERGE, is_chat=False) == fields.with_model("real")
    assert rewritten_parts(fields, "real", NAMES, is_chat=True) == fields.with_model("real")


def read_in_steps(body: bytes) -> BulkReader:
    reader = BulkReader([body], depth_max=20)
    while not reader.step():
        pass
    return reader


@pytest.mark.clause("SF-15", "SF-12")
def test_a_large_body_is_rewritten_with_its_long_strings_whole() -> None:
    picture = b"A" * 400_000
    user = b'{"role":"user","content":"%b"}' % picture
    system = b'{"role":"system","content":"%b"}' % (b"long \\\\ text " * 1000)
    fields = read_in_steps(chat(user, system)).fields()
    out = json.loads(b"".join(rewritten_parts(fields, "real", MERGE, is_chat=True)))
    assert out["messages"][0]["content"] == "long \\ text " * 1000
    assert out["messages"][1]["content"] == picture.decode()
    assert out["model"] == "real"


@pytest.mark.clause("SF-15", "SF-12")
def test_a_body_too_dense_to_be_rewritten_is_refused_by_name() -> None:
    dense = b",".join(b'{"role":"user","content":"%07d"}' % number for number in range(150_000))
    fields = read_in_steps(b'{"model":"fast","messages":[%b]}' % dense).fields()
    with pytest.raises(InvalidRequest) as refused:
        rewritten_parts(fields, "real", MERGE, is_chat=True)
    assert refused.value.reason == "BODY_TOO_LARGE"


CHUNK = (
    b'{"id":"c", "choices": [{"index":0, "delta":{%b,"content":""},"vendor":{"deep":[1e-7]}} ,'
    b'{"index":1,"delta":{}}]}'
)


@pytest.mark.clause("SF-15", "SF-10")
@pytest.mark.parametrize(
    ("name", "other"), [(b"reasoning", b"reasoning_content"), (b"reasoning_content", b"reasoning")]
)
def test_reasoning_is_said_under_both_names_and_unknown_members_stay(name: bytes, other: bytes) -> None:
    said = b'"%b":"th\\u00efnk"' % name
    out = with_reasoning_names(CHUNK % said)
    assert out == CHUNK % (said + b',"%b":"th\\u00efnk"' % other)
    assert with_reasoning_names(out) == out, "never doubled"
    whole = b'{"choices":[{"message":{%b}}]}' % said
    assert json.loads(with_reasoning_names(whole))["choices"][0]["message"][other.decode()] == "thïnk"


@pytest.mark.clause("SF-15")
@pytest.mark.parametrize(
    "odd",
    [
        b"{",
        b"[]",
        b'{"choices":7}',
        b'{"choices":[{"delta":{"reasoning":null}}]}',
        b'{"reasoning":"top"}',
        CHUNK % b'"a":1',
    ],
)
def test_what_says_no_reasoning_passes_as_it_is(odd: bytes) -> None:
    assert with_reasoning_names(odd) == odd


@pytest.mark.clause("SF-15", "SF-05")
def test_events_keep_their_lines_and_comments() -> None:
    rewrite = answer_rewrite("fast", NAMES, is_chat=True)
    assert rewrite is not None
    events = b': hi\r\nid: 1\r\ndata: {"model":"m","choices":[{"delta":{"reasoning":"a"}}]}\r\n\r\ndata: [DONE]\n\n'
    assert rewrite(events, True) == (
        b': hi\r\nid: 1\r\ndata: {"model":"fast","choices":[{"delta":{"reasoning":"a","reasoning_content":"a"}}]}'
        b"\r\n\r\ndata: [DONE]\n\n"
    )
    assert answer_rewrite(None, {"merge_system", "include_usage"}, is_chat=True) is None
    assert answer_rewrite(None, NAMES, is_chat=False) is None
