"""The Edge behind a real OpenEngine listener, with a scripted Node connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import orjson
import pytest
from grpc_admin_rig import refused

from iop.api.grpc.auth import ApiKeyDirectory, ApiKeyGrant, secret_sha256
from iop.api.grpc.edge_port import EdgePort
from iop.api.grpc.inference_service import AdmitKey, no_limits
from iop.api.grpc.listeners import inference_listener
from iop.api.grpc.server import ListenerSettings
from iop.api.strangers import Strangers
from iop.core.ids import RunId
from iop.edge.calls import Outcome
from iop.edge.edge import Edge
from iop.edge.pools import GateMode, ProviderGate
from iop.edge.snapshot import EdgeSnapshot, QueueSpec
from iop.net.admin_steps import AdminStepCodec
from iop.pb.openengine.v1 import (
    error_pb2,
    generation_pb2,
    lifecycle_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)
from iop.testing.edge_fleet import FakeEdgeConnection, FakeStream, adapter_spec, provider_key, snapshot_of
from iop.testing.waiting import eventually
from iop.wire.messages import CancelReason

SNAPSHOT = snapshot_of(
    {"n1/main": adapter_spec("main", capacity=2)},
    {"fast": ["n1/main"]},
    aliases={"fast": ["fast-latest"]},
    queue=QueueSpec(max_waiters=1, timeout_s=5.0, no_capacity_grace_s=0.05),
)
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
HELLO = generation_pb2.GenerateRequest(request_id="r-1", model="fast-latest", prompt="hello")


class SystemClock:
    def monotonic(self) -> Any:
        return time.monotonic()

    def unix_nanos(self) -> int:
        return time.time_ns()


@dataclass
class Site:
    edge: Edge
    node: FakeEdgeConnection
    inference: Any
    control: Any

    async def stream(self, index: int = 0) -> FakeStream:
        await eventually(lambda: len(self.node.streams) > index)
        return self.node.streams[index]


@contextlib.asynccontextmanager
async def site_of(
    snapshot: EdgeSnapshot = SNAPSHOT,
    *,
    keys: ApiKeyDirectory | None = None,
    connects: bool = True,
    admit: AdmitKey = no_limits,
    strangers: Strangers | None = None,
) -> AsyncIterator[Site]:
    numbers = itertools.count(1)
    clock = SystemClock()
    async with Edge(
        snapshot, clock=clock, codec=AdminStepCodec(), new_run_id=lambda: RunId(f"run-{next(numbers)}")
    ) as edge:
        port = EdgePort(
            edge.dispatcher,
            find_snapshot=lambda: edge.snapshot,
            clock=clock,
            instance_id="edge-1",
            find_report=edge.nodes.probed,
        )
        settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
        listener = inference_listener(
            port,
            port,
            keys or ApiKeyDirectory(),
            settings,
            admit=admit,
            on_refused=port.note_refused,
            strangers=strangers,
        )
        node = FakeEdgeConnection(edge.nodes)
        if connects:
            node.connect()
        async with listener.serving(), grpc.aio.insecure_channel(listener.address) as channel:
            yield Site(
                edge=edge,
                node=node,
                inference=openengine_pb2_grpc.InferenceStub(channel),
                control=openengine_pb2_grpc.ControlStub(channel),
            )


def event(value: Any, newline: str = "\n") -> bytes:
    data = value if isinstance(value, str) else orjson.dumps(value).decode()
    return f"data: {data}{newline}{newline}".encode()


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
}


async def read_all(call: Any) -> list[Any]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@pytest.mark.clause("SF-20", "SF-24")
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("cut", [1, 7, 10_000])
async def test_a_generation_is_a_completion_at_the_provider_whatever_the_chunking(
    newline: str, cut: int
) -> None:
    request = generation_pb2.GenerateRequest(
        request_id="r-1",
        model="fast-latest",
        prompt="hello",
        sampling=generation_pb2.SamplingParams(temperature=0.0, seed=4),
        stopping=generation_pb2.StoppingOptions(
            max_tokens=9, conditions=[generation_pb2.StopCondition(stop_text=".")]
        ),
    )
    async with site_of() as site:
        call = site.inference.Generate(request, timeout=60)
        stream = await site.stream()
        assert stream.request.target == "target-of-n1/main"
        assert stream.request.path == "/v1/completions"
        assert orjson.loads(stream.sent_body) == {
            "model": "target-of-n1/main",
            "prompt": "hello",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "seed": 4,
            "max_tokens": 9,
            "stop": ["."],
        }
        stream.start(headers=EVENTS)
        data = b": ping\n\n" + b"".join(
            event(value, newline) for value in (text("Gr\u00fc"), text("\u00dfe", "stop"), USAGE, "[DONE]")
        )
        for start in range(0, len(data), cut):
            stream.send(data[start : start + cut])
        stream.end()
        messages = await read_all(call)
        assert await call.code() is grpc.StatusCode.OK
        assert [m.WhichOneof("event") for m in messages] == ["token", "token", "finished"]
        assert "".join(m.token.text for m in messages) == "Gr\u00fc\u00dfe"
        assert [m.HasField("usage") for m in messages] == [False, False, True]
        assert messages[-1].finished.reason == generation_pb2.FINISH_REASON_STOP
        assert messages[-1].usage.total_tokens == 5
        assert messages[-1].usage.cached_prompt_tokens == 1
        assert stream.credit_returned == len(data)
        record = site.edge.outcomes.find("r-1")
        assert record is not None
        assert record.outcome is Outcome.COMPLETE
        assert record.usage is not None
        assert record.usage.completion_tokens == 2
        assert len(site.edge.pools.leases) == 0


@pytest.mark.clause("SF-14", "SF-20")
async def test_an_answer_cut_before_its_finish_reason_is_an_error_not_a_success() -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.start(headers=EVENTS)
        stream.send(event(text("half")))
        stream.end()
        messages = await read_all(call)
        assert [m.WhichOneof("event") for m in messages] == ["token", "error"]
        assert messages[-1].error.retryable
        record = site.edge.outcomes.find("r-1")
        assert record is not None
        assert record.outcome is Outcome.UPSTREAM_TRUNCATED


@pytest.mark.clause("SF-20")
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, grpc.StatusCode.INVALID_ARGUMENT),
        (404, grpc.StatusCode.NOT_FOUND),
        (401, grpc.StatusCode.UNAVAILABLE),
        (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (500, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_refusal_of_the_provider_is_a_status_before_acceptance(
    status: int, code: grpc.StatusCode
) -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.start(status)
        stream.send(b'{"error": {"message": "the prompt is too long"}}')
        stream.end()
        async with refused(code) as refusal:
            await read_all(call)
        assert refusal.error is not None
        assert ("too long" in (refusal.error.details() or "")) is (status in {400, 404})
        assert len(site.edge.pools.leases) == 0


@pytest.mark.clause("SF-20")
async def test_an_answer_that_is_no_stream_is_refused() -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.start(headers=[(b"content-type", b"application/json")])
        async with refused(grpc.StatusCode.UNAVAILABLE):
            await read_all(call)


@pytest.mark.clause("SF-20")
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (event({"error": {"message": "boom"}}), error_pb2.ERROR_CODE_INTERNAL),
        (event("not json"), error_pb2.ERROR_CODE_INTERNAL),
        (event([1]), error_pb2.ERROR_CODE_INTERNAL),
        (b"data: " + b"x" * (1024 * 1024 + 1), error_pb2.ERROR_CODE_INTERNAL),
    ],
    ids=["error", "no json", "no object", "too large"],
)
async def test_what_a_provider_breaks_in_mid_stream_is_one_terminal_error(data: bytes, code: int) -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.start(headers=EVENTS)
        stream.send(event(text("a")) + data)
        messages = await read_all(call)
        assert [m.WhichOneof("event") for m in messages] == ["token", "error"]
        assert messages[-1].error.code == code
        await eventually(lambda: stream.cancelled)


@pytest.mark.clause("SF-20", "AD-41")
async def test_an_administrative_abort_is_a_retryable_draining_error() -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.start(headers=EVENTS)
        stream.send(event(text("a")))
        await call.read()
        site.edge.dispatcher.abort([provider_key("n1/main")])
        (message,) = await read_all(call)
        assert message.error.code == error_pb2.ERROR_CODE_DRAINING
        assert message.error.retryable


@pytest.mark.clause("SF-07", "SF-20")
async def test_a_caller_that_leaves_cancels_the_providers_work() -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.start(headers=EVENTS)
        stream.send(event(text("a")))
        await call.read()
        call.cancel()
        await eventually(lambda: stream.cancelled == [CancelReason.CLIENT_GONE])
        stream.fail("cancelled")
        await eventually(lambda: len(site.edge.pools.leases) == 0)


@pytest.mark.clause("SF-07", "SF-20")
async def test_a_caller_that_leaves_before_acceptance_cancels_too() -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        call.cancel()
        await eventually(lambda: stream.cancelled == [CancelReason.CLIENT_GONE])


@pytest.mark.clause("SF-08")
async def test_credit_returns_only_for_what_the_caller_has_taken() -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=30)
        stream = await site.stream()
        stream.start(headers=EVENTS)
        piece = event(text("x" * 100_000))
        for _ in range(20):
            stream.send(piece)
        # Nobody reads: flow control of the call stops the handler, so some credit stays out.
        await asyncio.sleep(0)
        for _ in range(20):
            await call.read()
        await eventually(lambda: stream.credit_returned == 20 * len(piece))
        call.cancel()


@pytest.mark.clause("SF-23")
async def test_only_its_own_key_can_abort_a_generation() -> None:
    keys = ApiKeyDirectory(
        [
            ApiKeyGrant(name="a", key_sha256=secret_sha256("key-a")),
            ApiKeyGrant(name="b", key_sha256=secret_sha256("key-b")),
        ]
    )
    key_a, key_b = ((("authorization", f"Bearer key-{name}"),) for name in "ab")
    abort = lifecycle_pb2.AbortRequest(request_id="r-1")
    async with site_of(keys=keys) as site:
        call = site.inference.Generate(HELLO, metadata=key_a, timeout=60)
        stream = await site.stream()
        stream.start(headers=EVENTS)
        async with refused(grpc.StatusCode.NOT_FOUND):
            await site.control.Abort(abort, metadata=key_b)
        answer = await site.control.Abort(abort, metadata=key_a)
        assert answer.status == lifecycle_pb2.ABORT_STATUS_ABORTED
        (message,) = await read_all(call)
        assert message.error.code == error_pb2.ERROR_CODE_CANCELLED
        assert stream.cancelled == [CancelReason.CLIENT_GONE]
        answer = await site.control.Abort(abort, metadata=key_a)
        assert answer.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
        async with refused(grpc.StatusCode.NOT_FOUND):
            await site.control.Abort(abort, metadata=key_b)


@pytest.mark.clause("SF-20")
async def test_a_live_request_id_cannot_be_used_twice_and_a_finished_one_can() -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.start(headers=EVENTS)
        async with refused(grpc.StatusCode.ALREADY_EXISTS):
            await read_all(site.inference.Generate(HELLO, timeout=60))
        stream.send(event(text("a", "length")) + event("[DONE]"))
        stream.end()
        messages = await read_all(call)
        assert messages[-1].finished.reason == generation_pb2.FINISH_REASON_LENGTH
        again = site.inference.Generate(HELLO, timeout=60)
        await site.stream(1)
        again.cancel()


@pytest.mark.clause("SF-10", "SF-22")
@pytest.mark.parametrize(
    "request_message",
    [
        generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1])),
        generation_pb2.GenerateRequest(prompt="p", sampling=generation_pb2.SamplingParams(top_k=3)),
        generation_pb2.GenerateRequest(prompt="p", stopping=generation_pb2.StoppingOptions(ignore_eos=True)),
        generation_pb2.GenerateRequest(
            prompt="p", response=generation_pb2.ResponseOptions(return_output_logprobs=True)
        ),
    ],
)
async def test_what_the_providers_are_not_known_to_understand_is_refused(request_message: Any) -> None:
    async with site_of() as site:
        async with refused(grpc.StatusCode.UNIMPLEMENTED) as refusal:
            await read_all(site.inference.Generate(request_message, timeout=60))
        assert refusal.info().reason == "UNSUPPORTED_FEATURE"
        assert site.node.streams == []
        assert len(site.edge.pools.leases) == 0


@pytest.mark.clause("SF-20", "SF-22")
async def test_nobody_there_is_unavailable_with_a_reason_and_shows_in_health() -> None:
    async with site_of(connects=False) as site:
        async with refused(grpc.StatusCode.UNAVAILABLE) as refusal:
            await read_all(site.inference.Generate(HELLO, timeout=60))
        assert refusal.info().reason == "NO_CAPACITY"
        health = await site.control.Health(lifecycle_pb2.HealthRequest())
        assert health.state == lifecycle_pb2.HEALTH_STATE_NOT_READY


@pytest.mark.clause("SF-22", "AD-103", "EN-04")
async def test_discovery_names_models_and_tells_nothing_of_nodes() -> None:
    async with site_of() as site:
        info = await site.control.GetServerInfo(server_pb2.GetServerInfoRequest())
        assert list(info.supported_models) == ["fast"]
        model = await site.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="fast-latest"))
        assert model.served_model_name == "fast"
        assert model.supports_text_input
        load = await site.control.GetLoad(server_pb2.GetLoadRequest())
        assert load.HasField("running_requests")
        ready = await site.control.Health(lifecycle_pb2.HealthRequest())
        assert ready.state == lifecycle_pb2.HEALTH_STATE_READY
        gate = ProviderGate(mode=GateMode.QUEUE, held_by=("epoch 1",))
        now = asyncio.get_running_loop().time()
        site.edge.dispatcher.apply(site.edge.pools.set_gates([(provider_key("n1/main"), gate)], now=now))
        paused = await site.control.Health(lifecycle_pb2.HealthRequest(model="fast"))
        assert paused.state == lifecycle_pb2.HEALTH_STATE_DRAINING
        assert "n1" not in f"{info}{model}{load}{ready}{paused}"
