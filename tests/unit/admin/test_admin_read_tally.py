"""Reads that repeat do not fill the store, and none is lost from the count (AD-101, AD-106)."""

from __future__ import annotations

import dataclasses
import re

import pytest
from admin_requests import pause

from iop.admin.audit import find_break
from iop.admin.journal import AuditEntry
from iop.admin.read_tally import KINDS_MAX, WINDOW_S, ReadTally
from iop.testing.admin_world import ADMIN, VIEWER, AdminWorld, run_world


def counted(entries: list[AuditEntry]) -> int:
    """How many reads these rows tell."""
    return sum(int(m.group(1)) if (m := re.match(r"(\d+) more", e.reason)) else 1 for e in entries)


@pytest.mark.clause("AD-101", "AD-106")
def test_a_thousand_polls_are_a_handful_of_rows_that_tell_all_of_them() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            for number in range(1000):
                poller = dataclasses.replace(VIEWER, peer=f"ipv4:10.0.0.1:{40_000 + number}")
                await world.core.profile(poller)
                await world.settle(1.0)
        rows = [r for r in world.store.audit if r.entry.method == "GET_ADMIN_PROFILE"]
        assert len(rows) <= 1000 / WINDOW_S + 2
        assert counted([r.entry for r in rows]) == 1000
        assert find_break(world.store.audit) == ""

    run_world(scenario)


@pytest.mark.clause("AD-101")
def test_mutations_and_refusals_are_stored_one_by_one() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            for number in range(5):
                await world.run(pause(key=f"k{number}"))
                await world.core.profile(ADMIN)
        methods = [r.entry.method for r in world.store.audit]
        assert methods.count("PAUSE") == 5
        assert counted([r.entry for r in world.store.audit if r.entry.method == "GET_ADMIN_PROFILE"]) == 5

    run_world(scenario)


@pytest.mark.clause("AD-101")
def test_what_is_counted_is_bounded_and_who_stops_reading_is_forgotten() -> None:
    tally = ReadTally()
    entry = AuditEntry(
        at_unix_nanos=1, principal="a", peer="unix:", method="GET_OPERATION", outcome="ALLOWED"
    )
    stored: list[AuditEntry] = []
    for number in range(KINDS_MAX + 100):
        for _ in range(2):
            stored += tally.note(dataclasses.replace(entry, operation_id=f"op-{number}"), now=0.0)
    assert counted(stored) == KINDS_MAX + 200
    stored += tally.due(WINDOW_S)
    assert counted(stored) == 2 * (KINDS_MAX + 100)
    assert tally.due(2 * WINDOW_S) == []
    assert tally.close() == []
