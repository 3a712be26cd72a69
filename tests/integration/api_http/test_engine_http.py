"""The reference engine's own HTTP routes, by the official client and by raw callers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from iop.api.http.engine import EngineHttp
from iop.api.http.limits import HttpLimits
from iop.api.http.server import HttpServer
from iop.engine import Engine
from iop.testing.http_site import RawCaller, SystemClock
from iop.testing.waiting import SOON_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Place:
    """One engine behind one listener, for all tests here: starting ranks takes its time."""

    def __init__(self, engine: Engine, port: int) -> None:
        self.engine = engine
        self.port = port
        self.model = engine.info.model_id

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    async def call(self) -> RawCaller:
        return RawCaller(*await asyncio.open_connection("127.0.0.1", self.port))

    async def post(self, path: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
        caller = await self.call()
        head = f"POST {path} HTTP/1.1\r\nHost: e\r\nContent-Length: {len(body)}\r\n\r\n"
        await caller.send(head.encode() + body)
        answer = await caller.read_answer()
        await caller.close()
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[Place]:
    numbers = itertools.count()
    clock = SystemClock()
    async with Engine() as engine:
        handler = EngineHttp(
            engine, limits=HttpLimits(), clock=clock, make_id=lambda: f"test-{next(numbers)}"
        )
        async with HttpServer(handler, limits=HttpLimits(), clock=clock) as server:
            _, port = await server.listen("127.0.0.1", 0)
            yield Place(engine, port)


ASK = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.mark.clause("SF-02")
async def test_the_official_client_lists_the_model(place: Place) -> None:
    async with place.client() as client:
        models = [model.id async for model in await client.models.list()]
        assert models == [place.model]
        assert (await client.models.retrieve(place.model)).id == place.model
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("nobody")
        assert caught.value.code == "model_not_found"


@pytest.mark.clause("SF-02")
async def test_a_streamed_chat_says_what_the_whole_one_says(place: Place) -> None:
    async with place.client() as client:
        whole = await client.chat.completions.create(
            model=place.model, messages=ASK, temperature=0, max_tokens=24
        )
        stream = await client.chat.completions.create(
            model=place.model,
            messages=ASK,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.clause("SF-02")
async def test_alternatives_log_probabilities_and_stops(place: Place) -> None:
    async with place.client() as client:
        answer = await client.chat.completions.create(
            model=place.model, messages=ASK, n=3, seed=1, max_tokens=5, logprobs=True, top_logprobs=2
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content
            assert len(choice.logprobs.content[0].top_logprobs) == 2
            assert "".join(item.token for item in choice.logprobs.content).startswith(
                choice.message.content or ""
            )
        whole = await client.chat.completions.create(
            model=place.model, messages=ASK, temperature=0, max_tokens=24
        )
        text = whole.choices[0].message.content or ""
        word = text.split()[2]
        stopped = await client.chat.completions.create(
            model=place.model, messages=ASK, temperature=0, max_tokens=24, stop=word
        )
        assert stopped.choices[0].message.content == text.partition(word)[0]
        assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.clause("SF-02")
async def test_completions_take_many_prompts_echo_and_stream(place: Place) -> None:
    async with place.client() as client:
        answer = await client.completions.create(
            model=place.model,
            prompt=["The sea", "The hill"],
            max_tokens=4,
            temperature=0,
            echo=True,
            logprobs=1,
            n=1,
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].text.startswith("The sea")
        logprobs = answer.choices[1].logprobs
        assert logprobs is not None
        assert logprobs.text_offset == [
            len("".join((logprobs.tokens or [])[:n])) for n in range(len(logprobs.tokens or []))
        ]
        assert "".join(logprobs.tokens or ()) == answer.choices[1].text
        stream = await client.completions.create(
            model=place.model, prompt=["The sea", "The hill"], max_tokens=4, temperature=0, stream=True
        )
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert ["The sea" + texts[0], "The hill" + texts[1]] == [c.text for c in answer.choices]


@pytest.mark.clause("SF-06")
@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"max_tokens": int("9" * 300)}, "invalid_request", "max_tokens"),
        ({"max_tokens": "many"}, "invalid_request", "max_tokens"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"temperature": -1}, "invalid_request", "temperature"),
        ({"n": 1000}, "invalid_request", "n"),
        ({"messages": []}, "invalid_request", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_field",
            "messages[0].content",
        ),
        ({"messages": [{"role": 7}]}, "invalid_request", "messages[0].role"),
        ({"tools": [{"type": "function"}]}, "unsupported_field", "tools"),
        ({"model": None}, "invalid_request", "model"),
        ({"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
        ({"logprobs": True, "top_logprobs": 99}, "invalid_request", "top_logprobs"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "context_exceeded", "messages"),
    ],
)
async def test_a_bad_field_is_a_clear_400(
    place: Place, change: dict[str, object], code: str, param: str | None
) -> None:
    body = json.dumps({"model": place.model, "messages": ASK} | change).encode()
    status, headers, answer = await place.post("/v1/chat/completions", body)
    assert status == 400, answer
    assert b"x-request-id" in headers
    error = json.loads(answer)["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    if param is not None:
        assert error["param"] == param
        assert param.partition("[")[0] in error["message"]


@pytest.mark.clause("SF-06")
async def test_a_bad_token_id_is_told_by_the_bodys_own_field(place: Place) -> None:
    body = json.dumps({"model": place.model, "prompt": [999_999]}).encode()
    status, _, answer = await place.post("/v1/completions", body)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "prompt")
    assert "`prompt`" in error["message"]


@pytest.mark.clause("SF-06")
@pytest.mark.parametrize("body", [b"hello", b"", b"{", b'{"a":', b"\xff\xfe", b"[]", b"[" * 50_000])
async def test_a_body_that_is_not_json_is_a_clear_400(place: Place, body: bytes) -> None:
    status, _, answer = await place.post("/v1/chat/completions", body)
    assert status == 400
    assert b"JSON" in answer or b"object" in answer or b"nested" in answer


async def test_a_number_of_five_thousand_digits_is_a_clear_400(place: Place) -> None:
    body = b'{"model":"m","messages":[],"max_tokens":' + b"9" * 5000 + b"}"
    status, _, answer = await place.post("/v1/chat/completions", body)
    assert (status, json.loads(answer)["error"]["param"]) == (400, "max_tokens")


async def test_unknown_paths_and_methods_say_what_there_is(place: Place) -> None:
    status, _, answer = await place.post("/v1/embeddings", b"{}")
    assert (status, b"/v1/chat/completions" in answer) == (404, True)
    status, headers, _ = await place.post("/v1/models", b"{}")
    assert (status, headers[b"allow"]) == (405, b"GET, HEAD")


@pytest.mark.clause("SF-07")
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("is_polite", [True, False])
async def test_the_generation_ends_when_its_caller_leaves(
    place: Place, is_stream: bool, is_polite: bool
) -> None:
    body = json.dumps(
        {
            "model": place.model,
            "messages": ASK,
            "stream": is_stream,
            "ignore_eos": True,
            "n": 4,
            "max_tokens": 1500,
        }
    ).encode()
    before = place.engine.counters().requests_cancelled
    caller = await place.call()
    await caller.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    if is_stream:
        await caller.read_until(b"data: ")
    await eventually(lambda: place.engine.counters().running > 0)
    if is_polite:
        await caller.close()
    else:
        caller.reset()
    await eventually(lambda: place.engine.counters().requests_cancelled == before + 1, within_s=SOON_S)
    await eventually(lambda: place.engine.counters().running == 0, within_s=SOON_S)


async def test_counting_tokens_agrees_with_usage(place: Place) -> None:
    body = json.dumps({"model": place.model, "messages": ASK, "max_tokens": 1}).encode()
    _, _, counted = await place.post("/v1/chat/completions/input_tokens", body)
    _, _, answered = await place.post("/v1/chat/completions", body)
    assert json.loads(counted)["input_tokens"] == json.loads(answered)["usage"]["prompt_tokens"]
    _, _, tokens = await place.post("/tokenize", b'{"prompt":"The sea"}')
    assert place.engine.detokenize(json.loads(tokens)["tokens"]) == "The sea"


async def test_health_and_metrics(place: Place) -> None:
    caller = await place.call()
    await caller.send(b"GET /health HTTP/1.1\r\nHost: e\r\n\r\n")
    assert (await caller.read_answer())[2] == b'{"status":"serving"}'
    await caller.send(b"GET /metrics HTTP/1.1\r\nHost: e\r\n\r\n")
    _, _, text = await caller.read_answer()
    assert b"# TYPE iop_engine_tokens_generated_total counter\n" in text
    await caller.close()


@pytest.mark.clause("SF-06")
async def test_a_compressed_body_is_refused_by_the_engine_too(place: Place) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        caller = await place.call()
        head = f"POST {path} HTTP/1.1\r\nHost: e\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n"
        await caller.send(head.encode() + b"\x1f\x8b\x08")
        status, fields, text = await caller.read_answer()
        await caller.close()
        assert (status, fields[b"accept-encoding"]) == (415, b"identity")
        assert json.loads(text)["error"]["code"] == "content_encoding"
