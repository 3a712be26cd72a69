"""What the journal stores, it gives back: decode of encode is identity, for every type that it stores."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iop.admin.desired import (
    OverrideRecord,
    PauseRecord,
    ProfileRecord,
    QuarantineRecord,
    ReleaseRecord,
    WeightRecord,
)
from iop.admin.journal import AuditEntry
from iop.admin.records import OperationMoves, OperationSpec, Phase, StepRecord
from iop.admin.requests import MutationRequest
from iop.admin.results import EventBody, OperationResult, ParticipantStatus
from iop.store.serial import dumps, loads

STORED: dict[str, Any] = {
    "pause": PauseRecord,
    "release": ReleaseRecord,
    "quarantine": QuarantineRecord,
    "weights": WeightRecord,
    "profile": ProfileRecord,
    "override": OverrideRecord,
    "audit": AuditEntry,
    "moves": OperationMoves,
    "phase": Phase,
    "spec": OperationSpec,
    "step": StepRecord,
    "request": MutationRequest,
    "event": EventBody,
    "result": OperationResult,
    "status": ParticipantStatus,
}


@pytest.mark.parametrize("name", STORED)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_stored_comes_back(name: str, data: st.DataObject) -> None:
    hint = STORED[name]
    value = data.draw(st.from_type(hint))
    assert loads(dumps(value, hint), hint) == value


@pytest.mark.parametrize("text", ["[]", "{}", "null", "3", '{"version": 1}', '["NoSuch", {}]'])
def test_a_stored_text_that_does_not_fit_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="stored"):
        loads(text, WeightRecord)
