"""What is wrong with a config, all of it at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique

from iop.core.errors import InvalidRequest

__all__ = ["ConfigInvalid", "Origin", "OriginKind", "Problem"]


@unique
class OriginKind(Enum):
    """The layers of a config, lowest first."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value came from: ``edge.yaml:12``, ``IOP_LISTEN__HTTP`` or ``--http``."""

    kind: OriginKind
    where: str

    def __str__(self) -> str:
        return "default" if self.kind is OriginKind.DEFAULT else f"{self.kind.value} {self.where}"


DEFAULT_ORIGIN = Origin(kind=OriginKind.DEFAULT, where="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to mend: where it stands, which key, what is wrong and what to write instead."""

    where: str
    key: str
    message: str
    fix: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        return f"{self.where}: {key}{self.message}. {self.fix}."


class ConfigInvalid(InvalidRequest):
    """A config that is refused whole (EN-114). ``problems`` has everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        super().__init__(
            f"{count} problem{'s' if count != 1 else ''} in the config:\n"
            + "\n".join(f"  {problem}" for problem in self.problems),
            reason="CONFIG_INVALID",
        )
