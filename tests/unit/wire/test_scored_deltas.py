"""Scored deltas say the same however they are cut, and rubbish is refused (EN-43, EN-102)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.core.errors import RemoteProtocolError
from iop.wire.scored_deltas import LEAST_LOGPROB, ScoredLines, ScoredToken, scored_line

NUMBER = st.floats(min_value=-1000, max_value=0)
TOKENS = st.lists(
    st.builds(
        ScoredToken,
        token=st.text(max_size=6),
        logprob=st.none() | NUMBER,
        candidates=st.lists(st.tuples(st.text(max_size=6), NUMBER), max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)


@pytest.mark.clause("EN-43")
@given(steps=st.lists(st.tuples(st.text(max_size=9), TOKENS), max_size=4), size=st.integers(1, 50))
def test_any_cut_of_the_lines_gives_the_same_steps(
    steps: list[tuple[str, tuple[ScoredToken, ...]]], size: int
) -> None:
    told = "".join(scored_line(text, tokens) for text, tokens in steps)
    reader = ScoredLines()
    read = [step for at in range(0, len(told), size) for step in reader.feed(told[at : at + size])]
    assert read == steps and reader.is_whole
    reader.feed("[")
    assert not reader.is_whole


@pytest.mark.clause("EN-43")
def test_a_logarithm_of_nothing_has_a_number() -> None:
    nothing = ScoredToken(token="a", logprob=float("-inf"), candidates=(("b", float("-inf")),))
    [(_, [read])] = ScoredLines().feed(scored_line("a", [nothing]))
    assert (read.logprob, read.candidates) == (LEAST_LOGPROB, (("b", LEAST_LOGPROB),))


@pytest.mark.clause("EN-43")
@pytest.mark.parametrize("line", ["text", "[]", '["a",[["b",1]]]', "", '["a",7]', "\ud800", "[" * 9999])
def test_what_is_no_scored_line_is_refused(line: str) -> None:
    with pytest.raises(RemoteProtocolError):
        ScoredLines().feed(line + "\n")


@pytest.mark.clause("EN-43", "EN-101")
def test_a_line_without_end_is_refused_before_it_fills_memory() -> None:
    reader = ScoredLines()
    for _ in range(20):
        reader.feed("x" * 50_000)
    with pytest.raises(RemoteProtocolError):
        reader.feed("x" * 50_000)
