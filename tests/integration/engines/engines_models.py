"""What the scripted models say, and where a real engine is."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER = "The sea is wide and the sky is blue today."
OTHER_ANSWER = "A hill stands green above the quiet old town."


@dataclass(frozen=True)
class Engine:
    """A server that runs."""

    endpoint: str
    model: str
