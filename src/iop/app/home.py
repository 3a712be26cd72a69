"""The state directory and the files in it that programs may read: ``run.json`` and ``engine.json``."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from iop.core.errors import InvalidRequest

__all__ = ["ENGINE_FILE", "RUN_FILE", "RunFile", "open_home", "read_run_file", "state_dir", "write_private"]

RUN_FILE: Final = "run.json"
ENGINE_FILE: Final = "engine.json"
VERSION: Final = 1


def state_dir(environment: Mapping[str, str]) -> Path:
    """``$IOP_HOME``, else ``$XDG_STATE_HOME/iop``, else ``~/.local/state/iop``."""
    if home := environment.get("IOP_HOME"):
        return Path(home).expanduser().absolute()
    if base := environment.get("XDG_STATE_HOME"):
        return Path(base) / "iop"
    return Path(environment.get("HOME") or "~").expanduser() / ".local" / "state" / "iop"


def open_home(environment: Mapping[str, str]) -> Path:
    """The state directory, made if need be, for this user only.

    Raises:
        InvalidRequest: it cannot be made, or not be written.
    """
    home = state_dir(environment)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InvalidRequest(
            f"The state directory {home} cannot be used ({error.strerror})."
            " Set IOP_HOME to a directory that you may write.",
            reason="HOME_UNUSABLE",
        ) from None
    return home


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read, whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """What runs here: addresses, process ids and development tokens.

    ``addresses`` has the listeners by name (those that are off are absent), ``engine`` those of the reference engine
    that ``iop up`` started, and ``tokens`` the secrets by role; they are not in its ``repr``.
    """

    addresses: Mapping[str, str]
    pids: Mapping[str, int]
    engine: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_json(self, *, with_tokens: bool) -> str:
        """The promised shape; without tokens for files that others may read."""
        shape: dict[str, Any] = {"version": VERSION, **self.addresses}
        if self.engine:
            shape["engine"] = dict(self.engine)
        shape["pids"] = dict(self.pids)
        if with_tokens:
            shape["tokens"] = dict(self.tokens)
        return json.dumps(shape, indent=2) + "\n"


def read_run_file(path: Path) -> RunFile | None:
    """What ``path`` says, or None when there is none, or none that can be read."""
    try:
        shape = json.loads(path.read_text(encoding="utf-8"))
        pids = {str(part): int(pid) for part, pid in shape["pids"].items()}
        tokens = {str(role): str(token) for role, token in shape.get("tokens", {}).items()}
        engine = {str(name): str(address) for name, address in shape.get("engine", {}).items()}
        addresses = {name: address for name, address in shape.items() if isinstance(address, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return RunFile(addresses=addresses, pids=pids, engine=engine, tokens=tokens)
