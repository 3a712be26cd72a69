"""The shared tunnel suite over `openai_compat`, and what is this adapter's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from iop.adapters.base import Adapter, Health
from iop.adapters.openai_compat import OpenAICompatAdapter
from iop.admin.enums import BusyPolicy, CacheKind
from iop.admin.steps import FlushStep
from iop.core.errors import InvalidRequest, Unsupported
from iop.testing import adapter_suite
from iop.testing.adapter_suite import (
    ScriptedUpstream,
    TunnelRecorder,
    UpstreamRequest,
    adapter_services,
    plain_answer,
    step_call,
    tunnel_request,
)
from iop.testing.stub_engine import StubEngine, whole_answer
from iop.testing.waiting import free_ports
from iop.wire.messages import (
    AdapterConfig,
    OpenAICompatSettings,
    ProfileOperation,
    ProtocolProfile,
    TunnelRequest,
)


def config_for(endpoint: str, **settings: object) -> AdapterConfig:
    return AdapterConfig(
        name="main",
        type="openai_compat",
        capacity=8,
        settings=OpenAICompatSettings(endpoint=endpoint, **settings),  # type: ignore[arg-type]
    )


@contextlib.asynccontextmanager
async def running(config: AdapterConfig) -> AsyncIterator[OpenAICompatAdapter]:
    adapter = OpenAICompatAdapter(config, adapter_services())
    async with asyncio.TaskGroup() as tasks:
        await adapter.start(tasks)
        try:
            yield adapter
        finally:
            await adapter.aclose()


def closed_port() -> int:
    return free_ports(1)[0]


@dataclass
class Harness:
    adapter: Adapter
    upstream: ScriptedUpstream

    def request(self, *, stream: bool = True, operation: str = "chat_completions") -> TunnelRequest:
        return tunnel_request(stream=stream, operation=operation)

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        async with running(config_for(f"http://127.0.0.1:{closed_port()}")) as adapter:
            yield adapter


async def answer_plainly(request: UpstreamRequest) -> None:
    await request.connection.write(plain_answer())


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with (
        ScriptedUpstream(answer_plainly).serving() as upstream,
        running(config_for(upstream.endpoint, api_key="engine-key")) as adapter,
    ):
        yield Harness(adapter, upstream)


@pytest.mark.clause("EN-50", "EN-52", "EN-53", "EN-56", "EN-57", "EN-102")
class TestSharedTunnelSuite(adapter_suite.TunnelSuite):
    pass


async def open_and_finish(
    harness: Harness, request: TunnelRequest, body: tuple[bytes, ...] = ()
) -> TunnelRecorder:
    tunnel = TunnelRecorder(request, body)
    harness.adapter.open_tunnel(tunnel, tunnel.on_done)
    await tunnel.finished()
    return tunnel


@pytest.mark.clause("EN-51", "EN-55")
async def test_a_named_operation_takes_method_and_path_from_the_profile() -> None:
    profile = ProtocolProfile(
        name="mine", operations={"chat_completions": ProfileOperation(method="POST", path="/api/chat?x=1")}
    )
    async with (
        ScriptedUpstream(answer_plainly).serving() as upstream,
        running(config_for(upstream.endpoint + "/base/", protocol_profile=profile)) as adapter,
    ):
        harness = Harness(adapter, upstream)
        request = replace(tunnel_request(), method="DELETE", path="/v1/ignored")
        tunnel = await open_and_finish(harness, request)
        assert tunnel.ended
        assert (upstream.requests[0].method, upstream.requests[0].path) == ("POST", "/base/api/chat?x=1")
        refused = await open_and_finish(harness, tunnel_request(operation="responses"))
        assert refused.error is not None
        assert refused.error.code == "unknown_operation"
        assert refused.error.before_start
        assert len(upstream.requests) == 1


@pytest.mark.clause("EN-51")
async def test_an_empty_operation_falls_back_to_the_path(harness: Harness) -> None:
    request = replace(tunnel_request(operation=""), method="POST", path="/v1/embeddings?a=%20b")
    tunnel = await open_and_finish(harness, request, (b"{}",))
    assert tunnel.ended
    assert harness.upstream.requests[0].path == "/v1/embeddings?a=%20b"


@pytest.mark.clause("EN-61")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/collective_rpc"),
        ("POST", "/v1/../collective_rpc"),
        ("POST", "/v1/%2e%2e/reset"),
        ("POST", "/v1/a%2f..%2fpause"),
        ("POST", "//evil/v1/x"),
        ("POST", "/v1//x"),
        ("POST", "http://elsewhere/v1/x"),
        ("POST", "/v1/x HTTP/1.1\r\nX: y"),
        ("POST", "/v1/ü"),
        ("DELETE", "/v1/models/m"),
        ("CONNECT", "/v1/x"),
        ("", ""),
    ],
)
async def test_a_plain_path_never_reaches_a_control_route(harness: Harness, method: str, path: str) -> None:
    tunnel = await open_and_finish(harness, replace(tunnel_request(operation=""), method=method, path=path))
    assert tunnel.error is not None
    assert tunnel.error.code == "invalid_request"
    assert tunnel.error.before_start
    assert harness.upstream.requests == []


@pytest.mark.clause("SF-04")
async def test_only_the_engines_own_credential_reaches_it(harness: Harness) -> None:
    request = replace(
        tunnel_request(),
        headers=(
            (b"Authorization", b"Bearer caller"),
            (b"X-Api-Key", b"caller"),
            (b"api-key", b"caller"),
            (b"Cookie", b"caller=1"),
            (b"Proxy-Authorization", b"caller"),
            (b"X-IOP-Priority", b"9"),
            (b"Connection", b"keep-alive, X-Hop"),
            (b"X-Hop", b"1"),
            (b"Host", b"caller.example"),
            (b"Content-Length", b"999"),
            (b"Transfer-Encoding", b"chunked"),
            (b"Traceparent", b"00-1"),
            (b"X-Twice", b"1"),
            (b"X-Twice", b"2"),
        ),
    )
    await open_and_finish(harness, request, (b"{}",))
    seen = harness.upstream.requests[0]
    assert [each for each in seen.headers if each[0] not in {"Host", "Content-Length"}] == [
        ("Traceparent", "00-1"),
        ("X-Twice", "1"),
        ("X-Twice", "2"),
        ("Authorization", "Bearer engine-key"),
    ]
    assert seen.header("host") == f"127.0.0.1:{harness.upstream.port}"
    assert seen.header("content-length") == "2"
    assert "caller" not in repr(seen.headers)


@pytest.mark.parametrize("header", [(b"X-A", b"1\r\nX-B: 2"), (b"X A", b"1"), (b"", b"1"), (b"X-A", b"a\0b")])
async def test_a_header_that_would_end_its_line_is_refused(
    harness: Harness, header: tuple[bytes, bytes]
) -> None:
    tunnel = await open_and_finish(harness, replace(tunnel_request(), headers=(header,)))
    assert tunnel.error is not None
    assert tunnel.error.code == "invalid_request"
    assert harness.upstream.requests == []


async def test_a_providers_own_error_answer_is_an_answer(harness: Harness) -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.write(
            plain_answer(
                b"<html>slow down</html>", status="429 Too Many Requests", extra=b"Retry-After: 30\r\n"
            )
        )

    harness.upstream.script = script
    tunnel = await open_and_finish(harness, tunnel_request())
    assert tunnel.ended
    assert tunnel.status == 429
    assert (b"Retry-After", b"30") in tunnel.headers
    assert tunnel.received == b"<html>slow down</html>"


async def test_probe_reads_models_and_health(harness: Harness) -> None:
    async def script(request: UpstreamRequest) -> None:
        assert request.header("authorization") == "Bearer engine-key"
        await request.connection.write(plain_answer(b'{"object":"list","data":[{"id":"org/m","x":1}]}'))

    harness.upstream.script = script
    assert harness.adapter.snapshot().health is Health.UNKNOWN
    await harness.adapter.probe()
    assert harness.adapter.snapshot().health is Health.READY
    assert harness.adapter.snapshot().models == ("org/m",)


@pytest.mark.parametrize(
    ("status", "health"),
    [("401 No", Health.NOT_READY), ("503 No", Health.NOT_READY), ("404 No", Health.READY)],
)
async def test_probe_judges_the_status(harness: Harness, status: str, health: Health) -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.write(plain_answer(b"not json", status=status))

    harness.upstream.script = script
    await harness.adapter.probe()
    assert harness.adapter.snapshot().health is health


async def test_a_refused_connection_shows_in_health_at_once(harness: Harness) -> None:
    async with harness.unreachable() as adapter:
        tunnel = TunnelRecorder(tunnel_request())
        adapter.open_tunnel(tunnel, tunnel.on_done)
        await tunnel.finished()
        assert adapter.snapshot().health is Health.OFFLINE
        assert "127.0.0.1" not in adapter.snapshot().reason


@pytest.mark.parametrize(
    ("endpoint", "settings"),
    [
        ("", {}),
        ("ftp://x", {}),
        ("http://", {}),
        ("http://u:p@h", {}),
        ("http://h:99999", {}),
        ("http://h/?q=1", {}),
        ("http://h", {"api_key": "with space"}),
        ("http://h", {"api_key": "line\nbreak"}),
        ("https://h", {"tls_ca_pem": b"not pem"}),
        (
            "http://h",
            {
                "protocol_profile": ProtocolProfile(
                    name="x", operations={"models": ProfileOperation(method="GET", path="models")}
                )
            },
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused(endpoint: str, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        OpenAICompatAdapter(config_for(endpoint, **settings), adapter_services())
    assert "p@h" not in caught.value.message


@pytest.mark.clause("AD-15")
async def test_nothing_but_a_pause_is_offered_and_the_refusal_says_how_to_get_more(harness: Harness) -> None:
    assert "OpenEngineAdmin" in harness.adapter.capabilities.admin_refusal
    flush = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL)
    with pytest.raises(Unsupported, match="OpenEngineAdmin"):
        await harness.adapter.execute_step(step_call(harness.adapter, flush), lambda _: None)


@pytest.mark.clause("AD-37", "AD-41")
class TestSharedPauseSuite(adapter_suite.PauseSuite):
    pass


@pytest.mark.clause("SF-21", "SF-22")
@pytest.mark.parametrize(
    ("kind", "path", "two", "three"),
    [
        ("sglang", b"/server_info", b'{"dp_size": 2}', b'{"dp_size": 3}'),
        (
            "vllm",
            b"/metrics",
            *(
                b"".join(b'vllm:num_requests_running{engine="%d"} 0\n' % rank for rank in range(size))
                for size in (2, 3)
            ),
        ),
        ("openai_compat", b"/metrics", b"", b""),
    ],
)
async def test_engines_with_a_header_for_it_tell_their_data_parallel_ranks(
    kind: str, path: bytes, two: bytes, three: bytes
) -> None:
    told = two

    def on_get(asked: bytes) -> bytes:
        return whole_answer(told) if asked == path else whole_answer(b'{"data":[]}')

    async with StubEngine(on_get=on_get) as engine:
        config = replace(config_for(engine.endpoint), type=kind, targets=("m",))
        async with running(config) as adapter:
            assert adapter.snapshot().data_parallel_ranks == {}, "nothing is told before it was asked"
            await adapter.probe()
            ranks = {0, 1} if two else set()
            assert adapter.snapshot().data_parallel_ranks == {"m": ranks}
            told = three
            await adapter.probe()
            assert adapter.snapshot().data_parallel_ranks == {"m": {0, 1, 2} if three else set()}
