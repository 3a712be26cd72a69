"""Operate the fleet by the command line: pause, resume, flush, authorisation, reflection."""

from __future__ import annotations

import json
import threading
from typing import Any

import grpc
import openai
import pytest
from e2e_fleet import STORY, Fleet, eventually
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

pytestmark = pytest.mark.slow


class Chat(threading.Thread):
    """One chat request in a thread of its own; ``begun`` at its first token."""

    def __init__(self, fleet: Fleet, *, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._client = openai.OpenAI(base_url=fleet.base_url, api_key="none", max_retries=0, timeout=60)
        self._max_tokens = max_tokens
        self.begun = threading.Event()
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for part in self._client.chat.completions.create(
                model="iop-tiny",
                messages=STORY,  # type: ignore[arg-type]
                stream=True,
                max_tokens=self._max_tokens,
                extra_body={"ignore_eos": True},
            ):
                self.begun.set()
                self.finish_reason = part.choices[0].finish_reason or self.finish_reason
        except Exception as error:  # noqa: BLE001  (shown by the test that joins it)
            self.error = error


@pytest.mark.clause("AD-41", "AD-42", "AD-14", "SF-09")
def test_drain_lets_a_stream_finish_holds_the_next_and_resume_lets_it_go(fleet: Fleet) -> None:
    running = Chat(fleet, max_tokens=150)
    assert running.begun.wait(60)
    paused = fleet.admin("pause", "--all", "--mode", "drain", "--admission", "queue")
    assert paused["state"] == "SUCCEEDED"
    epoch = paused["result"]["pause"]["pause_epoch"]
    running.join(60)
    assert running.error is None
    assert running.finish_reason == "length", "the stream finished by itself"

    waiting = Chat(fleet, max_tokens=5)
    eventually(lambda: fleet.queue_depth() == 1, "the new request waits")
    assert not waiting.begun.is_set()

    stale = fleet.iop("admin", "resume", "--epoch", str(epoch + 1000), "--json")
    assert stale.returncode == 3
    refusal = json.loads(stale.stdout)["error"]
    assert (refusal["code"], refusal["reason"]) == ("FAILED_PRECONDITION", "STALE_EPOCH")
    assert not waiting.begun.is_set()

    resumed = fleet.admin("resume", "--epoch", str(epoch))
    assert resumed["result"]["resume"]["pause_epoch"] == epoch
    waiting.join(60)
    assert waiting.error is None
    assert waiting.finish_reason == "length"
    again = fleet.iop("admin", "resume", "--epoch", str(epoch))
    assert again.returncode == 3
    assert "STALE_EPOCH" in again.stderr


@pytest.mark.clause("AD-40")
def test_after_a_flush_the_prefix_is_computed_anew(fleet: Fleet) -> None:
    client = openai.OpenAI(base_url=fleet.base_url, api_key="none", max_retries=0, timeout=30)
    prompt: Any = [{"role": "user", "content": "The lighthouse keeper counted the boats again. " * 6}]

    def ask() -> tuple[float, float]:
        before = fleet.engine_counters()
        client.chat.completions.create(model="iop-tiny", messages=prompt, max_tokens=2, temperature=0)
        after = fleet.engine_counters()
        return (
            after["prefix_tokens_hit"] - before["prefix_tokens_hit"],
            after["prefill_positions_computed"] - before["prefill_positions_computed"],
        )

    first_hit, first_computed = ask()
    second_hit, second_computed = ask()
    assert first_hit == 0
    assert second_hit > 0
    assert second_computed == first_computed - second_hit

    flushed = fleet.admin("flush", "--all", "--kind", "prefix", "--busy", "wait")
    caches = flushed["result"]["flush_caches"]["caches"]
    assert [cache["outcome"] for cache in caches] == ["CLEARED", "CLEARED"]
    assert ask() == (0, first_computed)


@pytest.mark.clause("AD-03", "AD-04")
def test_without_a_credential_unauthenticated_and_a_viewer_may_not_pause(fleet: Fleet) -> None:
    pause = ("admin", "pause", "--all", "--mode", "drain", "--json")
    nobody = fleet.iop(*pause, "--token", "none")
    assert (nobody.returncode, json.loads(nobody.stdout)["error"]["code"]) == (3, "UNAUTHENTICATED")
    viewer = fleet.iop(*pause, "--token", "viewer")
    assert (viewer.returncode, json.loads(viewer.stdout)["error"]["code"]) == (3, "PERMISSION_DENIED")
    operator = fleet.iop(
        "admin", "release", "--all", "--kind", "kv-cache", "--mode", "drain", "--token", "operator"
    )
    assert operator.returncode == 3
    assert fleet.admin("profile", "--token", "viewer").get("pauses") == []


def services(address: str, token: str | None) -> set[str]:
    """What reflection lists, as grpcurl would ask."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(
            channel if token is None else grpc.intercept_channel(channel, _Bearer(token))
        )
        return set(database.get_services())


class _Bearer(grpc.StreamStreamClientInterceptor):  # type: ignore[misc]  # grpc's stubs leave it untyped
    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), requests)


@pytest.mark.clause("AD-06", "AD-02")
def test_each_grpc_port_reflects_only_its_own_services(fleet: Fleet) -> None:
    viewer = fleet.run["tokens"]["viewer"]
    for parts in (fleet.run, fleet.run["engine"]):
        admin = services(parts["admin"], viewer)
        assert "openengine.v1.OpenEngineAdmin" in admin
        # Control may stand there for its privileged calls (AD-103); inference never does.
        assert "openengine.v1.Inference" not in admin
        inference = services(parts["openengine"], None)
        assert {"openengine.v1.Inference", "openengine.v1.Control"} <= inference
        assert "openengine.v1.OpenEngineAdmin" not in inference


@pytest.mark.clause("AD-23", "AD-12")
def test_a_repeated_key_is_the_same_operation(fleet: Fleet) -> None:
    first = fleet.admin("flush", "--all", "--key", "nightly-1")
    second = fleet.admin("flush", "--all", "--key", "nightly-1")
    assert first["operation_id"] == second["operation_id"]
    other = fleet.iop("admin", "pause", "--all", "--mode", "drain", "--key", "nightly-1", "--json")
    assert json.loads(other.stdout)["error"]["code"] == "ALREADY_EXISTS"
    shown = fleet.admin("get", first["operation_id"])
    assert shown["kind"] == "FLUSH_CACHES"
    listed = fleet.admin("list", "--kind", "flush-caches")["operations"]
    assert first["operation_id"] in {operation["operation_id"] for operation in listed}


@pytest.mark.clause("AD-105")
def test_validate_only_shows_the_plan_and_changes_nothing(fleet: Fleet) -> None:
    before = fleet.admin("profile")["revision"]
    plan = fleet.admin("pause", "--all", "--mode", "abort", "--validate-only")
    assert plan["pauses_inference"] is True
    assert plan["blockers"] == []
    after = fleet.admin("profile")
    assert (after["revision"], after["pauses"]) == (before, [])
