"""Spans of a request through the whole fleet, as a collector receives them over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from http_fleet import fleet_of
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from iop.obs.otel import TracingSettings, tracing_to
from iop.obs.tracing import Tracer, parse_trace
from iop.testing.stub_engine import StubCall, StubEngine, sse_events, whole_answer
from iop.testing.waiting import eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{CALLER_SPAN}-01".encode()
BODY = b'{"model":"fast","messages":[{"role":"user","content":"a secret prompt"}]}'


class Collector:
    """What an OTLP collector got."""

    def __init__(self, stub: StubEngine) -> None:
        self._stub = stub

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for call in self._stub.calls
            for resource in ExportTraceServiceRequest.FromString(call.body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    async def trace(self, count: int) -> dict[str, Any]:
        """So many spans, by name; names are distinct."""
        await eventually(lambda: len(self.spans) >= count)
        spans = {span.name: span for span in self.spans}
        assert len(spans) == len(self.spans) == count, [span.name for span in self.spans]
        return spans


async def _accept(call: StubCall) -> None:
    assert call.path == b"/v1/traces" and call.headers[b"content-type"] == b"application/x-protobuf"
    await call.write(whole_answer(b"", kind=b"application/x-protobuf"))


@asynccontextmanager
async def collecting(*, sample_ratio: float = 1.0) -> AsyncIterator[tuple[Tracer, Collector]]:
    async with StubEngine(_accept) as stub:
        settings = TracingSettings(
            endpoint=f"{stub.endpoint}/v1/traces",
            sample_ratio=sample_ratio,
            process="edge",
            interval_s=0.02,
        )
        with tracing_to(settings) as tracer:
            yield tracer, Collector(stub)


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def lineage(spans: dict[str, Any], name: str) -> list[str]:
    """The span's forebears by name, the oldest first; a stranger as its id."""
    by_id = {span.span_id: span for span in spans.values()}
    span, line = spans[name], [name]
    while span.parent_span_id:
        parent = by_id.get(span.parent_span_id)
        if parent is None:
            return [span.parent_span_id.hex(), *line]
        line.insert(0, parent.name)
        span = parent
    return line


@pytest.mark.clause("SF-13", "SF-32")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_one_trace_goes_from_the_caller_to_the_engine(is_stream: bool) -> None:
    async def script(call: StubCall) -> None:
        if not is_stream:
            await call.write(whole_answer(b"{}"))
            return
        await call.start_events()
        await call.chunk(*sse_events(["a", "b"]))
        await call.end_chunks()

    body = BODY.replace(b"{", b'{"stream":true,', 1) if is_stream else BODY
    async with collecting() as (tracer, collector), fleet_of(tracer=tracer) as fleet:
        fleet.stub.script = script
        await fleet.post(body, b"Traceparent: " + PARENT, b"Tracestate: vendor=1", b"X-Request-Id: mine-7")
        spans = await collector.trace(5)
        told = fleet.stub.calls[0].headers
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    provider = "provider chat_completions"
    assert lineage(spans, provider) == [CALLER_SPAN, "chat_completions", "attempt", "node", provider]
    assert lineage(spans, "queue") == [CALLER_SPAN, "chat_completions", "queue"]
    engine = parse_trace(told[b"traceparent"].decode(), told[b"tracestate"].decode())
    assert engine is not None
    assert (engine.trace_id, engine.span_id) == (TRACE, spans[provider].span_id.hex())
    assert engine.state == "vendor=1" and engine.flags & 1
    root = attributes(spans["chat_completions"])
    assert root["iop.request_id"] == "mine-7" and root["iop.outcome"] == "complete"
    assert attributes(spans[provider])["http.response.status_code"] == 200
    assert [event.name for event in spans["attempt"].events] == ["first_byte"]
    for outer, inner in [("chat_completions", "attempt"), ("attempt", "node"), ("node", provider)]:
        assert spans[outer].start_time_unix_nano <= spans[inner].start_time_unix_nano
    assert not any(b"secret" in span.SerializeToString() for span in spans.values())


