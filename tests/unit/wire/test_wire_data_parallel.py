"""The short form of data-parallel ranks, and what a server's parallelism says of them (SF-21, SF-22)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.wire.data_parallel import RANK_MAX, RANKS_MAX, read_ranks, served_ranks, write_ranks

pytestmark = pytest.mark.clause("SF-22")


@given(st.frozensets(st.integers(0, 40) | st.integers(RANK_MAX - 3, RANK_MAX), max_size=RANKS_MAX))
def test_what_is_written_is_read_back(ranks: frozenset[int]) -> None:
    assert read_ranks(write_ranks(ranks)) == ranks


def test_spans_are_written_as_such() -> None:
    assert write_ranks({8, 0, 2, 1, 3}) == "0-3,8"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "3-1",
        "-1",
        "0-",
        "0,,1",
        " 1",
        f"0-{RANK_MAX}",
        f"{RANK_MAX + 1}",
        f"0-{RANKS_MAX}",
        f"0-{RANKS_MAX - 1},{RANKS_MAX}",
        ",".join(str(2 * rank) for rank in range(RANKS_MAX + 1)),
        "١",
    ],
)
def test_what_cannot_be_read_or_is_too_much_names_no_rank(text: str) -> None:
    assert read_ranks(text) == frozenset()


@given(st.text(alphabet="0123456789-, ", max_size=40))
def test_no_text_reads_as_more_than_the_most_ranks(text: str) -> None:
    assert len(read_ranks(text)) <= RANKS_MAX


@pytest.mark.parametrize(
    ("size", "rank", "start_rank", "ranks"),
    [
        (None, None, None, set()),
        (0, None, None, set()),
        (4, None, None, {0, 1, 2, 3}),
        (1, 0, 0, {0}),
        (2, None, 2, {2, 3}),
        (4, 2, None, {2}),  # one server for each replica
        (2, 2, 2, {2, 3}),
        (RANKS_MAX + 1, None, None, set()),
        (2, None, RANK_MAX, set()),
    ],
)
def test_a_server_serves_the_ranks_of_its_parallelism(
    size: int | None, rank: int | None, start_rank: int | None, ranks: set[int]
) -> None:
    assert served_ranks(size=size, rank=rank, start_rank=start_rank) == ranks
