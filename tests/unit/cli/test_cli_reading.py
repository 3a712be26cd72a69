"""What the reading commands tell people: when, why, and an exit code that is true."""

from __future__ import annotations

from typing import Any

import pytest

from iop.admin.enums import AdminOperationKind, AdminOperationState
from iop.admin.requests import ListOperationsRequest
from iop.admin.results import AdminOperation, OperationPage
from iop.cli.main import run
from iop.client.admin import AdminClient
from iop.client.ops import OpsClient
from iop.core.ids import OperationId

OPS = ["--target", "127.0.0.1:1", "--token", "none"]

ASKED: dict[str, Any] = {
    "request_id": "req-7",
    "model": "tiny",
    "candidates": [{"provider": "gpu-1/main", "eligible": False, "why": "held by epoch 3"}],
    "provider": None,
    "queue_ms": 2004,
    "attempts": 0,
    "tries": [],
    "outcome": "rejected",
    "reason": "queue_timeout",
    "began": "2026-01-02T03:04:05.678Z",
    "duration_ms": 2005,
    "usage": None,
}


def explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **changed: Any
) -> list[str]:
    monkeypatch.setattr(OpsClient, "explain", lambda _self, _id: ASKED | changed)
    assert run(["explain", "req-7", *OPS]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.clause("SF-13")
def test_explain_tells_why_and_when_of_a_request_that_reached_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(monkeypatch, capsys) == [
        "req-7: tiny, rejected (queue_timeout)",
        "  began 2026-01-02T03:04:05.678Z, took 2005 ms",
        "  reached no provider, waited 2004 ms, attempts 0",
        "  - gpu-1/main: held by epoch 3",
    ]


@pytest.mark.clause("SF-13")
def test_explain_tells_the_tries_and_the_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = [{"provider": "gpu-1/main", "error": "busy"}, {"provider": "gpu-2/main", "error": ""}]
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "cached_prompt_tokens": None}
    lines = explained(
        monkeypatch, capsys, outcome="complete", reason="", provider="gpu-2/main", tries=tries, usage=usage
    )
    assert lines[0] == "req-7: tiny, complete"
    assert lines[3:5] == ["  tokens: 9 in, 4 out", "  tried gpu-1/main: busy"]


def test_operations_are_listed_with_when_they_were_accepted_and_how_long_they_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    second = 1_000_000_000
    ended = AdminOperation(
        operation_id=OperationId("op-1"),
        kind=AdminOperationKind.PAUSE,
        state=AdminOperationState.SUCCEEDED,
        idempotency_key="k",
        principal="ops",
        request_sha256=b"",
        revision_before=3,
        revision_after=4,
        accepted_at_unix_nanos=1_800_000_000 * second,
        ended_at_unix_nanos=1_800_000_002 * second,
    )

    async def listed(_self: AdminClient, _request: ListOperationsRequest) -> OperationPage:
        return OperationPage(operations=(ended,), next_page_token="")

    async def got(_self: AdminClient, _id: str) -> AdminOperation:
        return ended

    monkeypatch.setattr(AdminClient, "list_operations", listed)
    monkeypatch.setattr(AdminClient, "get", got)
    assert run(["admin", "list", *OPS]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row == "op-1       pause  SUCCEEDED  ops  2027-01-15 08:00:00Z  after 2.0 s  3 to 4"
    assert run(["admin", "get", "op-1", *OPS]) == 0
    assert "  accepted 2027-01-15 08:00:00Z, after 2.0 s" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_node_that_could_not_say_is_a_failure(
    form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"ok": False, "reason": "no such adapter", "figures": {}, "providers": []}
    monkeypatch.setattr(OpsClient, "command", lambda _self, *_asked, **_more: answer)
    assert run(["node", "command", "gpu-1", "usage", *OPS, *form]) == 1
    told = capsys.readouterr()
    assert "no such adapter" in (told.out if form else told.err)
