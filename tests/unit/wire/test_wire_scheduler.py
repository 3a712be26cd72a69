from __future__ import annotations

from typing import Any

import pytest

from iop.core.errors import RemoteProtocolError
from iop.wire import scheduler
from iop.wire.scheduler import Scheduler


class Frames:
    """A lane of ready-made frames."""

    def __init__(self, *frames: bytes) -> None:
        self.frames = list(frames)
        self.is_queued = False

    @property
    def can_send(self) -> bool:
        return bool(self.frames)

    def pull(self, out: list[Any], budget: int) -> int:
        if out and len(self.frames[0]) > budget:
            return 0
        out.append(self.frames.pop(0))
        return len(out[-1])


@pytest.mark.clause("EN-106")
def test_control_goes_ahead_of_every_lane() -> None:
    subject = Scheduler()
    subject.wake(Frames(b"stream"))
    subject.push_control(b"cancel;")
    subject.push_control(b"beat;")
    assert subject.pull(100) == b"cancel;beat;stream"
    assert not subject.has_output


@pytest.mark.clause("EN-106")
def test_lanes_take_turns_and_keep_their_own_order() -> None:
    subject = Scheduler()
    for name in (b"a", b"b", b"c"):
        subject.wake(Frames(*(name + str(n).encode() for n in range(2))))
    assert subject.pull(100) == b"a0b0c0a1b1c1"


@pytest.mark.clause("EN-101", "EN-106")
def test_a_lane_that_just_woke_goes_before_those_with_much_to_send() -> None:
    subject = Scheduler()
    for name in (b"a", b"b", b"c"):
        subject.wake(Frames(*(name + str(n).encode() for n in range(9))))
    assert subject.pull(6) == b"a0b0c0"
    subject.wake(Frames(b"!!"))
    assert subject.pull(8).startswith(b"!!")


@pytest.mark.clause("EN-101", "EN-106")
def test_lanes_that_keep_waking_do_not_starve_those_with_much_to_send() -> None:
    subject = Scheduler()
    bulk = Frames(*(b"B" for _ in range(100)))
    subject.wake(bulk)
    subject.pull(1)
    sent = b""
    for _ in range(40):
        subject.wake(Frames(b"f"))
        subject.wake(Frames(b"f"))
        sent += subject.pull(2)
    assert sent.count(b"B") >= 15


@pytest.mark.clause("EN-106")
def test_a_pull_keeps_to_its_limit_and_leaves_the_rest_to_be_overtaken() -> None:
    subject = Scheduler()
    subject.wake(Frames(b"x" * 40, b"y" * 40, b"z" * 40))
    assert subject.pull(100) == b"x" * 40 + b"y" * 40
    subject.push_control(b"cancel")
    assert subject.pull(100) == b"cancel" + b"z" * 40


def test_a_frame_over_the_limit_goes_alone() -> None:
    subject = Scheduler()
    subject.push_control(b"c" * 500)
    subject.push_control(b"d")
    assert subject.pull(100) == b"c" * 500
    assert subject.pull(100) == b"d"


def test_a_lane_that_has_nothing_any_more_leaves_the_ring() -> None:
    subject = Scheduler()
    lane = Frames(b"gone")
    subject.wake(lane)
    lane.frames.clear()
    assert subject.pull(100) == b""
    assert not lane.is_queued
    lane.frames.append(b"back")
    subject.wake(lane)
    assert subject.pull(100) == b"back"


def test_a_peer_that_takes_nothing_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "CONTROL_BYTES_MAX", 10)
    subject = Scheduler()
    subject.push_control(b"x" * 10)
    with pytest.raises(RemoteProtocolError) as caught:
        subject.push_control(b"y")
    assert caught.value.reason == "NOT_READING"
