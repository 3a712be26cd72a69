"""Directories that agents work in: one per run or per session, private, and gone when they are over (EN-42,
EN-70).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from iop.core.errors import Conflict, InvalidRequest, Overloaded, Unavailable

_log = logging.getLogger(__name__)

SESSIONS_MAX: Final = 1000
"""Sessions whose directory is kept. The one unused for longest makes place; all in use is a refusal."""


@dataclass(slots=True)
class Workspace:
    """One directory.

    Attributes:
        session_id: empty for a run's own, which goes with the run.
        is_fresh: nothing ran in it before.
    """

    path: Path
    session_id: str
    is_fresh: bool = True
    is_busy: bool = False


class Workspaces:
    """Hands out directories; two runs never have one at the same time."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Workspace] = OrderedDict()

    async def take(self, *, root: str, run_id: str, session_id: str) -> Workspace:
        """A directory with mode 0700 for one run, the session's own when there is a session.

        Args:
            root: the configured working directory; each run or session gets a directory of its own below it,
                so that two
                of them never meet. Empty: the system's temporary directory.
            run_id: names the directory of a run without a session.
            session_id: names the directory that is used again.

        Raises:
            Conflict: another run of the session is under way.
            Overloaded: too many sessions are in use.
            Unavailable: the directory cannot be made.
            InvalidRequest: the root is not an absolute path.
        """
        if root and not Path(root).is_absolute():
            raise InvalidRequest("workspace: must be an absolute path", reason="BAD_WORKSPACE")
        if session_id:
            return await self._take_session(root, session_id)
        path = await self._make(root, "run-" + _name(run_id))
        return Workspace(path=path, session_id="", is_busy=True)

    async def give_back(self, workspace: Workspace) -> None:
        """The run is over: a session's directory stays for the next one, a run's own is removed.
        Idempotent.
        """
        workspace.is_busy = False
        workspace.is_fresh = False
        if not workspace.session_id or self._sessions.get(workspace.session_id) is not workspace:
            await _remove(workspace.path)

    async def end_session(self, session_id: str) -> None:
        """Remove a session's directory, at once or when its run is over. Unknown: no-op."""
        workspace = self._sessions.pop(session_id, None)
        if workspace is not None and not workspace.is_busy:
            await _remove(workspace.path)

    async def aclose(self) -> None:
        """Remove every session's directory."""
        for session_id in tuple(self._sessions):
            await self.end_session(session_id)

    async def _take_session(self, root: str, session_id: str) -> Workspace:
        known = self._sessions.get(session_id)
        if known is not None:
            if known.is_busy:
                raise Conflict("another run of this session is under way", reason="SESSION_BUSY")
            known.is_busy = True
            self._sessions.move_to_end(session_id)
            return known
        if len(self._sessions) >= SESSIONS_MAX:
            idle = next((each for each in self._sessions.values() if not each.is_busy), None)
            if idle is None:
                raise Overloaded("too many sessions are in use", reason="SESSIONS_FULL")
            await self.end_session(idle.session_id)
        # Taken before the directory exists, so that a second run of the session cannot slip in between.
        workspace = Workspace(path=Path(), session_id=session_id, is_busy=True)
        self._sessions[session_id] = workspace
        try:
            workspace.path = await self._make(root, "session-" + _name(session_id))
        except BaseException:
            self._sessions.pop(session_id, None)
            raise
        return workspace

    @staticmethod
    async def _make(root: str, name: str) -> Path:
        try:
            return await asyncio.to_thread(_make_directory, root, name)
        except OSError as exc:
            raise Unavailable("the agent's workspace cannot be made", reason="NO_WORKSPACE") from exc


def _make_directory(root: str, name: str) -> Path:
    if root:
        Path(root).mkdir(parents=True, exist_ok=True)
    # mkdtemp makes it private and new: what an earlier process left under a like name is not met again.
    return Path(tempfile.mkdtemp(prefix=f"iop-{name}-", dir=root or None))


def _name(text: str) -> str:
    """A file name that no id can bend."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


async def _remove(path: Path) -> None:
    def remove() -> None:
        shutil.rmtree(path, ignore_errors=True)

    if path.name:
        await asyncio.to_thread(remove)
        _log.debug("workspace.removed")
