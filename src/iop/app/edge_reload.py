"""The Edge's running config: what a changed file would change, and taking it whole or not at all (EN-114)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from iop.app.home import write_private
from iop.app.sources import gather
from iop.config import ConfigChange, ConfigInvalid, EdgeConfig, Loaded, changes_between, load_edge
from iop.core.errors import IopError

__all__ = ["ConfigKeeper", "ConfigPlan"]

_log = logging.getLogger(__name__)

_LIVE_LIMITS: Final = ("limits.first_byte_timeout_sec", "limits.total_timeout_sec")
_RESTART_KEYS: Final = (
    "listen.", "insecure", "tls.", "store", "wire.", "limits.", "admin.readback_sec", "dispatch.shutdown_grace_sec",
)  # fmt: skip
"""Keys that listeners and the operation core read when they are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigPlan:
    """A valid config beside the running one.

    Attributes:
        loaded: what would run.
        changes: how it differs.
        needs_restart: those of the changed keys that take effect only at the next start.
    """

    loaded: Loaded[EdgeConfig]
    changes: tuple[ConfigChange, ...]
    needs_restart: tuple[str, ...]


class ConfigKeeper:
    """Knows the file, the flags and what runs of them.

    Args:
        file: edge.yaml.
        flags: by dotted key; they stand above the file at every reload too.

    Raises:
        ConfigInvalid: the file is wrong; with every problem.
    """

    def __init__(self, file: Path, *, flags: Mapping[str, tuple[str, str]]) -> None:
        self._file = file
        self._flags = flags
        self.loaded = load_edge(gather(file, flags=flags))
        self.revision = 1
        self._take: Callable[[EdgeConfig, int], None] | None = None

    def attach(self, take: Callable[[EdgeConfig, int], None]) -> None:
        """Say who makes a config with its revision the running one; it may refuse with IopError."""
        self._take = take

    def plan(self, text: str | None = None, *, name: str = "") -> ConfigPlan:
        """What ``text``, or the file as it is now, would change.

        Args:
            text: the proposed content of the file.
            name: how its author calls it: where problems are said to be.

        Raises:
            ConfigInvalid: it is wrong; with every problem.
        """
        sources = gather(self._file, flags=self._flags)
        if text is not None:
            sources = dataclasses.replace(sources, text=text)
        try:
            loaded = load_edge(sources)
        except ConfigInvalid:
            if text is not None and name:
                load_edge(dataclasses.replace(sources, file=name))
            raise
        changes = tuple(changes_between(self.loaded.config, loaded.config))
        restart = tuple(
            change.key
            for change in changes
            if change.key.startswith(_RESTART_KEYS) and change.key not in _LIVE_LIMITS
        )
        return ConfigPlan(loaded=loaded, changes=changes, needs_restart=restart)

    def take(self, plan: ConfigPlan) -> int:
        """Make a planned config the running one; returns its revision. Nothing changed: the running revision.

        Raises:
            IopError: it cannot be taken; the running one stays whole.
        """
        if plan.changes:
            assert self._take is not None, "attach comes first"
            self._take(plan.loaded.config, self.revision + 1)
            self.revision += 1
        self.loaded = plan.loaded
        for warning in plan.loaded.warnings:
            _log.warning("config.warned", extra={"reason": warning})
        if plan.needs_restart:
            _log.warning("config.needs_restart", extra={"keys": ", ".join(plan.needs_restart)})
        return self.revision

    def persist(self, text: str) -> str:
        """Write an applied config over the file, so that the next start has it too; returns why not, or nothing."""
        try:
            if self._file.read_text(encoding="utf-8") != text:
                write_private(self._file, text)
        except OSError as error:
            return error.strerror or "it cannot be written"
        return ""

    def reload(self) -> None:
        """Take the file as it is now, or keep the running config and say why (SIGHUP)."""
        try:
            self.take(self.plan())
        except IopError as error:
            _log.error("config.refused", extra={"reason": error.message})