@pytest.mark.clause("SF-13")
@pytest.mark.parametrize(
    "fields",
    [
        (),
        (b"Traceparent: 00-%b-%b-01" % (b"0" * 32, CALLER_SPAN.encode()),),
        (b"Traceparent: " + PARENT, b"Traceparent: " + PARENT),
        (b"Traceparent: ff" + PARENT[2:],),
        (b"Traceparent: " + b"a" * 5000, b"Tracestate: vendor=1"),
    ],
    ids=["none", "zero", "two", "version", "long"],
)
async def test_a_hostile_context_is_ignored_and_a_new_trace_begins(fields: tuple[bytes, ...]) -> None:
    async with collecting() as (tracer, collector), fleet_of(tracer=tracer) as fleet:
        await fleet.post(BODY, *fields)
        spans = await collector.trace(5)
        told = fleet.stub.calls[0].headers
    traces = {span.trace_id.hex() for span in spans.values()}
    assert len(traces) == 1 and TRACE not in traces
    assert not spans["chat_completions"].parent_span_id
    engine = parse_trace(told[b"traceparent"].decode())
    assert engine is not None and engine.trace_id in traces
    assert b"tracestate" not in told


@pytest.mark.clause("SF-13")
async def test_without_a_tracer_a_good_context_passes_and_a_bad_one_does_not() -> None:
    async with fleet_of() as fleet:
        await fleet.post(BODY, b"Traceparent: " + PARENT, b"Tracestate: a=1", b"Tracestate: b=2")
        await fleet.post(BODY, b"Traceparent: " + PARENT + b"0", b"Tracestate: a=1")
        good, bad = fleet.stub.calls
    assert good.headers[b"traceparent"] == PARENT
    assert good.head.lower().count(b"tracestate:") == 2
    assert b"traceparent" not in bad.headers and b"tracestate" not in bad.headers


@pytest.mark.clause("SF-13", "SF-32")
async def test_a_run_carries_its_trace_to_the_engine() -> None:
    async def ollama(call: StubCall) -> None:
        lines = [
            {"message": {"role": "assistant", "content": "hi"}, "done": False},
            {"message": {"content": ""}, "done": True, "done_reason": "stop", "eval_count": 1},
        ]
        await call.write(whole_answer(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))

    async with collecting() as (tracer, collector), fleet_of(tracer=tracer, is_ollama=True) as fleet:
        fleet.stub.script = ollama
        status, _, _ = await fleet.post(BODY, b"Traceparent: " + PARENT)
        spans = await collector.trace(5)
        told = fleet.stub.calls[0].headers
    assert status == 200
    line = [CALLER_SPAN, "chat_completions", "attempt", "node", "provider run"]
    assert lineage(spans, "provider run") == line
    assert told[b"traceparent"].decode().split("-")[1:3] == [TRACE, spans["provider run"].span_id.hex()]


@pytest.mark.clause("SF-32")
async def test_a_failure_shows_on_every_hop_that_it_passed() -> None:
    async def script(call: StubCall) -> None:
        await call.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{")
        call.close()

    async with collecting() as (tracer, collector), fleet_of(tracer=tracer) as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: %d\r\n\r\n%b"
            % (len(BODY), BODY)
        )
        spans = await collector.trace(5)
    for name in ("chat_completions", "attempt", "provider chat_completions"):
        assert attributes(spans[name])["error.type"] == "upstream_truncated"
        assert spans[name].status.code == 2
    assert attributes(spans["chat_completions"])["iop.outcome"] == "upstream_truncated"


@pytest.mark.clause("SF-32")
async def test_a_refused_request_has_its_wait_and_no_attempt() -> None:
    async with collecting() as (tracer, collector), fleet_of(tracer=tracer) as fleet:
        await fleet.stop_node()
        status, _, _ = await fleet.post(BODY)
        spans = await collector.trace(2)
    assert status == 503
    assert attributes(spans["queue"])["error.type"] == "no_capacity"
    assert attributes(spans["chat_completions"])["iop.outcome"] == "rejected"


