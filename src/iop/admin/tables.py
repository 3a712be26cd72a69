"""The tables of the operation core as Markdown, for the documentation (AD-48). Pure.

`python -m iop.admin.tables` prints both; a test holds `docs/explanation/operations.md` against them.
"""

from __future__ import annotations

import sys

from iop.admin.enums import AdminOperationKind, AdminOperationState, ParticipantState
from iop.admin.states import LEGALITY, NEXT, Legality

__all__ = ["legality_table", "state_diagram"]

_WORDS = {
    Legality.LEGAL: "yes",
    Legality.LEGAL_WITH_PAUSE: "with its own pause, else `NOT_PAUSED`",
    Legality.STALE_EPOCH: "`STALE_EPOCH`",
    Legality.RESOURCES_RELEASED: "`RESOURCES_RELEASED`",
    Legality.SKIPPED: "skipped; named: `PARTICIPANT_OFFLINE`",
}


def state_diagram() -> str:
    """The operation's life as a Mermaid diagram."""
    lines = ["stateDiagram-v2", "    [*] --> PENDING: accepted"]
    lines += [f"    {start.name} --> {to.name}: {event.value}" for (start, event), to in NEXT.items()]
    lines += [f"    {state.name} --> [*]" for state in AdminOperationState if state.is_terminal]
    return "\n".join(lines)


def legality_table() -> str:
    """What is legal in which participant state; one answer per pair."""
    states = list(ParticipantState)
    lines = ["| operation | " + " | ".join(s.name for s in states) + " |"]
    lines.append("|---" * (len(states) + 1) + "|")
    for kind in AdminOperationKind:
        answers = [_WORDS[LEGALITY[state, kind]] for state in states]
        lines.append(f"| {kind.name} | " + " | ".join(answers) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"```mermaid\n{state_diagram()}\n```\n\n{legality_table()}\n")
