"""The revision: one journalled counter, and compare-and-swap on it (AD-13). Pure."""

from __future__ import annotations

import dataclasses

from iop.admin.desired import Desired
from iop.admin.requests import MutationOptions
from iop.core.errors import Conflict

__all__ = ["check_revision", "risen"]


def check_revision(options: MutationOptions, *, current: int, has_running: bool) -> None:
    """Compare a caller's expected revision with the current one.

    Raises:
        Conflict: REVISION_MISMATCH, naming the current one; REVISION_PENDING while an operation is unfinished, since
            the revision that the caller saw may be about to change.
    """
    expected = options.expected_revision
    if expected is None:
        return
    if expected != current:
        raise Conflict(
            f"the revision is {current}, not {expected}",
            reason="REVISION_MISMATCH",
            details={"current_revision": str(current), "expected_revision": str(expected)},
        )
    if has_running:
        raise Conflict(
            "an operation that may change the revision is unfinished",
            reason="REVISION_PENDING",
            details={"current_revision": str(current)},
        )


def risen(desired: Desired) -> Desired:
    """The desired state one revision later."""
    return dataclasses.replace(desired, revision=desired.revision + 1)
