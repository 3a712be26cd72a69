"""What a check is and what comes of it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, unique
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from iop.conformance.bench import Bench

__all__ = [
    "Check",
    "CheckFailed",
    "CheckNotRun",
    "CheckResult",
    "CheckSkipped",
    "Outcome",
    "Report",
    "check",
    "require",
]

CHECK_TIMEOUT_S: Final = 30.0
"""Bound of one check, unless it says otherwise."""

EXIT_FULL_PASS: Final = 0
EXIT_FAILED: Final = 1
EXIT_NOT_FULL: Final = 6

_ID: Final = re.compile(r"AD-\d{2,3}-[a-z0-9-]+")


@unique
class Outcome(StrEnum):
    """What came of one check."""

    PASS = "PASS"  # noqa: S105 - an outcome, no password
    FAIL = "FAIL"
    SKIP = "SKIP"
    """The server's profile does not offer what the check is about."""
    NOT_RUN = "NOT RUN"
    """The caller did not give what the check needs: a hook, a second credential, a checkpoint."""


class CheckFailed(Exception):
    """The server broke the contract: what was seen, and what the contract wants."""

    def __init__(self, *, saw: str, wants: str) -> None:
        super().__init__(f"saw {saw}; the contract wants {wants}")
        self.saw = saw
        self.wants = wants


class CheckSkipped(Exception):
    """The profile does not offer it."""


class CheckNotRun(Exception):
    """The caller did not give what it needs."""


CheckBody: TypeAlias = "Callable[[Bench], Awaitable[None]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        check_id: stable: reports of different releases can be compared by it.
        clauses: what of the contract it rests on.
        meaning: one line for people.
        timeout_s: beyond it the check fails.
    """

    check_id: str
    clauses: tuple[str, ...]
    meaning: str
    run: CheckBody
    timeout_s: float


def check(
    check_id: str, *, clauses: Sequence[str] = (), timeout_s: float = CHECK_TIMEOUT_S
) -> Callable[[CheckBody], Check]:
    """Make a check of an async function; the first line of its docstring is the meaning.

    Args:
        check_id: `AD-NN-name`; the clause in it always counts.
        clauses: further clauses.
        timeout_s: bound of the whole check.
    """
    assert _ID.fullmatch(check_id), check_id
    own = "-".join(check_id.split("-")[:2])

    def make(body: CheckBody) -> Check:
        meaning = (body.__doc__ or "").strip().splitlines()[0].rstrip(".")
        return Check(
            check_id=check_id,
            clauses=tuple(dict.fromkeys((own, *clauses))),
            meaning=meaning,
            run=body,
            timeout_s=timeout_s,
        )

    return make


def require(holds: object, *, saw: str, wants: str) -> None:
    """Fail the check unless something holds.

    Raises:
        CheckFailed: it does not.
    """
    if not holds:
        raise CheckFailed(saw=saw, wants=wants)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One row of the report; `detail` says why, wherever the outcome is not PASS."""

    check_id: str
    clauses: tuple[str, ...]
    meaning: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run."""

    target: str
    server: str
    results: tuple[CheckResult, ...] = field(default=())

    def count(self, outcome: Outcome) -> int:
        """How many checks ended so."""
        return sum(result.outcome is outcome for result in self.results)

    @property
    def is_full_pass(self) -> bool:
        """Nothing failed, and nothing was left out for want of a hook; what the profile excludes does not count."""
        return bool(self.results) and not self.count(Outcome.FAIL) and not self.count(Outcome.NOT_RUN)

    @property
    def exit_code(self) -> int:
        """0 for a full pass, 1 when something failed, 6 when nothing failed and something was not run."""
        if self.is_full_pass:
            return EXIT_FULL_PASS
        return EXIT_FAILED if self.count(Outcome.FAIL) or not self.results else EXIT_NOT_FULL
