"""The Node's local capacity gate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.node.gate import LocalGate

pytestmark = pytest.mark.clause("EN-95")


def test_a_full_gate_refuses_and_counts() -> None:
    gate = LocalGate(capacity=2, long_capacity=1)
    assert gate.enter(is_long=False)
    assert gate.enter(is_long=True)
    assert not gate.enter(is_long=False)
    assert gate.refused == 1
    gate.leave(is_long=True)
    assert gate.enter(is_long=True)


def test_long_work_needs_a_long_place_as_well() -> None:
    gate = LocalGate(capacity=3, long_capacity=1)
    assert gate.enter(is_long=True)
    assert not gate.enter(is_long=True)
    assert gate.enter(is_long=False)


def test_a_smaller_gate_lets_what_runs_finish() -> None:
    gate = LocalGate(capacity=3, long_capacity=0)
    for _ in range(3):
        assert gate.enter(is_long=False)
    gate.resize(capacity=1, long_capacity=0)
    for _ in range(2):
        gate.leave(is_long=False)
        assert not gate.enter(is_long=False)
    gate.leave(is_long=False)
    assert gate.enter(is_long=False)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_counts_are_what_entered_less_what_left(moves: list[tuple[bool, bool]]) -> None:
    gate = LocalGate(capacity=4, long_capacity=2)
    inside: list[bool] = []
    for is_entering, is_long in moves:
        if is_entering:
            if gate.enter(is_long=is_long):
                inside.append(is_long)
        elif inside:
            gate.leave(is_long=inside.pop(0))
        assert gate.in_flight == len(inside) <= 4
        assert gate.long_in_flight == sum(inside) <= 2
