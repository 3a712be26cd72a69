"""When a waiting stream is told its place (EN-110)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from iop.api.http.errors import Dialect
from iop.api.http.exchange import Exchange
from iop.api.http.pulse import WORKING, comment_while_waiting
from iop.edge.handle import DispatchHandle


class _Line:
    """An exchange of which only the timer and the comments matter, and the handle of its request."""

    def __init__(self) -> None:
        self.is_ended = self.is_gone = self.is_started = self.is_early = False
        self.is_writable = True
        self.waiting_behind: int | None = 2
        self.told: list[bytes] = []
        self.timer: Callable[[], None] | None = None

    def after(self, _delay_s: float, callback: Callable[[], None]) -> None:
        self.timer = callback

    def start_early(self, *_head: Any, **_late: Any) -> None:
        self.is_early = True

    def comment(self, line: bytes) -> None:
        if not (self.is_gone or self.is_ended):
            self.told.append(line)

    def tick(self) -> None:
        callback, self.timer = self.timer, None
        assert callback is not None
        callback()


def _waiting() -> _Line:
    line = _Line()
    comment_while_waiting(
        cast("Exchange", line),
        cast("DispatchHandle", line),
        every_s=1.0,
        headers=[],
        dialect=Dialect.CHAT,
    )
    return line


@pytest.mark.clause("EN-110", "EN-112")
def test_a_stream_that_waits_again_after_a_vain_attempt_hears_its_place_again() -> None:
    line = _waiting()
    line.tick()
    line.waiting_behind = None
    line.tick()
    line.waiting_behind = 0
    line.tick()
    assert line.told == [b": waiting behind 2\n", WORKING, b": waiting behind 0\n"]


@pytest.mark.clause("SF-03", "SF-06")
def test_an_answer_that_was_not_begun_while_it_waited_is_left_to_its_provider() -> None:
    line = _waiting()
    line.waiting_behind = None
    line.tick()
    assert (line.told, line.is_early) == ([], False)


@pytest.mark.clause("SF-08")
def test_a_caller_that_does_not_read_is_told_nothing_more() -> None:
    line = _waiting()
    line.tick()
    line.waiting_behind = None
    line.is_writable = False
    line.tick()
    assert len(line.told) == 1


@pytest.mark.clause("EN-110")
@pytest.mark.parametrize("name", ["is_started", "is_gone", "is_ended"])
def test_nobody_is_told_after_the_wait_is_over(name: str) -> None:
    line = _waiting()
    line.waiting_behind = None
    line.is_early = True
    setattr(line, name, True)
    line.tick()
    assert line.timer is None and not line.told
