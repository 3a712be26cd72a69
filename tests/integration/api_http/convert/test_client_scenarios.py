"""The shared scenario list: every dialect's official client, sync and async, on every kind of target."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from client_scenarios import SCENARIOS, Bench, Driver, scripted
from dialect_clients import TALKS, Ask
from http_fleet import HttpFleet, fleet_of

from iop.api.http.keys import ApiKeySpec
from iop.edge.snapshot import DispatchLimits
from iop.testing.stub_engine import StubCall, whole_answer
from iop.testing.waiting import SOON_S, eventually

KINDS = {
    "chat": {"operations": frozenset({"chat_completions"})},
    "messages": {"operations": frozenset({"messages"})},
    "responses": {"operations": frozenset({"responses"})},
    "run": {"is_ollama": True},
}


@asynccontextmanager
async def target(kind: str, **more: Any) -> AsyncIterator[HttpFleet]:
    async with fleet_of(**KINDS[kind], **more) as fleet:
        fleet.stub.script = scripted(kind)
        yield fleet
        await fleet.settled()


@pytest.mark.slow
@pytest.mark.clause("SF-01", "SF-02", "SF-06", "SF-07", "SF-10", "EN-65")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dialect", TALKS)
@pytest.mark.parametrize("client", ["sync", "async"])
async def test_every_scenario_of_a_client_on_a_target(client: str, dialect: str, kind: str) -> None:
    async with target(kind) as fleet, Driver(dialect, fleet.url, is_sync=client == "sync") as driver:
        for scenario in SCENARIOS:
            if dialect not in scenario.dialects or kind in scenario.unsaid:
                continue
            try:
                await scenario.check(Bench(driver=driver, fleet=fleet, dialect=dialect, kind=kind))
                await fleet.settled()
            except BaseException as error:
                error.add_note(f"scenario: {scenario.name}")
                raise


class Chain:
    """Two Edges in a row, to a scenario like one: callers speak to the outer, the engine is behind the inner."""

    def __init__(self, outer: HttpFleet, inner: HttpFleet) -> None:
        self._edges = (outer, inner)
        self.url = outer.url
        self.stub = inner.stub

    async def settled(self) -> None:
        for edge in self._edges:
            await edge.settled()


@asynccontextmanager
async def in_row(edges: int, **more: Any) -> AsyncIterator[HttpFleet | Chain]:
    """One Edge, or two in a row."""
    if edges == 1:
        async with fleet_of(**more) as fleet:
            yield fleet
        return
    names = ("fast-latest", "org/Real-8B-Instruct")  # the outer Edge asks by the second
    async with (
        fleet_of(aliases=names, **more) as inner,
        fleet_of(endpoint=inner.url.removesuffix("/v1"), bound_s=100.0) as outer,
    ):
        yield Chain(outer, inner)


@pytest.mark.slow
@pytest.mark.clause("SF-01", "SF-02", "SF-06", "SF-07", "SF-24")
@pytest.mark.parametrize("kind", KINDS)
async def test_every_scenario_of_the_clients_passes_through_two_edges(kind: str) -> None:
    async with in_row(2, **KINDS[kind]) as chain:
        chain.stub.script = scripted(kind)
        for dialect, is_sync in itertools.product(TALKS, (False, True)):
            if is_sync and dialect != kind:
                continue  # the clients differ in how they wait, not in what they say
            async with Driver(dialect, chain.url, is_sync=is_sync) as driver:
                bench = Bench(driver=driver, fleet=chain, dialect=dialect, kind=kind)
                for scenario in SCENARIOS:
                    if dialect not in scenario.dialects or kind in scenario.unsaid:
                        continue
                    if scenario.takes_a_second and (is_sync or not dialect == kind == "chat"):
                        continue  # what takes so long is the client's own waiting
                    try:
                        await scenario.check(bench)
                        await chain.settled()
                    except BaseException as error:
                        error.add_note(f"scenario: {scenario.name}, {dialect}, sync: {is_sync}")
                        raise


@pytest.mark.clause("SF-02", "SF-11", "EN-110")
@pytest.mark.parametrize("dialect", TALKS)
@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
async def test_clients_wait_out_our_own_429(dialect: str, is_sync: bool) -> None:
    spec = ApiKeySpec(name="k", sha256=hashlib.sha256(b"k").digest(), concurrent=1)
    async with target("chat", keys=(spec,)) as fleet, Driver(dialect, fleet.url, is_sync=is_sync) as driver:
        holder = await fleet.call()
        body = json.dumps(TALKS["chat"].params(Ask("do:hold now")) | {"stream": True})
        await holder.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer k\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body.encode())
        )
        await eventually(lambda: fleet.leases == 1)
        with pytest.raises(driver.talk.errors.RateLimitError) as caught:
            await driver.call(driver.params(Ask("hello")))
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.response.headers["x-iop-reason"] == "key_concurrency"

        async def give_way() -> None:
            await eventually(lambda: fleet.surface.figures.refusals["key_concurrency"] >= 2)
            await holder.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(give_way())
            answer = await driver.call(driver.params(Ask("hello")), max_retries=3)
        assert driver.talk.whole(answer).text == "Héllo 🚀"


@pytest.mark.slow
@pytest.mark.clause("SF-02", "SF-06", "SF-12", "SF-14")
@pytest.mark.parametrize("kind", KINDS)
async def test_our_time_limits_are_typed_errors_of_every_client(kind: str) -> None:
    """Nothing in time is a 504; a stream that is cut by its limit raises, or ends in its dialect's failure."""
    limits = DispatchLimits(first_byte_timeout_s=0.3, total_timeout_s=1.0)

    async def judge(fleet: HttpFleet, dialect: str) -> None:
        async with Driver(dialect, fleet.url, is_sync=False) as driver:
            for is_stream in (False, True):
                with pytest.raises(driver.talk.errors.InternalServerError) as late:
                    await driver.call(driver.params(Ask("do:hang now"), is_stream=is_stream))
                assert late.value.status_code == 504
                assert late.value.response.headers["x-iop-reason"] == "timeout"
            raised, events = "", []
            try:
                events = await driver.call(driver.params(Ask("do:hold now"), is_stream=True))
            except driver.talk.errors.APIError as error:
                raised = str(error)
            if not events:
                assert "did not answer in time" in raised
            else:
                assert (dialect, events[-1].type) == ("responses", "response.failed")
                assert events[-1].response.error.code == "timeout"

    async with target(kind, dispatch_limits=limits) as fleet, asyncio.TaskGroup() as tasks:
        for dialect in TALKS:
            tasks.create_task(judge(fleet, dialect))


