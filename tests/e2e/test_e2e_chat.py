"""The public API through the whole path, by the official client and by raw bytes."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.request
from typing import Any

import openai
import pytest
from e2e_fleet import STORY, Fleet, eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=fleet.base_url, api_key="none", max_retries=0, timeout=30)


@pytest.mark.clause("SF-01", "SF-02")
def test_the_official_client_lists_the_model_and_streams_a_chat(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == "iop-tiny"
    parts = list(
        client.chat.completions.create(
            model="iop-tiny",
            messages=STORY,  # type: ignore[arg-type]
            stream=True,
            max_tokens=40,
            temperature=0,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert len(text.split()) > 3
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens <= 40
    whole = client.chat.completions.create(
        model="iop-tiny",
        messages=STORY,
        max_tokens=40,
        temperature=0,  # type: ignore[arg-type]
    )
    assert whole.choices[0].message.content == text, "streamed and whole answers are the same greedy text"


@pytest.mark.clause("SF-03", "EN-53")
def test_the_body_is_the_engines_own_byte_for_byte(fleet: Fleet) -> None:
    body = {
        "model": "iop-tiny",
        "messages": STORY,
        "max_tokens": 12,
        "temperature": 0,
        "seed": 1,
        "stream": True,
    }

    def ask(address: str) -> bytes:
        request = urllib.request.Request(
            f"http://{address}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def without_ids(stream: bytes) -> list[Any]:
        events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        shown = [json.loads(event) for event in events[:-1]]
        for event in shown:
            event.pop("id")
            event.pop("created")
        return shown

    assert without_ids(ask(fleet.run["http"])) == without_ids(ask(fleet.run["engine"]["http"]))


@pytest.mark.clause("SF-04", "SF-09")
def test_our_headers_tell_request_provider_and_origin(fleet: Fleet) -> None:
    connection = http.client.HTTPConnection(fleet.run["http"], timeout=30)
    body = json.dumps({"model": "iop-tiny", "messages": STORY, "max_tokens": 2})
    connection.request("POST", "/v1/chat/completions", body, {"x-request-id": "mine-1"})
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-iop-provider"]
    assert answer.headers["x-iop-weight-version"] == "first"
    assert answer.headers["x-iop-origin"] is None
    explained = json.loads(fleet.iop("explain", "mine-1", "--json").stdout)
    assert explained["outcome"] == "complete"

    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "nobody", "messages": STORY}))
    refused = connection.getresponse()
    error = json.loads(refused.read())["error"]
    assert refused.status == 404
    assert refused.headers["x-iop-origin"] == "edge"
    assert refused.headers["x-iop-reason"] == error["code"]
    connection.close()


@pytest.mark.clause("SF-07", "EN-56", "EN-112")
def test_a_client_killed_mid_stream_frees_engine_and_lease(fleet: Fleet) -> None:
    before = fleet.engine_counters()
    host, _, port = fleet.run["http"].rpartition(":")
    body = json.dumps(
        {"model": "iop-tiny", "messages": STORY, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    )
    with socket.create_connection((host, int(port)), timeout=30) as caller:
        caller.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        received = b""
        while received.count(b"data: ") < 5:
            received += caller.recv(4096)
        assert fleet.leases() == 1
        assert fleet.engine_counters()["running"] == 1

    gone = eventually(lambda: fleet.engine_counters()["running"] == 0, "the engine's request is gone")
    eventually(lambda: fleet.leases() == 0, "the lease is back")
    after = fleet.engine_counters()
    assert after["requests_cancelled"] == before["requests_cancelled"] + 1, (
        f"gone after {gone:.3f} s, not finished"
    )


@pytest.mark.clause("SF-06", "SF-12")
@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (
            '{"model": "iop-tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": '
            + "9" * 300
            + "}",
            {400},
        ),
        ("this is not JSON", {400}),
        ('{"model": 3, "messages": []}', {400}),
        ('{"messages": []}', {400}),
        ("[" * 400 + "]" * 400, {400}),
        ("", {400}),
    ],
)
def test_bad_input_is_answered_clearly_and_nothing_hangs(fleet: Fleet, body: str, statuses: set[int]) -> None:
    connection = http.client.HTTPConnection(fleet.run["http"], timeout=60)
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    connection.close()
    assert answer.status in statuses
    assert error["message"]
    assert fleet.leases() == 0
