"""How tests wait, and the ports that they give to listeners."""

from __future__ import annotations

import socket
import time

import pytest

from iop.testing import waiting
from iop.testing.waiting import eventually, free_ports


async def test_a_wait_that_the_machine_makes_long_is_not_cut_short() -> None:
    asked = 0

    def is_so() -> bool:
        nonlocal asked
        asked += 1
        time.sleep(0.02)  # as if other processes had the processor
        return asked == 5

    await eventually(is_so, within_s=0.02)


async def test_what_never_happens_is_named() -> None:
    with pytest.raises(AssertionError, match=r"the answer did not happen within 0\.01 s"):
        await eventually(lambda: False, within_s=0.01, what="the answer")


def test_ports_are_below_those_that_the_system_gives_to_callers() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert max(ports) < waiting._ephemeral_from()
    assert not set(ports) & set(free_ports(50)), "none is given twice"


def test_a_port_that_somebody_has_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken, free) = free_ports(2)
    tried = iter([taken, free])
    monkeypatch.setattr(waiting, "_given", set())
    monkeypatch.setattr(waiting, "_share", lambda low, high: (low, high))
    monkeypatch.setattr("secrets.randbelow", lambda _: next(tried) - waiting.FIRST_PORT)
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports(1) == [free]


def test_workers_share_the_range_and_a_small_range_is_left_to_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    shares = []
    for worker in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        shares.append(waiting._share(10_000, 30_000))
    assert shares == [(10_000, 20_000), (20_000, 30_000)]
    monkeypatch.setattr(waiting, "_ephemeral_from", lambda: 1024)
    assert len(set(free_ports(3))) == 3
