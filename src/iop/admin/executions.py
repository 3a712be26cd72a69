"""The executions of one server: each accepted operation has one supervisor, from acceptance or recovery to its end."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from iop.admin.enums import AdminErrorCode
from iop.admin.executor import Executor, ExecutorPorts
from iop.admin.observers import Announcer
from iop.admin.reconciler import Reconciler
from iop.admin.records import OperationRecord
from iop.admin.results import AdminError
from iop.admin.settle import Leftover, ended_badly
from iop.core.errors import Unavailable
from iop.core.ids import OperationId

__all__ = ["Executions"]

logger = logging.getLogger(__name__)

EXECUTION_ATTEMPTS: Final = 3
"""How often an execution that crashed on a bug of ours is taken up again before the operation is ended."""


class Executions:
    """Runs operations, each in a task of the caller's.

    Args:
        ports: what executors act through.
        announcer: is told while an operation is executed here.
        reconciler: leaves the groups of a running operation to it.
    """

    def __init__(self, ports: ExecutorPorts, announcer: Announcer, reconciler: Reconciler) -> None:
        self._ports = ports
        self._announcer = announcer
        self._reconciler = reconciler
        self._executors: dict[OperationId, Executor] = {}
        self._reviving: dict[OperationId, asyncio.Event] = {}

    async def run(self, operation_id: OperationId, *, is_recovery: bool) -> None:
        """Supervise one operation to its end: a bug in its execution ends neither the process nor, silently, it."""
        self._announcer.begin(operation_id)
        try:
            await self._run_bounded(operation_id, is_recovery=is_recovery)
        finally:
            self._announcer.end(operation_id)
            self._revived(operation_id)
        self._reconciler.look_again()

    def expect(self, operation_id: OperationId) -> None:
        """An unfinished operation is about to be taken up again; `wait_revived` waits for it."""
        self._reviving[operation_id] = asyncio.Event()

    async def wait_revived(self) -> None:
        """Wait until each operation that was expected has its restarted engines where it found them, or has ended."""
        for each in tuple(self._reviving.values()):
            await each.wait()

    def wake(self) -> None:
        """Make all of them look at who is connected."""
        for executor in self._executors.values():
            executor.wake()

    def cancel(self, operation_id: OperationId) -> None:
        """Tell one that a cancel was journalled; nothing when it is not executed here."""
        executor = self._executors.get(operation_id)
        if executor is not None:
            executor.cancel()

    def drop_superseded(self, accepted: OperationRecord) -> None:
        """Executors whose operation the new one ended look at the journal and leave (AD-18)."""
        ids = set(accepted.spec.participant_ids)
        for other, executor in self._executors.items():
            if other != accepted.operation_id and not ids.isdisjoint(executor.participant_ids):
                executor.cancel()
                self._announcer.announce(other)

    def _revived(self, operation_id: OperationId) -> None:
        """An unfinished operation has its restarted engines where it found them; listeners need not wait for more."""
        reviving = self._reviving.pop(operation_id, None)
        if reviving is not None:
            reviving.set()

    async def _run_bounded(self, operation_id: OperationId, *, is_recovery: bool) -> None:
        for attempt in range(EXECUTION_ATTEMPTS):
            record = await self._ports.journal.load(operation_id)
            if record is None or record.moves.state.is_terminal:
                break
            executor = Executor(
                self._ports,
                record,
                is_recovery=is_recovery or attempt > 0,
                on_revived=lambda: self._revived(operation_id),
            )
            self._executors[operation_id] = executor
            groups = [g.group_id for g in record.spec.groups]
            self._reconciler.touch(groups)
            try:
                await self._reconciler.quiet(groups)
                await executor.run()
            except Unavailable as exc:
                if exc.reason == "LEASE_LOST":
                    raise
                logger.exception("operation.crashed op_id=%s", operation_id)
            except Exception:
                logger.exception("operation.crashed op_id=%s", operation_id)
            else:
                break
            finally:
                self._executors.pop(operation_id, None)
                self._reconciler.touch(groups)
        else:
            await self._give_up(operation_id)

    async def _give_up(self, operation_id: OperationId) -> None:
        """End an operation that we cannot execute, closed: all its groups are quarantined."""
        error = AdminError(code=AdminErrorCode.INTERNAL, message="the server failed to execute it")
        now = self._ports.clock.unix_nanos()
        await self._ports.journal.advance(
            operation_id,
            lambda snapshot, record: (
                None
                if record.moves.state.is_terminal
                else ended_badly(
                    snapshot,
                    record,
                    error,
                    Leftover(
                        quarantine={g.group_id: "an operation crashed" for g in record.spec.groups},
                        changed=True,
                    ),
                    now_unix_nanos=now,
                )
            ),
        )
        await self._ports.regate()
