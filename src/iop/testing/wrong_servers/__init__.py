"""Servers with one defect each: what the conformance suite must find, and call by its name (AD-102).

Each starts from the right server of `iop.testing.conformance_site` and spoils one thing.
"""

from __future__ import annotations

from iop.testing.wrong_servers import (
    access,
    keys,
    lapses,
    outcomes,
    requests,
    restarts,
    serving,
    state,
    streams,
)
from iop.testing.wrong_servers.defect import Defect

__all__ = ["DEFECTS", "Defect"]

DEFECTS: tuple[Defect, ...] = (
    *streams.DEFECTS,
    *keys.DEFECTS,
    *requests.DEFECTS,
    *state.DEFECTS,
    *outcomes.DEFECTS,
    *access.DEFECTS,
    *restarts.DEFECTS,
    *lapses.DEFECTS,
    *serving.DEFECTS,
)
