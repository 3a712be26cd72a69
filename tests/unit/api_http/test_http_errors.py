"""Errors of the HTTP surfaces: envelopes, statuses, and the published catalogue."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import iop.api.http.openai as surface
from iop.api.http.errors import (
    STATUS_BY_REASON,
    Dialect,
    error_body,
    error_event,
    error_headers,
    error_of_stream,
    error_status,
    late_answer_event,
)
from iop.core.errors import InvalidRequest, Overloaded
from iop.edge.pools.model import Refusal, RefusalReason
from iop.edge.refusals import error_of_refusal
from iop.wire.messages import StreamError, StreamErrorCode

HERE = Path(__file__).parents[3]
ROWS = dict(
    re.findall(
        r"^\| \[`([a-z_]+)`\]\(errors/\1\.md\) \| (\d+) \|",
        (HERE / "docs/reference/http-errors.md").read_text(),
        re.MULTILINE,
    )
)
REASON = re.compile(r'reason="([A-Za-z_]+)"')


def reasons_in_source() -> set[str]:
    folder = Path(surface.__file__).parent
    files = [path for path in folder.glob("*.py") if path.name != "ops.py"]
    return {reason.lower() for path in files for reason in REASON.findall(path.read_text())}


@pytest.mark.clause("SF-06")
def test_every_code_has_its_line_in_the_catalogue() -> None:
    made = reasons_in_source() | {reason.value for reason in RefusalReason}
    assert made - set(ROWS) == set()
    assert {reason.lower() for reason in STATUS_BY_REASON} - set(ROWS) == set()


@pytest.mark.clause("SF-06")
def test_every_code_has_a_page() -> None:
    pages = {page.stem for page in (HERE / "docs/reference/errors").glob("*.md")}
    assert set(ROWS) <= pages
    assert {reason.value for reason in RefusalReason} | reasons_in_source() <= pages


@pytest.mark.clause("SF-06", "SF-09")
def test_the_catalogue_tells_the_right_status() -> None:
    for reason in RefusalReason:
        refusal = Refusal(reason=reason, retry_after_s=1.0)
        assert error_status(error_of_refusal(refusal, "m")) == int(ROWS[reason.value])
    for code in StreamErrorCode:
        error = error_of_stream(StreamError(code=code))
        assert error_status(error) == int(ROWS[error.reason.lower()])
    for reason_text, status in STATUS_BY_REASON.items():
        assert int(ROWS[reason_text.lower()]) == status


def test_an_unknown_code_of_a_newer_peer_is_a_provider_failure_and_its_words_stay_inside() -> None:
    error = error_of_stream(StreamError(code="something_new", message="http://10.0.0.1:8000 said no"))
    assert (error_status(error), error.reason) == (502, "upstream_error")
    assert b"10.0.0.1" not in error_body(error, Dialect.CHAT, "r")


@pytest.mark.clause("SF-06")
def test_envelopes_are_the_dialects_own() -> None:
    error = InvalidRequest("`n` must be 1.", details={"field": "n"})
    assert json.loads(error_body(error, Dialect.CHAT, "r")) == {
        "error": {
            "message": "`n` must be 1.",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_request",
        }
    }
    assert json.loads(error_body(error, Dialect.MESSAGES, "r")) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "`n` must be 1.", "code": "invalid_request"},
        "request_id": "r",
    }
    assert error_event(error, Dialect.CHAT).startswith(b'data: {"error":{')
    assert error_event(error, Dialect.MESSAGES).startswith(b'event: error\ndata: {"type":"error",')
    event = error_event(error, Dialect.RESPONSES, newline=b"\r\n")
    assert event.startswith(b'event: error\r\ndata: {"type":"error","code":"invalid_request",')
    assert event.endswith(b"\r\n\r\n")


@pytest.mark.clause("SF-06")
@pytest.mark.parametrize(
    "body", [b'{"error":{"message":"no"}}', b'{"type":"other","error":{"message":"no"}}']
)
def test_a_late_answer_is_an_error_event_to_readers_of_messages_whatever_it_called_itself(
    body: bytes,
) -> None:
    event = late_answer_event(400, body, Dialect.MESSAGES)
    assert event.startswith(b"event: error\ndata: ")
    assert json.loads(event.partition(b"data: ")[2]) == {"type": "error", "error": {"message": "no"}}


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert (b"retry-after", b"1") in error_headers(Overloaded("x", retry_after_s=0.01))
    assert (b"retry-after", b"3") in error_headers(Overloaded("x", retry_after_s=2.1))
    assert all(name != b"retry-after" for name, _ in error_headers(Overloaded("x")))
