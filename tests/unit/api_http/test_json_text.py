"""JSON that the fast encoder and decoders refuse, read and written all the same."""

from __future__ import annotations

import json

import pytest

from iop.api.http.json_text import json_text, read_text, without_halves


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize(
    "value", [{"a": [1, "é"]}, {"n": 2**64}, {"n": -(10**40), "t": "é"}, {"t": "a\ud83d"}]
)
def test_whatever_plain_values_hold_is_written_and_reads_as_it_was(value: object) -> None:
    assert json.loads(json_text(value)) == value


@pytest.mark.clause("SF-10")
def test_what_runs_deep_is_written_too() -> None:
    value: list[object] = []
    for _ in range(400):
        value = [value]
    assert json_text(value) == b"[" * 401 + b"]" * 401


@pytest.mark.clause("SF-03")
@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (rb'"a\ud83d"', rb'"a\ufffd"'),
        (rb'"\uDE00\ud83d\ude00"', rb'"\ufffd\ud83d\ude00"'),
        (rb'"\ud83d\ud83d\ude00"', rb'"\ufffd\ud83d\ude00"'),
        (rb'"\\ud83d \\\ud83d"', rb'"\\ud83d \\\ufffd"'),
    ],
)
def test_halves_of_characters_make_way_for_as_many_bytes(data: bytes, wanted: bytes) -> None:
    assert without_halves(data) == wanted
    assert read_text(data) == json.loads(data)


@pytest.mark.clause("SF-03")
@pytest.mark.parametrize("data", [rb'"\ud83d\ude00 \n\u00e9 \\ud83d"', b"\\", b"", b"\\u12"])
def test_what_has_no_half_is_the_same_object(data: bytes) -> None:
    assert without_halves(data) is data
