"""The opt-in rule that shows callers the name they used."""

from __future__ import annotations

import pytest

from iop.api.http.rename import rename_event_models, rename_model


@pytest.mark.clause("SF-15")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"model":"dated","x":{"model":"kept"}}', b'{"model":"fast","x":{"model":"kept"}}'),
        (
            b'{"type":"message_start","message":{"id":1,"model" : "dated"}}',
            b'{"type":"message_start","message":{"id":1,"model" : "fast"}}',
        ),
        (b'{"response":{"model":"dated"},"model":"dated"}', b'{"response":{"model":"fast"},"model":"fast"}'),
        (b'{"choices":[]}', b'{"choices":[]}'),
        (
            b'{"text":"a\\ud83d","model":"dated","message":{"text":"\\ude00","model":"dated"}}',
            b'{"text":"a\\ud83d","model":"fast","message":{"text":"\\ude00","model":"fast"}}',
        ),
        (b'{"model":null}', b'{"model":null}'),
        (b'{"model":"a","model":"b"}', b'{"model":"a","model":"b"}'),
        (b"no json", b"no json"),
    ],
)
def test_only_the_answers_own_name_changes(data: bytes, expected: bytes) -> None:
    assert rename_model(data, b'"fast"') == expected


@pytest.mark.clause("SF-15")
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_each_event_is_renamed_and_all_else_stays(newline: bytes) -> None:
    events = (
        b': "model":"dated"\n\nevent: x\ndata: {"model":"dated","n":1}\n\n'
        b'data:{"model": "dated","choices":[{"delta":{"content":"\\"model\\":\\"dated\\""}}]}\n\ndata: [DONE]\n\n'
    ).replace(b"\n", newline)
    expected = events.replace(b'{"model":"dated"', b'{"model":"fast"').replace(
        b'{"model": "dated"', b'{"model": "fast"'
    )
    assert rename_event_models(events, b'"fast"') == expected


@pytest.mark.clause("SF-05", "SF-15")
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_an_object_over_several_data_lines_is_renamed_in_its_line(newline: bytes) -> None:
    events = (
        b'event: message_start\ndata: {"type":"message_start",\ndata:"message": {\ndata:   "model" : "dated",\n'
        b'data:  "\xc3\xa9":[1,\ndata: 2]}}\nid: 7\n\ndata: {"model":"dated"}\n\ndata: {"a":\ndata: "model"\n\n'
    ).replace(b"\n", newline)
    assert rename_event_models(events, b'"fast"') == events.replace(b'"dated"', b'"fast"')


@pytest.mark.clause("SF-15")
def test_the_first_event_behind_a_byte_order_mark_is_renamed_too() -> None:
    events = b'\xef\xbb\xbfdata: {"model":"dated"}\n\ndata: {"model":"dated"}\n\n'
    assert rename_event_models(events, b'"fast"') == events.replace(b'"dated"', b'"fast"')