# ---- routes without a dialect of turns ----


async def texts_engine(call: StubCall) -> None:
    """Completions, embeddings and token counts."""
    body = call.json
    if call.path == b"/v1/embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]
        answer: dict[str, Any] = {"object": "list", "model": "real", "data": data}
        answer["usage"] = {"prompt_tokens": 3, "total_tokens": 3}
        if body.get("encoding_format") == "base64":
            data[0]["embedding"] = "AAAAPwAAgL8="  # type: ignore[assignment]
        await call.write(whole_answer(json.dumps(answer).encode()))
    elif call.path == b"/v1/messages/count_tokens":
        await call.write(whole_answer(b'{"input_tokens":7}'))
    elif body["prompt"] == "do:limited" and len(body.get("user", "")) and call.body not in SEEN:
        SEEN.add(call.body)
        await call.write(whole_answer(b'{"error":{"message":"slow"}}', b"Retry-After: 1", status=b"429 Slow"))
    elif body["prompt"] == "do:hang":
        await call.wait_gone(within_s=20)
    elif body.get("stream"):
        choice = {"text": "hi", "logprobs": None, "finish_reason": None}
        count = body.get("n", 1)
        frame = {"id": "c", "object": "text_completion", "created": 1, "model": "real"}
        events = [frame | {"choices": [choice | {"index": index}]} for index in range(count)]
        events += [
            frame | {"choices": [choice | {"index": index, "text": "", "finish_reason": "stop"}]}
            for index in range(count)
        ]
        if body.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            events.append(frame | {"choices": [], "usage": usage})
        await call.start_events()
        for event in events:
            await call.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        if body["prompt"] == "do:hold":
            await call.wait_gone(within_s=20)
        await call.chunk(b"data: [DONE]\n\n")
        await call.end_chunks()
    else:
        logprobs = {"tokens": ["hi"], "token_logprobs": [-0.5]} if body.get("logprobs") else None
        choice = {"text": "hi", "logprobs": logprobs, "finish_reason": "stop"}
        answer = {"id": "c", "object": "text_completion", "created": 1, "model": "real"}
        answer["choices"] = [choice | {"index": index} for index in range(body.get("n", 1))]
        await call.write(whole_answer(json.dumps(answer).encode()))


