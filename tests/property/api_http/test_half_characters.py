"""Halves of characters are told from all else that backslashes begin, and give way byte for byte."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iop.api.http.json_text import without_halves
from iop.api.http.splice import read_fields

PIECES = [
    rb"\\",
    rb"\n",
    rb"\"",
    rb"\ud83d",
    rb"\uDE00",
    rb"\uDBff",
    rb"\u00e9",
    rb"ud83d",
    rb"x",
    "é".encode(),
]
STRINGS = st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join)
LONE = re.compile("[\ud800-\udfff]")


@pytest.mark.case("P-15")
@pytest.mark.clause("SF-03")
@settings(max_examples=300)
@given(content=STRINGS)
def test_only_halves_that_stand_alone_give_way(content: bytes) -> None:
    text = b'"' + content + b'"'
    legible = without_halves(text)
    assert len(legible) == len(text)
    assert json.loads(legible) == LONE.sub("\ufffd", json.loads(text))
    assert (legible is text) == (LONE.search(json.loads(text)) is None)


@pytest.mark.case("P-15")
@pytest.mark.clause("SF-03")
@settings(max_examples=200)
@given(before=STRINGS, after=STRINGS, key=STRINGS)
def test_a_body_with_halves_anywhere_is_sent_as_it_came(before: bytes, after: bytes, key: bytes) -> None:
    body = b'{"t":["%b"],"model":"fast","k%b":{"%b":"%b"}}' % (before, key, key, after)
    fields = read_fields(body, depth_max=9)
    assert b"".join(fields.with_model("X")) == body.replace(b'"model":"fast"', b'"model":"X"', 1)
