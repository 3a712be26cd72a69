"""Admin records as JSON: wire names, enums by name, results under their oneof."""

from __future__ import annotations

from iop.admin.enums import (
    AdminOperationKind,
    AdminOperationState,
    CacheKind,
    CacheOutcome,
    PauseMode,
    ProfilerKind,
    ResourceKind,
)
from iop.admin.results import (
    AdminOperation,
    AdminOperationEvent,
    CacheResult,
    FlushCachesResult,
    OperationCompleted,
    OperationResult,
    PauseResult,
    ProfileArtifact,
    ReleaseResourcesResult,
    ResourceAmount,
    RestoreResourcesResult,
    ResumeResult,
    StartProfileResult,
    StopProfileResult,
)
from iop.cli.records import describe, describe_result, to_json
from iop.core.ids import OperationId, ParticipantId


def operation(result: OperationResult | None) -> AdminOperation:
    return AdminOperation(
        operation_id=OperationId("op-1"),
        kind=AdminOperationKind.PAUSE,
        state=AdminOperationState.SUCCEEDED,
        idempotency_key="k",
        principal="ops",
        request_sha256=b"\x01\xff",
        revision_before=0,
        accepted_at_unix_nanos=5,
        result=result,
    )


PAUSE = PauseResult(pause_epoch=7, mode=PauseMode.DRAIN, drained=2)


def test_an_operation_is_one_json_object_with_its_result_under_the_oneof() -> None:
    shape = to_json(operation(PAUSE))
    assert shape["kind"] == "PAUSE"
    assert shape["request_sha256"] == "01ff"
    assert shape["revision_before"] == 0
    assert "revision_after" not in shape, "an absent optional is absent, a zero is a value"
    assert shape["result"] == {
        "pause": {"pause_epoch": 7, "mode": "DRAIN", "drained": 2, "aborted": 0, "kept": 0}
    }


def test_an_event_has_its_body_under_the_oneof() -> None:
    event = AdminOperationEvent(
        operation_id="op-1",
        sequence=9,
        timestamp_unix_nanos=1,
        event=OperationCompleted(result=PAUSE, revision=3),
    )
    shape = to_json(event)
    assert shape["completed"]["revision"] == 3
    assert shape["completed"]["result"]["pause"]["pause_epoch"] == 7
    assert "event" not in shape


def test_a_release_says_how_to_take_it_back_and_how_much_it_was() -> None:
    amount = ResourceAmount(
        participant_id=ParticipantId("n/e/0"), kind=ResourceKind.KV_CACHE, bytes=3 * 2**20
    )
    lines = describe_result(
        operation(ReleaseResourcesResult(resource_epoch=4, released=(amount,), pause_epoch=2))
    )
    assert lines == [
        "released: epoch 4, pause epoch 2",
        "  n/e/0: kv_cache 3.0 MiB",
        "to take it back: iop admin restore --epoch 4 --kind kv-cache",
    ]
    lines = describe_result(
        operation(RestoreResourcesResult(restored=(amount,), remaining=(ResourceKind.WEIGHTS,)))
    )
    assert lines[-1] == "still released: weights"


def test_people_are_told_what_to_do_next() -> None:
    assert "iop admin resume --epoch 7" in describe_result(operation(PAUSE))[1]
    assert "epoch 7 has ended" in describe_result(operation(ResumeResult(pause_epoch=7)))[0]
    cache = CacheResult(
        participant_id=ParticipantId("n/e/0"),
        kind=CacheKind.PREFIX,
        outcome=CacheOutcome.REFUSED,
        detail="busy",
    )
    assert describe_result(operation(FlushCachesResult(caches=(cache,)))) == ["n/e/0: prefix refused (busy)"]
    assert describe_result(operation(None)) == []


def test_profiles_are_told_in_lines_and_with_the_way_on() -> None:
    started = StartProfileResult(
        operation_id=OperationId("op-1"),
        profile_id="prof-1",
        started_at_unix_nanos=5,
        participant_ids=(ParticipantId("n/e/0"), ParticipantId("n/e/1")),
    )
    assert describe(started) == [
        "recording: profile prof-1 on n/e/0, n/e/1",
        "to end it: iop admin profile-stop prof-1",
    ]
    artifact = ProfileArtifact(
        participant_id=ParticipantId("n/e/0"),
        kind=ProfilerKind.CPU,
        uri="iop-artifact:a",
        media_type="application/json",
        size_bytes=7,
        sha256=b"\xab",
    )
    stopped = StopProfileResult(operation_id=OperationId("op-2"), profile_id="prof-1", artifacts=(artifact,))
    assert describe(stopped) == [
        "recorded: profile prof-1",
        "  n/e/0: cpu iop-artifact:a (application/json, 7 bytes, sha256 ab)",
    ]
