"""TensorRT-LLM's memory routes against a stand-in built from the server's documentation, which checks signatures."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from engines_rig import config_of, running
from engines_steps import PAUSE, do, released

from iop.adapters.base import Adapter, Health
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    ResourceKind,
    WeightRetention,
)
from iop.admin.steps import ReleaseStep, RestoreStep
from iop.core.errors import PreconditionFailed, Unsupported
from iop.testing import adapter_suite
from iop.testing.adapter_suite import (
    ScriptedUpstream,
    UpstreamRequest,
    assert_all_ok,
    plain_answer,
)

KEY = "shared-with-the-engine"
BOTH = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)
MEMORY = {AdminOperationKind.RELEASE_RESOURCES, AdminOperationKind.RESTORE_RESOURCES}


@dataclass
class Trtllm:
    """Parks by tag, once; refuses what is not signed, signed before, or comes while something is parked."""

    has_sleep_mode: bool = True
    does_nothing: bool = False
    is_failed: bool = False
    is_busy: bool = False
    has_troubles: bool = False
    parked: set[str] = field(default_factory=set)
    nonces: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    async def __call__(self, request: UpstreamRequest) -> None:
        self.asked.append(f"{request.method} {request.path}")
        status, answer = self._answer(request)
        await request.connection.write(plain_answer(json.dumps(answer).encode(), status=status))

    def _answer(self, request: UpstreamRequest) -> tuple[str, object]:
        match request.path:
            case "/health":
                return "200 OK", ""
            case "/version":
                return "200 OK", {"version": "1.4.0rc1"}
            case "/v1/models":
                return "200 OK", {"data": [{"id": "m"}]}
            case "/memory_status" | "/release_memory" | "/resume_memory" if self.has_sleep_mode:
                if not self._is_signed(request):
                    return "401 Unauthorized", {"error": "bad signature"}
                return self._memory(request)
        return "404 Not Found", {"detail": "Not Found"}

    def _is_signed(self, request: UpstreamRequest) -> bool:
        stamp = request.header("x-trtllm-runtime-control-timestamp") or ""
        nonce = request.header("x-trtllm-runtime-control-nonce") or ""
        text = f"trtllm-runtime-control-v1\n{request.method}\n{request.path}\n{stamp}\n{nonce}\n".encode()
        wanted = "sha256=" + hmac.new(KEY.encode(), text + request.body, hashlib.sha256).hexdigest()
        is_fresh = len(nonce) == 32 and nonce not in self.nonces
        self.nonces.add(nonce)
        return is_fresh and request.header("x-trtllm-runtime-control-auth") == wanted

    def _memory(self, request: UpstreamRequest) -> tuple[str, object]:
        if self.has_troubles:
            return "503 Service Unavailable", {"error": "later"}
        if request.path == "/memory_status":
            state = "failed" if self.is_failed else "parked" if self.parked else "running"
            return "200 OK", {"state": state, "parked_tags": sorted(self.parked)}
        tags = set(json.loads(request.body)["tags"])
        if self.is_busy or (request.path == "/release_memory" and self.parked):
            return "409 Conflict", {"error": "a transition is in progress"}
        if not self.does_nothing:
            self.parked = self.parked | tags if request.path == "/release_memory" else self.parked - tags
        return "200 OK", {"status": "success"}


@contextlib.asynccontextmanager
async def in_front_of(engine: Trtllm, key: str = KEY) -> AsyncIterator[Adapter]:
    environment = {"TRTLLM_RUNTIME_CONTROL_API_KEY": key} if key else {}
    async with (
        ScriptedUpstream(engine).serving() as upstream,
        running(config_of("trtllm", upstream.endpoint), environment) as adapter,
    ):
        yield adapter


@dataclass
class Harness:
    adapter: Adapter

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        yield self.adapter


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with in_front_of(Trtllm()) as adapter:
        yield Harness(adapter)


@pytest.mark.clause("AD-37", "AD-41")
class TestSharedPauseSuite(adapter_suite.PauseSuite):
    pass


def release(*kinds: ResourceKind) -> ReleaseStep:
    retention = WeightRetention.OFFLOAD_TO_HOST if ResourceKind.WEIGHTS in kinds else None
    return ReleaseStep(kinds=kinds, weight_retention=retention)


@pytest.mark.clause("AD-37", "AD-43", "AD-44")
async def test_memory_is_parked_and_comes_back_by_tag_with_every_request_signed() -> None:
    engine = Trtllm()
    async with in_front_of(engine) as adapter:
        with pytest.raises(PreconditionFailed):
            await do(adapter, release(*BOTH))
        await do(adapter, PAUSE)
        assert_all_ok(await do(adapter, release(*BOTH)))
        assert engine.parked == {"model_weights", "kv_cache"}
        assert await released(adapter) == set(BOTH)
        again = await do(adapter, release(*BOTH))
        assert not again.participants[0].changed
        assert_all_ok(await do(adapter, RestoreStep(kinds=(ResourceKind.WEIGHTS,))))
        assert await released(adapter) == {ResourceKind.KV_CACHE}
        with pytest.raises(PreconditionFailed, match="restore it first"):
            await do(adapter, release(*BOTH))
        assert_all_ok(await do(adapter, RestoreStep(kinds=BOTH)))
        assert engine.parked == set()
        assert not any("/metrics" in asked for asked in engine.asked), "its metrics can be read once only"


@pytest.mark.clause("AD-37", "AD-43")
async def test_a_success_that_parked_nothing_fails_and_another_transition_is_told() -> None:
    engine = Trtllm(does_nothing=True)
    async with in_front_of(engine) as adapter:
        await do(adapter, PAUSE)
        (outcome,) = (await do(adapter, release(*BOTH))).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED
        engine.is_busy = True
        (outcome,) = (await do(adapter, release(*BOTH))).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.REFUSED_BUSY
        assert outcome.error.retryable


@pytest.mark.clause("AD-37", "AD-43")
async def test_an_engine_that_does_not_tell_what_it_has_parked_is_not_called_whole() -> None:
    engine = Trtllm()
    async with in_front_of(engine) as adapter:
        await do(adapter, PAUSE)
        await do(adapter, release(*BOTH))
        engine.has_troubles = True
        (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
        assert not back.reachable
        (info,) = adapter.participants()
        assert info.capabilities.operations >= MEMORY
        engine.has_troubles = False
        assert await released(adapter) == set(BOTH)


@pytest.mark.clause("AD-15")
@pytest.mark.parametrize(
    ("key", "has_sleep_mode", "words"),
    [
        ("", True, "TRTLLM_RUNTIME_CONTROL_API_KEY"),
        ("another", True, "another"),
        (KEY, False, "--enable_sleep_mode"),
    ],
)
async def test_without_key_or_sleep_mode_memory_is_not_offered_and_the_way_told(
    key: str, has_sleep_mode: bool, words: str
) -> None:
    async with in_front_of(Trtllm(has_sleep_mode=has_sleep_mode), key) as adapter:
        (info,) = adapter.participants()
        assert not MEMORY & info.capabilities.operations
        await do(adapter, PAUSE)
        with pytest.raises(Unsupported, match=words):
            await do(adapter, release(*BOTH))


@pytest.mark.clause("EN-34", "AD-37")
async def test_a_failed_memory_state_is_an_engine_that_is_not_ready() -> None:
    engine = Trtllm()
    async with in_front_of(engine) as adapter:
        engine.is_failed = True
        await adapter.probe()
        assert adapter.snapshot().health is Health.NOT_READY
