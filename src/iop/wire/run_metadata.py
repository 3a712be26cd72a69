"""Keys of a run's metadata that IOP itself sets; what else is in it is the caller's and travels untouched (EN-44).

They are plain text in a map that both sides have had from the beginning, so that an older Node ignores them.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "IGNORED",
    "OPENENGINE_REQUEST",
    "PRIORITY",
    "REFUSAL",
    "REQUEST_ID",
    "SCORED_DELTAS",
    "TARGET_RANK",
    "VIA",
]

OPENENGINE_REQUEST: Final = "iop-openengine-request"
"""Set to ``1``: the input is a serialised ``openengine.v1.GenerateRequest``, and the deltas are serialised
``GenerateResponse`` messages, each in base64 and followed by a newline. Nothing that two OpenEngine servers can tell
each other is lost on the way through an Edge and a Node, and all of it counts against the stream's credit (EN-102).
"""

SCORED_DELTAS: Final = "iop-scored-deltas"
"""Set to ``1`` by an Edge that reads scores, where its caller may want some; on START by a Node whose deltas then are
lines of :mod:`iop.wire.scored_deltas`. Without it a body that asks for scores is refused, as it always was.
"""

IGNORED: Final = "iop-ignored"
"""On START: hints of the caller that an Edge behind this one did not follow, as it names them (SF-16, SF-24)."""

REFUSAL: Final = "iop-refusal-"
"""Beginning of what an ERROR before acceptance tells of an OpenEngine server's refusal of its caller's request:
``reason``, and of the details ``field`` and ``feature``, as in its ``ErrorInfo``.
"""

REQUEST_ID: Final = "iop-request-id"
"""The request id that the caller knows; the run id is new for each attempt (EN-118)."""

PRIORITY: Final = "iop-priority"
"""The priority that the caller gave, in OpenEngine's order: higher first."""

TARGET_RANK: Final = "iop-target-dp-rank"
"""The data-parallel rank of the engine that shall serve the run, in decimal (SF-21). Only a provider whose Node told
that it has this rank gets it."""

VIA: Final = "iop-via"
"""The Edges that the request has come through, this one last."""