@pytest.mark.clause("SF-32")
async def test_a_caller_that_leaves_ends_its_spans() -> None:
    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*sse_events(["a"], finish=None, is_done=False))
        await call.wait_gone()

    async with collecting() as (tracer, collector), fleet_of(tracer=tracer) as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        body = BODY.replace(b"{", b'{"stream":true,', 1)
        await caller.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        await eventually(lambda: bool(fleet.stub.calls))
        await caller.close()
        spans = await collector.trace(5)
    assert attributes(spans["chat_completions"])["iop.outcome"] == "client_cancelled"
    assert "error.type" not in attributes(spans["chat_completions"])


@pytest.mark.clause("SF-13")
async def test_what_is_not_sampled_still_has_its_context_passed_on() -> None:
    async with collecting(sample_ratio=0.0) as (tracer, collector), fleet_of(tracer=tracer) as fleet:
        await fleet.post(BODY)
        await fleet.post(BODY, b"Traceparent: " + PARENT[:-2] + b"00")
        await fleet.post(BODY, b"Traceparent: " + PARENT)  # its caller records: so do we
        spans = await collector.trace(5)
        told = [parse_trace(call.headers[b"traceparent"].decode()) for call in fleet.stub.calls]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert [context is not None and context.flags & 1 for context in told] == [0, 0, 1]
    assert told[1] is not None and told[1].trace_id == TRACE


@pytest.mark.clause("SF-32")
async def test_a_collector_that_is_away_costs_callers_nothing_and_the_exit_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("iop.obs.otel.CLOSE_TIMEOUT_S", 0.5)  # far below what the exporter would take
    settings = TracingSettings(
        endpoint="http://127.0.0.1:9/v1/traces", sample_ratio=1.0, process="edge", interval_s=0.02
    )
    loop = asyncio.get_running_loop()
    with tracing_to(settings) as tracer:
        async with fleet_of(tracer=tracer) as fleet:
            for _ in range(20):
                status, _, _ = await fleet.post(BODY)
                assert status == 200
        closing_at = loop.time()
    assert loop.time() - closing_at < 4.0


# ---- logs ----


@pytest.mark.clause("SF-32")
@pytest.mark.parametrize("is_ollama", [False, True], ids=["tunnel", "run"])
@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "broken"])
async def test_one_request_id_stands_in_the_logs_of_edge_and_node_and_reaches_the_engine(
    is_ollama: bool, is_broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(call: StubCall) -> None:
        if is_broken:
            await call.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{")
            call.close()
        elif is_ollama:
            line = {"message": {"content": "hi"}, "done": True, "done_reason": "stop"}
            await call.write(whole_answer(json.dumps(line).encode() + b"\n"))
        else:
            await call.write(whole_answer(b"{}"))

    with caplog.at_level("INFO" if is_broken else "DEBUG", logger="iop"):
        async with fleet_of(is_ollama=is_ollama) as fleet:
            fleet.stub.script = script
            caller = await fleet.call()
            await caller.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nX-Request-Id: mine-9\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
            )
            await eventually(lambda: fleet.outcome("mine-9") is not None)
            told = fleet.stub.calls[0].headers
    lines = {
        record.message: record.__dict__
        for record in caplog.records
        if record.message in {"request.ended", "stream.ended"}
    }
    assert set(lines) == {"request.ended", "stream.ended"}
    assert {line["request_id"] for line in lines.values()} == {"mine-9"}
    assert len({line["run_id"] for line in lines.values()}) == 1
    assert lines["stream.ended"]["error"] == ("upstream_truncated" if is_broken else "")
    assert not any("secret" in str(line) for line in lines.values())
    if not is_ollama:
        assert told[b"x-request-id"] == b"mine-9"
