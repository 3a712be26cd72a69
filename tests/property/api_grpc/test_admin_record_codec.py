"""Records survive the wire: decode after encode is identity, for every request and every answer."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iop.admin.codec import LOCAL_FIELDS, RecordCodec
from iop.admin.enums import EngineRole, ReconfigurableField
from iop.admin.profile import AdminProfile
from iop.admin.requests import (
    FlushCachesRequest,
    ListOperationsRequest,
    PauseRequest,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    ServingChange,
    StartProfileRequest,
    StopProfileRequest,
    UpdateWeightsRequest,
)
from iop.admin.results import AdminOperation, AdminOperationEvent, CancelResult, OperationPage
from iop.core.errors import InvalidRequest, RemoteProtocolError
from iop.pb.openengine.v1 import admin_pb2

PAIRS: list[tuple[type, type]] = [
    (FlushCachesRequest, admin_pb2.FlushCachesRequest),
    (PauseRequest, admin_pb2.PauseRequest),
    (ResumeRequest, admin_pb2.ResumeRequest),
    (ReleaseResourcesRequest, admin_pb2.ReleaseResourcesRequest),
    (RestoreResourcesRequest, admin_pb2.RestoreResourcesRequest),
    (UpdateWeightsRequest, admin_pb2.UpdateWeightsRequest),
    (StartProfileRequest, admin_pb2.StartProfileRequest),
    (StopProfileRequest, admin_pb2.StopProfileRequest),
    (ReconfigureServingRequest, admin_pb2.ReconfigureServingRequest),
    (ListOperationsRequest, admin_pb2.ListAdminOperationsRequest),
    (AdminOperation, admin_pb2.AdminOperation),
    (AdminOperationEvent, admin_pb2.AdminOperationEvent),
    (CancelResult, admin_pb2.CancelAdminOperationResponse),
    (OperationPage, admin_pb2.ListAdminOperationsResponse),
    (AdminProfile, admin_pb2.AdminProfile),
]

UINT32 = st.integers(0, 2**32 - 1)
WORDS = st.text(st.characters(codec="utf-8"), max_size=8)


def serving_changes() -> st.SearchStrategy[ServingChange]:
    def build(field: ReconfigurableField, value: object) -> ServingChange:
        return ServingChange(field=field, value=typing.cast("Any", value))

    return st.one_of(
        *(
            st.builds(build, st.just(field), UINT32)
            for field in (
                ReconfigurableField.CAPACITY,
                ReconfigurableField.LONG_CONTEXT_CAPACITY,
                ReconfigurableField.DATA_PARALLEL_SIZE,
            )
        ),
        st.builds(build, st.just(ReconfigurableField.ENABLED), st.booleans()),
        st.builds(build, st.just(ReconfigurableField.ROLE), st.sampled_from(EngineRole)),
        st.builds(build, st.just(ReconfigurableField.SERVED_ALIASES), st.lists(WORDS).map(tuple)),
    )


def of_hint(hint: Any) -> st.SearchStrategy[Any]:
    origin = typing.get_origin(hint)
    if origin in {types.UnionType, typing.Union}:
        # An optional that the wire cannot tell from its zero value is never that zero value with us.
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        options = [of_hint(member).filter(lambda value: value != "") for member in members]
        return st.one_of(*([st.none()] if len(members) < len(typing.get_args(hint)) else []), *options)
    if origin is tuple:
        return st.lists(of_hint(typing.get_args(hint)[0]), max_size=2).map(tuple)
    if origin is frozenset:
        return st.frozensets(of_hint(typing.get_args(hint)[0]), max_size=3)
    if isinstance(hint, typing.NewType):
        return of_hint(hint.__supertype__)
    if hint is ServingChange:
        return serving_changes()
    if dataclasses.is_dataclass(hint):
        return of_record(typing.cast("type", hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    return {int: UINT32, bool: st.booleans(), str: WORDS, bytes: st.binary(max_size=8)}[hint]


def of_record(record_type: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(record_type)
    local = LOCAL_FIELDS.get(record_type, frozenset())
    return st.builds(
        record_type,
        **{
            field.name: of_hint(hints[field.name])
            for field in dataclasses.fields(typing.cast("Any", record_type))
            if field.name not in local
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize(("record_type", "message_type"), PAIRS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_decode_after_encode_is_identity(record_type: type, message_type: type, data: st.DataObject) -> None:
    record = data.draw(of_record(record_type))
    wire = RecordCodec().encode(record, message_type()).SerializeToString()
    assert RecordCodec().decode(message_type.FromString(wire), record_type) == record  # type: ignore[attr-defined]


@pytest.mark.clause("AD-10")
@pytest.mark.parametrize(
    ("message", "record_type", "field", "reason"),
    [
        (admin_pb2.PauseRequest(), PauseRequest, "target", "EMPTY_SELECTOR"),
        (
            admin_pb2.PauseRequest(target=admin_pb2.TargetSelector(all=admin_pb2.AllTargets())),
            PauseRequest,
            "pause.mode",
            "UNSPECIFIED_ENUM",
        ),
        (admin_pb2.UpdateWeightsRequest(), UpdateWeightsRequest, "source", "EMPTY_SELECTOR"),
        (
            admin_pb2.ReconfigureServingRequest(
                target=admin_pb2.TargetSelector(all=admin_pb2.AllTargets()),
                changes=[admin_pb2.ServingChange()],
            ),
            ReconfigureServingRequest,
            "changes[0].change",
            "EMPTY_SELECTOR",
        ),
        (
            admin_pb2.ReconfigureServingRequest(
                target=admin_pb2.TargetSelector(all=admin_pb2.AllTargets()),
                changes=[admin_pb2.ServingChange(role=typing.cast("Any", 77))],
            ),
            ReconfigureServingRequest,
            "changes[0].role",
            "UNKNOWN_ENUM",
        ),
        (
            admin_pb2.RestoreResourcesRequest(kinds=typing.cast("Any", [1, 99])),
            RestoreResourcesRequest,
            "kinds",
            "UNKNOWN_ENUM",
        ),
    ],
)
def test_what_is_not_said_or_not_known_is_refused_by_field(
    message: Any, record_type: type, field: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RecordCodec().decode(message, record_type)
    assert caught.value.reason == reason
    assert caught.value.details == {"field": field}
    assert f"`{field}`" in caught.value.message


def test_a_lenient_reader_skips_what_a_newer_server_added_to_a_list() -> None:
    answer = admin_pb2.AdminProfile(operations=typing.cast("Any", [2, 55]), limits=admin_pb2.AdminLimits())
    lenient = RecordCodec(error=RemoteProtocolError, is_lenient=True)
    assert {kind.name for kind in lenient.decode(answer, AdminProfile).capabilities.operations} == {"PAUSE"}
    with pytest.raises(RemoteProtocolError):
        RecordCodec(error=RemoteProtocolError).decode(answer, AdminProfile)


def test_encoding_a_field_that_the_message_lacks_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="has no field"):
        RecordCodec().encode(ListOperationsRequest(page_size=1), admin_pb2.AllTargets())
