"""What an answer consists of, whatever dialect says it: the neutral form that readers make and writers take.

A whole answer is the same list of events as a streamed one, which is why both convert to the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import TypeAlias

from iop.api.http.convert.scores import Score

__all__ = [
    "Begin",
    "Counted",
    "Event",
    "Failure",
    "Finish",
    "Reasoning",
    "Stop",
    "Text",
    "ToolArguments",
    "ToolBegin",
]


@unique
class Stop(Enum):
    """Why an answer ended."""

    END = "end"
    LENGTH = "length"
    TOOLS = "tools"
    SEQUENCE = "sequence"
    FILTER = "filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The provider began to answer; ``model`` is its own name for what answers."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """More text; a refusal's text is told apart where the target can. ``scores`` are those of its tokens."""

    text: str
    is_refusal: bool = False
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolBegin:
    """A tool call begins. ``slot`` tells the calls of one answer apart and says nothing about order."""

    slot: int
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolArguments:
    """More of a call's arguments, as JSON text."""

    slot: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The provider gave its finish reason, and the stop sequence where it names one."""

    stop: Stop
    sequence: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Tokens; ``prompt`` holds the cached ones too. Later counts replace earlier ones and are never summed."""

    prompt: int = 0
    answer: int = 0
    cached: int = 0
    written: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The provider failed inside its answer. ``code`` is stable, ``kind`` the type that it was told with."""

    message: str
    code: str | None = None
    kind: str | None = None


Event: TypeAlias = Begin | Text | Reasoning | ToolBegin | ToolArguments | Finish | Counted | Failure