SEEN: set[bytes] = set()


async def ask(is_sync: bool, url: str, use: Any, *, api: Any = openai, **options: Any) -> Any:
    """Use the sync client in a thread, or the async one here; ``use`` gets it and returns what to await."""
    if api is anthropic:
        url = url.removesuffix("/v1")
    options = {"base_url": url, "api_key": "k", "max_retries": 0, **options}
    if is_sync:
        with (api.OpenAI if api is openai else api.Anthropic)(**options) as client:
            return await asyncio.to_thread(lambda: _listed(use(client)))
    async with (api.AsyncOpenAI if api is openai else api.AsyncAnthropic)(**options) as client:
        answer = await use(client)
        return [event async for event in answer] if hasattr(answer, "__aiter__") else answer


def _listed(answer: Any) -> Any:
    return list(answer) if isinstance(answer, openai.Stream) else answer


ROWS = [(1, False), (1, True), (2, False)]
"""How many Edges in a row, and which client."""
ROW_IDS = ["async", "sync", "two Edges"]


@pytest.mark.slow
@pytest.mark.clause("SF-01", "SF-02", "SF-24")
@pytest.mark.parametrize(("edges", "is_sync"), ROWS, ids=ROW_IDS)
async def test_completions_by_the_official_client(edges: int, is_sync: bool) -> None:
    SEEN.clear()
    async with in_row(edges) as fleet:
        fleet.stub.script = texts_engine

        async def complete(prompt: str = "p", *, timeout: float = 60.0, retries: int = 0, **more: Any) -> Any:
            return await ask(
                is_sync,
                fleet.url,
                lambda client: client.completions.create(model="fast", prompt=prompt, **more),
                timeout=timeout,
                max_retries=retries,
            )

        assert (await complete()).choices[0].text == "hi"
        assert [choice.text for choice in (await complete(n=2)).choices] == ["hi", "hi"]
        assert (await complete(logprobs=1)).choices[0].logprobs.token_logprobs == [-0.5]
        chunks = await complete(n=2, stream=True, stream_options={"include_usage": True})
        assert [choice.index for chunk in chunks for choice in chunk.choices] == [0, 1, 0, 1]
        assert chunks[-1].usage.total_tokens == 5
        with pytest.raises(openai.NotFoundError):
            await ask(is_sync, fleet.url, lambda c: c.completions.create(model="nobody", prompt="p"))
        assert (await complete("do:limited", retries=1, user="u")).choices[0].text == "hi"
        with pytest.raises(openai.APITimeoutError):
            await complete("do:hang", timeout=1.0)
        await fleet.stub.calls[-1].wait_gone(within_s=SOON_S)
        await fleet.settled()


@pytest.mark.clause("SF-01", "SF-02", "SF-10")
@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
async def test_completions_over_a_run_by_the_official_client(is_sync: bool) -> None:
    async def runs(call: StubCall) -> None:
        (message,) = call.json["messages"]
        options = call.json["options"]
        if message["content"] == "do:hold":
            await call.start_events()
            await call.chunk(b'{"message":{"content":"a"},"done":false}\n')
            await call.wait_gone(within_s=20)
        text, reason = ("h", "length") if options.get("num_predict") == 1 else ("hi", "stop")
        lines: list[Any] = [{"message": {"content": text}, "done": False}]
        lines.append({"done": True, "done_reason": reason, "prompt_eval_count": 3, "eval_count": 2})
        await call.write(whole_answer(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))

    async with fleet_of(is_ollama=True) as fleet:
        fleet.stub.script = runs

        async def complete(prompt: str = "p", **more: Any) -> Any:
            return await ask(
                is_sync,
                fleet.url,
                lambda client: client.completions.create(model="fast", prompt=prompt, **more),
            )

        answer = await complete(stop=["x"], temperature=0.5)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hi", "stop")
        assert (answer.object, answer.usage.total_tokens) == ("text_completion", 5)
        assert fleet.stub.calls[-1].json["options"] == {"stop": ["x"], "temperature": 0.5}
        answer = await complete(max_tokens=1)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("h", "length")
        chunks = await complete(stream=True, stream_options={"include_usage": True})
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "hi"
        assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 5)
        asked = len(fleet.stub.calls)
        for field, value in {"n": 2, "best_of": 2, "logprobs": 1, "echo": True, "suffix": "s"}.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await complete(**{field: value})
            assert caught.value.param == field
        assert len(fleet.stub.calls) == asked
        await fleet.settled()


