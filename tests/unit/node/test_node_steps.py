"""The Node's memory of admin steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.node.steps import RESULTS_KEPT_MAX, Decision, StepBook, Verdict, key_of
from iop.wire.messages import AdminStep, AdminStepResult


def a_step(
    operation: str = "op",
    ordinal: int = 1,
    number: int = 1,
    *,
    adapter: str = "main",
    ids: tuple[str, ...] = ("r0",),
) -> AdminStep:
    return AdminStep(
        operation_id=operation,
        ordinal=ordinal,
        step=number,
        adapter=adapter,
        group_id="g-" + ids[0],
        participant_ids=ids,
        timeout_ms=1000,
        request=b"",
    )


def result_of(step: AdminStep, outcome: bytes = b"done", *, refused: str = "") -> AdminStepResult:
    return AdminStepResult(
        operation_id=step.operation_id, step=step.step, outcome=outcome, refused_code=refused
    )


@pytest.mark.clause("EN-108", "EN-120", "AD-36")
def test_a_repeated_step_has_one_effect_and_every_asker_gets_its_result() -> None:
    book: StepBook[str] = StepBook()
    step = a_step()
    assert book.receive(step, "first").verdict is Verdict.RUN
    assert book.receive(step, "again").verdict is Verdict.WAIT
    assert book.waiters(key_of(step)) == ("first", "again")
    result = result_of(step)
    assert book.finish(key_of(step), result) == ("first", "again")
    assert book.receive(step, "later") == Decision(verdict=Verdict.REPLAY, result=result)
    assert book.running_count == 0


@pytest.mark.clause("EN-120", "AD-36")
def test_a_step_below_the_last_seen_is_refused() -> None:
    book: StepBook[str] = StepBook()
    for ordinal, number in ((5, 1), (5, 2), (6, 1)):
        step = a_step(f"op-{ordinal}", ordinal, number)
        assert book.receive(step, "").verdict is Verdict.RUN
        book.finish(key_of(step), result_of(step))
    assert book.receive(a_step("op-4", 4, 9), "").verdict is Verdict.STALE
    assert book.receive(a_step("op-5", 5, 3), "").verdict is Verdict.STALE
    assert book.receive(a_step("op-5", 5, 2), "").verdict is Verdict.REPLAY
    assert book.receive(a_step("op-4", 4, 1, ids=("r1",)), "").verdict is Verdict.RUN
    assert book.receive(a_step("op-4", 4, 1, adapter="other"), "").verdict is Verdict.RUN


@pytest.mark.clause("EN-120")
def test_one_participant_that_saw_more_makes_a_step_stale_for_its_group() -> None:
    book: StepBook[str] = StepBook()
    assert book.receive(a_step("op-9", 9, ids=("r1",)), "").verdict is Verdict.RUN
    assert book.receive(a_step("op-8", 8, ids=("r0", "r1")), "").verdict is Verdict.STALE
    assert book.receive(a_step("op-7", 7, ids=("r0",)), "").verdict is Verdict.RUN


def test_one_operation_sends_the_same_step_to_many_groups() -> None:
    book: StepBook[str] = StepBook()
    assert book.receive(a_step(ids=("r0",)), "").verdict is Verdict.RUN
    assert book.receive(a_step(ids=("r1",)), "").verdict is Verdict.RUN


def test_a_refusal_is_not_kept() -> None:
    book: StepBook[str] = StepBook()
    step = a_step()
    book.receive(step, "")
    book.finish(key_of(step), result_of(step, b"", refused="unavailable"))
    assert book.receive(step, "").verdict is Verdict.RUN


def test_kept_results_are_bounded() -> None:
    book: StepBook[str] = StepBook()
    for number in range(RESULTS_KEPT_MAX + 10):
        step = a_step(f"op-{number}", number)
        book.receive(step, "")
        book.finish(key_of(step), result_of(step))
    assert book.receive(a_step("op-0", 0), "").verdict is Verdict.STALE


@pytest.mark.clause("AD-36")
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.booleans()), max_size=50))
def test_no_step_ever_runs_twice_nor_after_a_newer_one(moves: list[tuple[int, int, bool]]) -> None:
    book: StepBook[int] = StepBook()
    ran: list[tuple[int, int]] = []
    running: set[tuple[int, int]] = set()
    for ordinal, number, is_finishing in moves:
        step = a_step(f"op-{ordinal}", ordinal, number)
        if is_finishing:
            if (ordinal, number) in running:
                running.discard((ordinal, number))
                book.finish(key_of(step), result_of(step))
        elif book.receive(step, 0).verdict is Verdict.RUN:
            assert (ordinal, number) not in ran
            assert not ran or (ordinal, number) > max(ran)
            ran.append((ordinal, number))
            running.add((ordinal, number))
