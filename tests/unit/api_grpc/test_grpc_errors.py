"""Errors as statuses: every family has one, and what is told fits into headers."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from iop.api.grpc.errors import METADATA_BYTES_MAX, bounded, failure_of, shorten
from iop.core.errors import STATUS_BY_CODE, Conflict, ErrorCode, Overloaded
from iop.pb.openengine.v1 import error_pb2


@pytest.mark.clause("AD-17", "SF-20")
@pytest.mark.parametrize("code", ErrorCode)
def test_every_family_has_a_grpc_status_and_an_engine_error_code(code: ErrorCode) -> None:
    row = STATUS_BY_CODE[code]
    assert grpc.StatusCode[row.grpc] is not grpc.StatusCode.OK
    assert error_pb2.ErrorCode.Value(f"ERROR_CODE_{row.engine}") != error_pb2.ERROR_CODE_UNSPECIFIED


@pytest.mark.clause("AD-17")
def test_reason_details_and_retry_delay_travel_in_the_status_details() -> None:
    error = Overloaded("too many", reason="too_many_operations", details={"limit": "16"}, retry_after_s=2.5)
    failure = failure_of(error)
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    ((key, data),) = failure.trailing_metadata
    assert key == "grpc-status-details-bin"
    status = status_pb2.Status.FromString(data)
    assert (status.code, status.message) == (8, "too many")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    status.details[0].Unpack(info)
    status.details[1].Unpack(retry)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "TOO_MANY_OPERATIONS",
        "openengine.v1",
        {"limit": "16"},
    )
    assert retry.retry_delay.ToMilliseconds() == 2500


@given(st.dictionaries(st.text(min_size=1, max_size=50), st.text(max_size=5000), max_size=8))
def test_details_never_outgrow_their_header_and_short_ones_stay_whole(details: dict[str, str]) -> None:
    kept = bounded(details)
    size = sum(len(key.encode()) + len(value.encode()) for key, value in kept.items())
    assert size <= METADATA_BYTES_MAX
    if sum(len(key.encode()) + len(value.encode()) for key, value in details.items()) <= METADATA_BYTES_MAX:
        assert kept == details


@pytest.mark.parametrize(("limit", "expected"), [(5, "abcde"), (4, "a..."), (3, "..."), (0, "")])
def test_shortening_keeps_to_its_limit(limit: int, expected: str) -> None:
    assert shorten("abcde", limit) == expected


def test_a_long_message_is_cut() -> None:
    assert len(failure_of(Conflict("x" * 5000)).message) == 1024
