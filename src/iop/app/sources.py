"""This process's own config sources: its files, its environment, its flags."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from iop.config import ConfigInvalid, Problem, Sources

__all__ = ["OsSecrets", "gather"]

SECRET_BYTES_MAX: Final = 64 * 1024
"""Longest secret file; a longer one is a wrong path."""


class OsSecrets:
    """Looks secrets up in real files and in an environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def read_file(self, path: Path) -> str:
        """The file's text. Raises OSError."""
        with path.open(encoding="utf-8") as file:
            return file.read(SECRET_BYTES_MAX)

    def read_variable(self, name: str) -> str | None:
        """The variable's value."""
        return self._environment.get(name)


def gather(
    file: Path | None,
    *,
    flags: Mapping[str, tuple[str, str]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Sources:
    """Sources with the file's text read.

    Args:
        file: the config file, or None for defaults.
        flags: by dotted key: the text and the flag's name.
        environment: the process's own by default.

    Raises:
        ConfigInvalid: the file cannot be read.
    """
    variables = os.environ if environment is None else environment
    secrets = OsSecrets(variables)
    if file is None:
        return Sources(secrets=secrets, environment=variables, flags=flags or {})
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        problem = Problem(
            where=str(file), key="", message=f"cannot be read: {reason}", fix="Give the path of a config file"
        )
        raise ConfigInvalid([problem]) from None
    return Sources(
        secrets=secrets,
        text=text,
        file=str(file),
        base_dir=file.parent,
        environment=variables,
        flags=flags or {},
    )
