"""Who a selector means (AD-19)."""

from __future__ import annotations

import pytest

from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.requests import AllTargets, ModelTargets, ParticipantTargets
from iop.admin.targets import check_participants, select
from iop.core.errors import NotFound, PreconditionFailed
from iop.core.ids import GroupId, ParticipantId


def member(participant, group, *, connected=True, models=("m",)):
    return ParticipantInfo(
        participant_id=ParticipantId(participant),
        group_id=GroupId(group),
        capabilities=Capabilities(),
        models=models,
        connected=connected,
    )


TOLD = [member("n1/a/0", "n1/a"), member("n1/a/1", "n1/a")]
UNTOLD = member("n2/b", "n2/b", connected=False, models=("m", "only-there"))
"""A configured provider that has not told its ranks since the server started."""


@pytest.mark.clause("AD-19")
def test_a_group_whose_members_nobody_told_yet_is_skipped_by_all_and_by_model():
    for target in (AllTargets(), ModelTargets(models=("m",))):
        chosen = select(target, [*TOLD, UNTOLD])
        assert [p.participant_id for p in chosen.chosen] == ["n1/a/0", "n1/a/1"]
        assert chosen.skipped == ("n2/b",)


@pytest.mark.clause("AD-19", "AD-15")
def test_a_model_that_only_such_a_group_serves_is_known_and_has_nobody_to_act():
    with pytest.raises(PreconditionFailed) as refused:
        check_participants(select(ModelTargets(models=("only-there",)), [*TOLD, UNTOLD]))
    assert refused.value.reason == "NO_PARTICIPANTS"


@pytest.mark.clause("AD-19")
@pytest.mark.parametrize("name", ["n2/b", "n2/b/0"])
def test_its_members_by_name_are_offline_and_not_unknown(name):
    with pytest.raises(PreconditionFailed) as refused:
        check_participants(select(ParticipantTargets(participant_ids=(name,)), [*TOLD, UNTOLD]))
    assert (refused.value.reason, refused.value.details["participants"]) == ("PARTICIPANT_OFFLINE", name)


@pytest.mark.clause("AD-19", "AD-15")
@pytest.mark.parametrize("name", ["n1/a/7", "n2/bee", "n2/", "n1/a", "n3/c/0"])
def test_what_no_group_can_have_stays_unknown(name):
    with pytest.raises(NotFound) as refused:
        select(ParticipantTargets(participant_ids=(name,)), [*TOLD, UNTOLD])
    assert (refused.value.reason, refused.value.details["participants"]) == ("PARTICIPANT_NOT_FOUND", name)
