"""The Node's link supervisor: every rule of EN-20 to EN-25 and EN-107 on the pure machine."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.node.supervisor import (
    CloseLink,
    Connected,
    Dial,
    Exit,
    FatalLocalError,
    LinkEffect,
    LinkEvent,
    LinkState,
    Lost,
    Ready,
    ReconnectPolicy,
    Start,
    Stop,
    Supervision,
    TimerFired,
    Wait,
    step,
)

LOST = Lost(reason="connection refused")


def drive(
    policy: ReconnectPolicy, *events: LinkEvent, random: float = 0.5
) -> tuple[Supervision, list[LinkEffect | None]]:
    now_is = Supervision(policy=policy)
    effects = []
    for event in events:
        now_is, effect = step(now_is, event, now=100.0, random=random)
        effects.append(effect)
    return now_is, effects


UNLIMITED = ReconnectPolicy(interval_s=10, attempts_max=None)


@pytest.mark.clause("EN-20")
def test_an_unreachable_edge_at_start_up_is_waited_for() -> None:
    now_is, effects = drive(UNLIMITED, Start(), LOST)
    assert effects == [Dial(attempt=1), Wait(until=110.0)]
    assert now_is.state is LinkState.WAITING


@pytest.mark.clause("EN-23")
@pytest.mark.parametrize("connected", [False, True])
def test_a_finite_budget_counts_attempts_from_dial_to_ready(connected: bool) -> None:
    failing: list[LinkEvent] = [Connected(), LOST] if connected else [LOST]
    events: list[LinkEvent] = [Start()]
    for _ in range(3):
        events += [*failing, TimerFired()]
    now_is, effects = drive(ReconnectPolicy(interval_s=0, attempts_max=3), *events)
    assert [effect for effect in effects if isinstance(effect, Dial)] == [Dial(attempt=n) for n in (1, 2, 3)]
    exits = [effect for effect in effects if isinstance(effect, Exit)]
    assert [each.code for each in exits] == [1]
    assert "connection refused" in exits[0].reason
    assert now_is.state is LinkState.EXITED


@pytest.mark.clause("EN-23")
def test_only_ready_starts_the_count_anew() -> None:
    policy = ReconnectPolicy(interval_s=1, attempts_max=2)
    session: list[LinkEvent] = [Connected(), Ready(), LOST, TimerFired()]
    _, effects = drive(policy, Start(), *session, *session, LOST, TimerFired(), LOST)
    assert [effect.attempt for effect in effects if isinstance(effect, Dial)] == [1, 1, 1, 2]
    assert isinstance(effects[-1], Exit)


@pytest.mark.clause("EN-23")
def test_without_limit_it_never_gives_up() -> None:
    events = [Start(), *itertools.islice(itertools.cycle([LOST, TimerFired()]), 20_000)]
    now_is, effects = drive(UNLIMITED, *events)
    assert not any(isinstance(effect, Exit) for effect in effects)
    assert now_is.attempts == 10_001


@pytest.mark.clause("EN-23", "EN-107")
@given(st.floats(min_value=0, max_value=1, exclude_max=True), st.floats(min_value=0, max_value=1000))
def test_waits_are_jittered_and_do_not_grow(random: float, interval_s: float) -> None:
    policy = ReconnectPolicy(interval_s=interval_s, attempts_max=None)
    _, effects = drive(policy, Start(), LOST, TimerFired(), LOST, TimerFired(), LOST, random=random)
    for effect in effects[1::2]:
        assert isinstance(effect, Wait)
        assert interval_s * 0.5 <= effect.until - 100.0 + 1e-9
        assert effect.until - 100.0 <= interval_s * 1.5 + 1e-9


@pytest.mark.clause("EN-23", "EN-107")
@given(st.floats(min_value=0, max_value=1, exclude_max=True))
def test_the_first_retry_after_ready_comes_within_a_second(random: float) -> None:
    _, effects = drive(UNLIMITED, Start(), Connected(), Ready(), LOST, random=random)
    effect = effects[-1]
    assert isinstance(effect, Wait)
    assert effect.until == pytest.approx(100.0 + random)


@pytest.mark.clause("EN-107")
def test_a_thousand_nodes_do_not_come_back_in_one_instant() -> None:
    waits = sorted(
        effect.until
        for n in range(1000)
        for effect in [drive(UNLIMITED, Start(), Connected(), Ready(), LOST, random=n / 1000)[1][-1]]
        if isinstance(effect, Wait)
    )
    busiest = max(sum(start <= other < start + 0.1 for other in waits) for start in waits)
    assert busiest <= 110


@pytest.mark.clause("EN-115")
def test_the_edges_own_wish_lengthens_the_wait() -> None:
    wish = Lost(reason="identity_contended", retry_after_s=60)
    assert drive(UNLIMITED, Start(), Connected(), wish)[1][-1] == Wait(until=160.0)
    assert drive(UNLIMITED, Start(), Connected(), Ready(), wish)[1][-1] == Wait(until=160.0)


@pytest.mark.clause("EN-22", "EN-24")
def test_a_fatal_local_error_ends_with_1_from_anywhere() -> None:
    for events in ([Start()], [Start(), Connected()], [Start(), Connected(), Ready()], [Start(), LOST]):
        now_is, effects = drive(UNLIMITED, *events, FatalLocalError(reason="unreadable key"))
        assert effects[-1] == Exit(code=1, reason="unreadable key")
        assert now_is.state is LinkState.EXITED


@pytest.mark.clause("EN-24")
def test_a_local_shutdown_ends_with_0_after_the_link_closed() -> None:
    for events in ([Start()], [Start(), Connected()], [Start(), Connected(), Ready()]):
        _, effects = drive(UNLIMITED, *events, Stop(), LOST)
        assert effects[-2:] == [CloseLink(), Exit(code=0, reason="stopped")]
    for events in ([], [Start(), LOST]):
        assert drive(UNLIMITED, *events, Stop())[1][-1] == Exit(code=0, reason="stopped")


@pytest.mark.clause("EN-24")
def test_a_shutdown_wins_over_a_budget_that_ends_meanwhile() -> None:
    policy = ReconnectPolicy(interval_s=1, attempts_max=1)
    assert drive(policy, Start(), Stop(), LOST)[1][-1] == Exit(code=0, reason="stopped")


_EVENTS: list[LinkEvent] = [
    Start(),
    Connected(),
    Ready(),
    LOST,
    TimerFired(),
    Stop(),
    FatalLocalError(reason="x"),
]


@pytest.mark.clause("EN-21")
@given(st.lists(st.sampled_from(_EVENTS), max_size=40))
def test_there_are_never_two_dials_at_once_nor_two_exits(events: list[LinkEvent]) -> None:
    now_is = Supervision(policy=ReconnectPolicy(interval_s=1, attempts_max=3))
    has_link = has_timer = False
    exits = 0
    for event in events:
        before = now_is
        now_is, effect = step(now_is, event, now=0.0, random=0.0)
        if before.state is LinkState.WAITING and now_is.state is not LinkState.WAITING:
            has_timer = False
        if isinstance(event, Lost) and before.state in {
            LinkState.DIALLING,
            LinkState.HANDSHAKING,
            LinkState.READY,
            LinkState.STOPPING,
        }:
            has_link = False
        if isinstance(effect, Dial):
            assert not has_link
            assert not has_timer
            has_link = True
        elif isinstance(effect, Wait):
            assert not has_link
            assert not has_timer
            has_timer = True
        elif isinstance(effect, Exit):
            exits += 1
        assert exits <= 1
        if before.state is LinkState.EXITED:
            assert (now_is, effect) == (before, None)


@pytest.mark.clause("EN-23")
@pytest.mark.parametrize(("interval", "attempts"), [(-1.0, 1), (1.0, -1), (0.0, 0)])
def test_a_policy_that_cannot_be_is_refused(interval: float, attempts: int) -> None:
    with pytest.raises(ValueError, match="reconnect"):
        ReconnectPolicy.from_config(interval, attempts)


@pytest.mark.clause("EN-23")
def test_zero_written_out_means_without_limit() -> None:
    assert ReconnectPolicy.from_config(5, 0).attempts_max is None
    assert ReconnectPolicy.from_config(0, 3).attempts_max == 3
    assert ReconnectPolicy() == ReconnectPolicy(interval_s=10, attempts_max=10)
