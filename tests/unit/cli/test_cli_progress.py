"""Observing an operation: its end decides the exit code; a broken stream is taken up where it broke."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdminOperationState,
    ParticipantPhase,
    PauseMode,
)
from iop.admin.results import (
    AdminError,
    AdminOperation,
    AdminOperationEvent,
    EventBody,
    OperationAccepted,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
    OperationPlan,
    ParticipantError,
    ParticipantStatus,
    ParticipantUpdate,
    PauseResult,
)
from iop.cli.admin_progress import observe
from iop.client.admin import AdminClient
from iop.core.errors import Conflict, IopError, Unavailable
from iop.core.ids import OperationId, ParticipantId

OPERATION = AdminOperation(
    operation_id=OperationId("op-1"),
    kind=AdminOperationKind.PAUSE,
    state=AdminOperationState.RUNNING,
    idempotency_key="k",
    principal="p",
    request_sha256=b"",
    revision_before=0,
    accepted_at_unix_nanos=0,
)
ACCEPTED = OperationAccepted(operation=OPERATION)
COMPLETED = OperationCompleted(result=PauseResult(pause_epoch=1, mode=PauseMode.KEEP), revision=1)
FAILED = OperationFailed(
    error=AdminError(
        code=AdminErrorCode.PARTICIPANT_LOST,
        message="gone",
        participants=(ParticipantId("n/e/0"),),
        quarantined=(ParticipantId("n/e/0"),),
    ),
    revision=1,
)
CANCELLED = OperationCancelled(reason="wrong one", revision=0, rolled_back=True)

Script = Sequence[EventBody | IopError]


async def play(script: Script, first: int = 1) -> AsyncIterator[AdminOperationEvent]:
    for number, item in enumerate(script, first):
        if isinstance(item, IopError):
            raise item
        yield AdminOperationEvent(operation_id="op-1", sequence=number, timestamp_unix_nanos=0, event=item)


class ScriptedClient:
    """Answers ``get`` and plays one script per ``watch``."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.watched: list[int] = []
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def get(self, operation_id: str) -> AdminOperation:
        assert operation_id == "op-1"
        return OPERATION

    def watch(self, operation_id: str, *, after_sequence: int = 0) -> AsyncIterator[AdminOperationEvent]:
        self.watched.append(after_sequence)
        return play(self._scripts.pop(0), after_sequence + 1)


async def watch(script: Script, *later: Script, **more: Any) -> tuple[int, ScriptedClient]:
    client = ScriptedClient(*later)
    options = {"as_json": False, "as_events": False, "sleep": client.sleep, **more}
    ended = await observe(cast("AdminClient", client), play(script), **options)
    return ended.exit_code, client


@pytest.mark.parametrize(("end", "code"), [(COMPLETED, 0), (FAILED, 4), (CANCELLED, 5)])
async def test_the_terminal_event_decides_the_exit_code(end: EventBody, code: int) -> None:
    assert (await watch([ACCEPTED, end]))[0] == code


async def test_a_failure_names_participants_and_quarantine(capsys: pytest.CaptureFixture[str]) -> None:
    await watch([ACCEPTED, FAILED])
    said = capsys.readouterr().err
    assert "PARTICIPANT_LOST: gone; some of it stays changed" in said
    assert "quarantined: n/e/0" in said


async def test_what_went_wrong_at_a_participant_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = ParticipantStatus(
        participant_id=ParticipantId("n/e/0"),
        phase=ParticipantPhase.FAILED,
        error=ParticipantError(
            code=AdminErrorCode.REFUSED_BUSY, message="busy", step=ParticipantPhase.APPLYING
        ),
    )
    update = ParticipantUpdate(status=status)
    monkeypatch.setattr(sys.modules[__name__], "OPERATION", replace(OPERATION, participants=(status,)))
    await watch([ACCEPTED, update, update, FAILED])
    assert capsys.readouterr().err.count("n/e/0: REFUSED_BUSY: busy") == 1


@pytest.mark.clause("AD-22", "AD-26")
async def test_a_broken_stream_is_taken_up_after_its_last_sequence() -> None:
    broken = Unavailable("connection reset")
    code, client = await watch([ACCEPTED, broken], [broken], [COMPLETED])
    assert code == 0
    assert client.watched == [1, 1]
    assert client.slept == [0.5, 1.0]


@pytest.mark.clause("AD-26")
async def test_a_server_has_time_to_restart_and_each_event_starts_the_count_anew() -> None:
    broken = Unavailable("connection reset")
    code, client = await watch(
        [ACCEPTED, broken], *[[broken]] * 6, [ACCEPTED, broken], *[[broken]] * 6, [COMPLETED]
    )
    assert code == 0
    assert sum(client.slept[:7]) > 30
    assert client.slept[:7] == client.slept[7:]


async def test_a_stream_that_never_comes_back_is_an_error_that_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = Unavailable("connection reset")
    with pytest.raises(Unavailable):
        await watch([ACCEPTED, broken], *[[broken]] * 7)
    assert "iop admin attach op-1" in capsys.readouterr().err


async def test_a_refusal_is_not_retried() -> None:
    with pytest.raises(Conflict):
        await watch([Conflict("revision is 4")])
    with pytest.raises(Unavailable):
        await watch([Unavailable("nobody there")])


@pytest.mark.clause("AD-105")
async def test_a_plan_is_shown_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    plan = OperationPlan(steps=(), blockers=("REVISION_PENDING",), pauses_inference=True, revision=4)
    assert (await watch([plan]))[0] == 0
    shown = capsys.readouterr().out
    assert "plan at revision 4; nothing was changed" in shown
    assert "blockers: REVISION_PENDING" in shown


async def test_json_is_the_operation_and_events_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    await watch([ACCEPTED, COMPLETED], as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["operation_id"] == "op-1"
    await watch([ACCEPTED, COMPLETED], as_events=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["sequence"] for line in lines] == [1, 2]
    assert "completed" in lines[1]


@pytest.mark.clause("AD-23")
async def test_what_each_participant_has_loaded_is_shown_as_it_grows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loaded(done: int) -> ParticipantUpdate:
        return ParticipantUpdate(
            status=ParticipantStatus(
                participant_id=ParticipantId("n/e/0"),
                phase=ParticipantPhase.PREPARING,
                bytes_done=done,
                bytes_total=300,
            )
        )

    await watch([ACCEPTED, loaded(100), loaded(100), loaded(300), COMPLETED])
    shown = capsys.readouterr().err
    assert shown.count("n/e/0: preparing, 100 of 300 bytes") == 1
    assert shown.count("n/e/0: preparing, 300 of 300 bytes") == 1