@pytest.mark.clause("SF-01", "SF-02", "SF-24")
@pytest.mark.parametrize(("edges", "is_sync"), ROWS, ids=ROW_IDS)
async def test_embeddings_by_the_official_client(edges: int, is_sync: bool) -> None:
    async with in_row(edges) as fleet:
        fleet.stub.script = texts_engine
        for coding in ("float", "base64", None):  # without one the client asks for base64 itself
            more = {} if coding is None else {"encoding_format": coding}
            answer = await ask(
                is_sync,
                fleet.url,
                lambda client, more=more: client.embeddings.create(model="fast", input="x", **more),
            )
            wanted = "AAAAPwAAgL8=" if coding == "base64" else [0.5, -1.0]
            assert answer.data[0].embedding == wanted


@pytest.mark.clause("SF-01", "SF-02", "SF-14", "SF-24")
@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize(("edges", "is_sync"), ROWS, ids=ROW_IDS)
async def test_tokens_are_counted_by_the_official_client_on_every_target(
    edges: int, is_sync: bool, kind: str | None
) -> None:
    async with in_row(edges, **({} if kind is None else KINDS[kind])) as fleet:
        fleet.stub.script = texts_engine
        raw = await ask(
            is_sync,
            fleet.url,
            lambda client: client.messages.with_raw_response.count_tokens(
                model="fast", messages=[{"role": "user", "content": "hello there"}]
            ),
            api=anthropic,
        )
        is_exact = kind is None
        assert raw.headers.get("x-iop-estimate") == (None if is_exact else "1")
        body = raw.parse()
        count = (body if is_sync else await body).input_tokens
        assert count == 7 if is_exact else count > 0


@pytest.mark.clause("SF-01", "SF-02")
@pytest.mark.parametrize("route", ["completions", "embeddings"])
@pytest.mark.parametrize("kind", ["chat", "messages", "responses"])
async def test_what_no_provider_offers_is_a_404_that_names_what_is(route: str, kind: str) -> None:
    async with target(kind) as fleet:
        more = {"prompt": "p"} if route == "completions" else {"input": "x"}
        for is_sync in (False, True):
            with pytest.raises(openai.NotFoundError) as caught:
                await ask(
                    is_sync, fleet.url, lambda client: getattr(client, route).create(model="fast", **more)
                )
            assert caught.value.code == "operation_not_supported"
            offered = "chat_completions" if kind == "chat" else kind
            assert offered in str(caught.value)


@pytest.mark.clause("SF-01", "SF-02")
@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
async def test_models_are_listed_and_shown_by_both_official_clients(is_sync: bool) -> None:
    async with fleet_of() as fleet:
        for api in (openai, anthropic):
            page = await ask(is_sync, fleet.url, _page, api=api)
            listed = page if isinstance(page, list) else page.data
            assert [model.id for model in listed] == ["fast"]
            shown = await ask(
                is_sync, fleet.url, lambda client: client.models.retrieve("fast-latest"), api=api
            )
            assert shown.id == "fast" and shown.iop["endpoints"]["/v1/messages"] == ["tunnel"]
            with pytest.raises(api.NotFoundError):
                await ask(is_sync, fleet.url, lambda client: client.models.retrieve("nobody"), api=api)


def _page(client: Any) -> Any:
    return client.models.list()


def test_every_row_is_run_somewhere_and_every_exclusion_has_its_reason() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)
    for scenario in SCENARIOS:
        assert scenario.dialects and set(scenario.dialects) <= set(TALKS)
        assert {*scenario.refused, *scenario.unsaid} < set(KINDS)
        assert all(len(reason) > 20 for reason in scenario.unsaid.values())
        for told in scenario.refused.values():
            assert isinstance(told, str) or set(told) == set(scenario.dialects)
        if scenario.refused:
            assert set(scenario.params) == set(scenario.dialects)
