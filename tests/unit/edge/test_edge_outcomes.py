"""Outcomes: one each, a bounded memory, and what errors mean."""

from __future__ import annotations

import pytest

from iop.core.ids import RequestId
from iop.edge.calls import Outcome
from iop.edge.outcomes import OutcomeBook, may_repeat, outcome_of_error, verdict_of_error
from iop.edge.pools import Verdict
from iop.wire.messages import StreamError


@pytest.mark.clause("EN-112")
def test_the_first_settlement_wins_and_later_ones_are_counted():
    book = OutcomeBook(recent_max=10)
    record = book.begin(RequestId("r1"), "fast", now=0.0)
    assert book.live == 1
    assert book.settle(record, Outcome.CLIENT_CANCELLED, now=1.0)
    assert not book.settle(record, Outcome.COMPLETE, now=2.0)
    assert (record.outcome, record.ended_at) == (Outcome.CLIENT_CANCELLED, 1.0)
    assert (book.live, book.late_settlements) == (0, 1)
    assert book.totals()[Outcome.CLIENT_CANCELLED] == 1
    assert set(book.totals()) == set(Outcome)


def test_memory_of_recent_requests_is_bounded_and_the_oldest_go_first():
    book = OutcomeBook(recent_max=3)
    records = [book.begin(RequestId(f"r{number}"), "fast", now=0.0) for number in range(5)]
    assert [book.find(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    assert book.settle(records[0], Outcome.COMPLETE, now=1.0), "a forgotten request still gets its outcome"


@pytest.mark.clause("EN-112")
@pytest.mark.parametrize(
    ("error", "started", "handed_over", "allowed"),
    [
        (StreamError(code="node_lost"), False, False, True),
        (StreamError(code="node_lost"), False, True, False),
        (StreamError(code="busy", retryable=True, before_start=True), False, True, True),
        (StreamError(code="busy", retryable=True, before_start=True), True, True, False),
        (StreamError(code="unknown_adapter", before_start=True), False, True, False),
        (StreamError(code="upstream_error", retryable=True), False, True, False),
    ],
)
def test_only_what_provably_had_no_effect_is_repeated(error, started, handed_over, allowed):
    assert may_repeat(error, has_started=started, is_handed_over=handed_over) is allowed


@pytest.mark.parametrize(
    ("code", "outcome", "verdict"),
    [
        ("upstream_truncated", Outcome.UPSTREAM_TRUNCATED, Verdict.FAILURE),
        ("timeout", Outcome.TIMEOUT, Verdict.FAILURE),
        ("no_output", Outcome.TIMEOUT, Verdict.FAILURE),
        ("connect_failed", Outcome.UPSTREAM_ERROR, Verdict.FAILURE),
        ("no_capacity", Outcome.UPSTREAM_ERROR, Verdict.FAILURE),
        ("node_shutdown", Outcome.NODE_LOST, Verdict.NEUTRAL),
        ("something_newer", Outcome.UPSTREAM_ERROR, Verdict.NEUTRAL),
    ],
)
def test_errors_of_nodes_have_their_outcomes(code, outcome, verdict):
    error = StreamError(code=code)
    assert (outcome_of_error(error), verdict_of_error(error)) == (outcome, verdict)
