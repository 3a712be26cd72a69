"""What both sides' streams share; see ``stream_edge`` and ``stream_node``.

A stream is one run, tunnel, artifact fetch or admin step's payload on a connection. Each side's is a lane of the
scheduler. Frames are cut and numbered only when they are pulled, so that small pieces of one turn share a frame and
a cancel can still drop what is unsent.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import Final

from iop.core.limits import KIB
from iop.wire.messages import (
    AdminStep,
    AdminStepEvent,
    AdminStepResult,
)

SMALLEST_CUT_BYTES: Final = 1 * KIB
"""A body is not cut smaller than this just to fill what is left of a write; smaller cuts cost a frame each."""

WINDOW_BYTES_MIN: Final = 4 * KIB
"""Smallest window: below it every chunk waits for its own grant."""


@unique
class StreamKind(Enum):
    """What a stream carries."""

    TUNNEL = "tunnel"
    RUN = "run"
    ARTIFACT = "artifact"
    STEP = "step"


def step_key(step: AdminStep | AdminStepEvent | AdminStepResult) -> str:
    """Stream id of an admin step: one operation sends the same step to several groups of a Node."""
    return f"{step.operation_id}/{step.step}/{step.adapter}/{step.group_id}"
