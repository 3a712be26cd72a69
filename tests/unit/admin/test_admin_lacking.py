"""A refusal says who does not offer what is asked for, and how to enable it (AD-15)."""

from __future__ import annotations

import pytest

from iop.admin.capability import HINT_CHARS_MAX, HINTS_MAX, capability_refusals
from iop.admin.enums import AdminOperationKind, AdmissionPolicy, BusyPolicy, CacheKind, PauseMode
from iop.admin.profile import Capabilities, Lacking, ParticipantInfo
from iop.admin.requests import (
    AllTargets,
    FlushCachesRequest,
    MutationOptions,
    MutationRequest,
    PauseRequest,
    PauseSpec,
)
from iop.core.ids import GroupId, ParticipantId

Op = AdminOperationKind
OPTIONS = MutationOptions(idempotency_key="k")
FLUSH = FlushCachesRequest(
    options=OPTIONS, target=AllTargets(), kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL
)
KEEP = PauseRequest(
    options=OPTIONS,
    target=AllTargets(),
    pause=PauseSpec(mode=PauseMode.KEEP, admission=AdmissionPolicy.QUEUE),
)
ABLE = Capabilities(
    operations=frozenset({Op.FLUSH_CACHES, Op.PAUSE}),
    pause_modes=frozenset({PauseMode.DRAIN}),
    cache_kinds=frozenset({CacheKind.PREFIX}),
    busy_policies=frozenset({BusyPolicy.FAIL}),
)


def participant(name: str, *lacking: Lacking, capabilities: Capabilities | None = None) -> ParticipantInfo:
    return ParticipantInfo(
        participant_id=ParticipantId(name),
        group_id=GroupId(name),
        capabilities=capabilities or Capabilities(),
        lacking=lacking,
    )


def told(request: MutationRequest, *chosen: ParticipantInfo) -> tuple[str, str]:
    refusal = next(capability_refusals(request, chosen))
    assert refusal.reason == "UNSUPPORTED_BY_PARTICIPANT"
    return refusal.message, refusal.details.get("how", "")


@pytest.mark.clause("AD-15")
def test_only_those_who_lack_it_say_how_and_the_same_words_once() -> None:
    how = Lacking(operation=Op.FLUSH_CACHES, how="start it\nwith --slots")
    other = Lacking(operation=Op.PAUSE, how="never mind")
    able = participant("c", Lacking(operation=Op.FLUSH_CACHES, how="not asked"), capabilities=ABLE)
    message, words = told(FLUSH, participant("a", how, other), participant("b", how), able)
    assert words == "start it with --slots"
    assert message == "operation FLUSH_CACHES is not offered by a, b (start it with --slots)"


@pytest.mark.clause("AD-15")
def test_a_part_of_what_is_offered_says_how_too() -> None:
    message, words = told(
        KEEP, participant("a", Lacking(operation=Op.PAUSE, how="it cannot freeze"), capabilities=ABLE)
    )
    assert "pause mode KEEP" in message
    assert words == "it cannot freeze"


@pytest.mark.clause("AD-15")
def test_without_words_the_refusal_is_as_short_as_ever() -> None:
    assert told(FLUSH, participant("a")) == ("operation FLUSH_CACHES is not offered by a", "")


@pytest.mark.clause("AD-15")
def test_many_words_of_many_are_cut() -> None:
    many = [
        participant(f"p{n}", Lacking(operation=Op.FLUSH_CACHES, how=f"{n} " + "x" * 2 * HINT_CHARS_MAX))
        for n in range(2 * HINTS_MAX)
    ]
    _, words = told(FLUSH, *many)
    assert len(words.split("; ")) == HINTS_MAX
    assert all(len(each) == HINT_CHARS_MAX for each in words.split("; "))
