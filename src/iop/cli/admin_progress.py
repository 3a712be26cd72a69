"""Observe one operation: progress on standard error, its end on standard output, its outcome as exit code."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from iop.admin.results import (
    AdminOperation,
    AdminOperationEvent,
    OperationAccepted,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
    OperationPlan,
    OperationProgress,
    ParticipantStatus,
    ParticipantUpdate,
)
from iop.cli.output import data, notes, print_json
from iop.cli.records import to_json
from iop.client.admin import AdminClient
from iop.core.errors import Unavailable

__all__ = ["EXIT_CANCELLED", "EXIT_FAILED", "Ended", "observe", "print_plan"]

EXIT_FAILED: Final = 4
EXIT_CANCELLED: Final = 5

REATTACH_WAITS_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
"""Waits before a broken stream is taken up again, one for each try since the last event; a server that restarts needs
seconds. Then the command gives up; the operation goes on regardless."""


@dataclass(slots=True, kw_only=True)
class Ended:
    """How it went: the exit code and, after a terminal event, the whole operation."""

    exit_code: int = 0
    operation: AdminOperation | None = None


@dataclass(slots=True, kw_only=True)
class _View:
    """What is shown while an operation runs."""

    progress: Progress
    bar: TaskID | None = None
    operation_id: str = ""
    last_sequence: int = 0
    failed: set[str] = field(default_factory=set)
    loaded: dict[str, int] = field(default_factory=dict)

    def show(self, event: AdminOperationEvent) -> None:
        """Update the bar, or write a line where there is no terminal."""
        self.last_sequence = max(self.last_sequence, event.sequence)
        body = event.event
        if isinstance(body, OperationAccepted):
            self.operation_id = event.operation_id
            kind = body.operation.kind.name.lower().replace("_", " ")
            self._say(f"operation {event.operation_id}: {kind}")
            for name in body.operation.skipped:
                self._say(f"skipped, offline: {name}")
        elif isinstance(body, OperationProgress):
            self._step(f"{body.phase.name.lower()} {body.message}".strip(), body)
        elif isinstance(body, ParticipantUpdate):
            self.show_failure(body.status)
            self._show_bytes(body.status)

    def show_failure(self, status: ParticipantStatus) -> None:
        """Say once what went wrong at a participant: each phase and the end repeat it."""
        if status.error is None:
            return
        line = f"{status.participant_id}: {status.error.code.name}: {status.error.message}"
        if line not in self.failed:
            self.failed.add(line)
            self._say(line)

    def _show_bytes(self, status: ParticipantStatus) -> None:
        """How much a participant has loaded, once for each figure."""
        if status.bytes_total and self.loaded.get(status.participant_id) != status.bytes_done:
            self.loaded[status.participant_id] = status.bytes_done or 0
            phase = status.phase.name.lower().replace("_", " ")
            self._say(
                f"{status.participant_id}: {phase}, {status.bytes_done or 0} of {status.bytes_total} bytes"
            )

    def _say(self, line: str) -> None:
        self.progress.console.print(line)

    def _step(self, text: str, body: OperationProgress) -> None:
        total = body.total or None
        if self.bar is None:
            self.bar = self.progress.add_task(text, total=total)
        self.progress.update(self.bar, description=f"{text} ({body.unit})", completed=body.done, total=total)


async def observe(
    client: AdminClient,
    events: AsyncIterator[AdminOperationEvent],
    *,
    as_json: bool,
    as_events: bool,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Ended:
    """Follow the events to the end and print. A stream that breaks after acceptance is taken up again (AD-22).

    Raises:
        IopError: the server refused, or cannot be reached again.
    """
    with _progress() as progress:
        view = _View(progress=progress)
        attempts = 0
        while True:
            try:
                async with contextlib.aclosing(_generator(events)) as stream:
                    async for event in stream:
                        attempts = 0
                        if as_events:
                            print_json(to_json(event))
                        view.show(event)
                        if isinstance(event.event, OperationPlan):
                            print_plan(event.event, as_json=as_json)
                            return Ended()
                        if event.is_terminal:
                            return await _finish(client, event, view, as_json=as_json and not as_events)
                raise Unavailable("The stream of events ended without a terminal event.", reason="STREAM_CUT")
            except Unavailable:
                if not view.operation_id or attempts == len(REATTACH_WAITS_S):
                    if view.operation_id:
                        notes.print(f"it goes on: iop admin attach {view.operation_id}")
                    raise
                if attempts == 0:
                    notes.print(f"the stream broke; attaching again to {view.operation_id}")
                await sleep(REATTACH_WAITS_S[attempts])
                attempts += 1
                events = client.watch(view.operation_id, after_sequence=view.last_sequence)


async def _generator(events: AsyncIterator[AdminOperationEvent]) -> AsyncGenerator[AdminOperationEvent, None]:
    async for event in events:
        yield event


async def _finish(client: AdminClient, event: AdminOperationEvent, view: _View, *, as_json: bool) -> Ended:
    operation = await client.get(event.operation_id)
    if as_json:
        print_json(to_json(operation))
    body = event.event
    if isinstance(body, OperationCompleted):
        return Ended(operation=operation)
    if isinstance(body, OperationFailed):
        error = body.error
        undone = "everything was put back" if error.rolled_back else "some of it stays changed"
        notes.print(f"failed: {error.code.name}: {error.message}; {undone}", style="red")
        for status in operation.participants:
            view.show_failure(status)
        if error.quarantined:
            notes.print(f"  quarantined: {', '.join(error.quarantined)}")
        return Ended(exit_code=EXIT_FAILED, operation=operation)
    assert isinstance(body, OperationCancelled)
    by = f", superseded by {body.superseded_by}" if body.superseded_by else ""
    notes.print(f"cancelled{by}{f': {body.reason}' if body.reason else ''}", style="yellow")
    return Ended(exit_code=EXIT_CANCELLED, operation=operation)


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def print_plan(plan: OperationPlan, *, as_json: bool) -> None:
    """What would happen."""
    if as_json:
        print_json(to_json(plan))
        return
    data.print(f"plan at revision {plan.revision}; nothing was changed")
    for step in plan.steps:
        data.print(f"  {step.phase.name.lower()}: {step.action} ({', '.join(step.participant_ids)})")
    data.print(f"  inference pauses: {'yes' if plan.pauses_inference else 'no'}")
    for label, names in (
        ("skipped, offline", plan.skipped),
        ("affected models", plan.affected_models),
        ("blockers", plan.blockers),
    ):
        if names:
            data.print(f"  {label}: {', '.join(names)}")
    if plan.irreversible:
        data.print("  it cannot be undone")
