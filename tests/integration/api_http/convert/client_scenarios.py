"""The one list of what callers do with the official clients, and who cannot be asked for which of it.

A row is a scenario; it is run by the sync and the async client of each dialect that has a word for it, against each
kind of target: a tunnel in that dialect, a provider of another one, a provider of normalised runs. Where the target
cannot say what is asked, the row names the field that the 400 must name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import pytest
from dialect_clients import TALKS, Ask, Said
from scripted_backends import BACKENDS

from iop.testing.stub_engine import Script, StubCall, StubEngine, whole_answer
from iop.testing.waiting import SOON_S

HOLD_AFTER = {"chat": 2, "messages": 4, "responses": 4, "run": 1}
"""Chunks after which a held stream says no more; the first text is among them."""


def scripted(kind: str) -> Script:
    """The backend of one kind, which also obeys ``do:`` words in what it is asked, whatever its dialect."""
    limited: set[bytes] = set()

    async def serve(call: StubCall) -> None:
        word = call.body.partition(b"do:")[2].partition(b" ")[0].decode()
        verb, _, rest = word.partition("-")
        if verb == "status":
            await call.write(refusal(kind, int(rest)))
        elif verb == "limited" and call.body not in limited:
            limited.add(call.body)
            await call.write(refusal(kind, 429, b"Retry-After: 1"))
        elif verb == "hang":
            await call.wait_gone(within_s=20)
        elif verb == "hold":
            await hold(call)
        else:
            await BACKENDS[kind](call)

    async def hold(call: StubCall) -> None:
        say, left = call.chunk, HOLD_AFTER[kind]

        async def chunk(*parts: bytes) -> None:
            nonlocal left
            if not left:
                await call.wait_gone(within_s=20)
                raise ConnectionResetError
            left -= 1
            await say(*parts)

        call.chunk = chunk  # type: ignore[method-assign]
        await BACKENDS[kind](call)

    return serve


def refusal(kind: str, status: int, *headers: bytes) -> bytes:
    """A provider's own error in its dialect."""
    if kind == "run":
        body: dict[str, Any] = {"error": "no good"}
    elif kind == "messages":
        body = {"type": "error", "error": {"type": "invalid_request_error", "message": "no good"}}
    else:
        body = {"error": {"message": "no good", "type": "x", "param": None, "code": "own_code"}}
    return whole_answer(json.dumps(body).encode(), *headers, status=b"%d Refused" % status)


class Driver:
    """One official client, sync or async, behind one face; use as ``async with``."""

    def __init__(self, dialect: str, url: str, *, is_sync: bool) -> None:
        self.talk: Any = TALKS[dialect]
        self.is_sync = is_sync
        self._client = self.talk.client(url, is_sync=is_sync)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.is_sync:
            self._client.close()
        else:
            await self._client.close()

    async def call(self, params: Mapping[str, Any], *, leave_after: int = 0, **options: Any) -> Any:
        """What the client gives back: an object, or all events of a stream (the first ``leave_after``)."""
        create = self.talk.call(self._client.with_options(**options) if options else self._client)
        if self.is_sync:
            return await asyncio.to_thread(self._sync, create, params, leave_after)
        answer = await create(**params)
        if not params.get("stream"):
            return answer
        events = []
        async for event in answer:
            events.append(event)
            if len(events) == leave_after:
                await answer.close()
                break
        return events

    def _sync(self, create: Any, params: Mapping[str, Any], leave_after: int) -> Any:
        answer = create(**params)
        if not params.get("stream"):
            return answer
        events = []
        for event in answer:
            events.append(event)
            if len(events) == leave_after:
                answer.close()
                break
        return events

    def params(self, ask: Ask, *, is_stream: bool = False, **more: Any) -> dict[str, Any]:
        """The request in this dialect."""
        return {**self.talk.params(ask), **(self.talk.stream_params() if is_stream else {}), **more}

    async def say(self, ask: Ask, *, is_stream: bool, **more: Any) -> Said:
        """Ask, and read the answer in no dialect's words."""
        answer = await self.call(self.params(ask, is_stream=is_stream, **more))
        said: Said = self.talk.streamed(answer) if is_stream else self.talk.whole(answer)
        return said


class Target(Protocol):
    """What scenarios need of that which is asked."""

    stub: StubEngine


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a scenario runs on.

    Attributes:
        model: what answers call the model; empty: as the target of this kind does.
        tells_reasoning: whether the target has a word for it.
    """

    driver: Driver
    fleet: Target
    dialect: str
    kind: str
    model: str = ""
    tells_reasoning: bool = True

    @property
    def is_tunnel(self) -> bool:
        return self.dialect == self.kind


Check = Callable[[Bench], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row.

    Attributes:
        run: asks, and judges what came.
        dialects: those that have a word for it.
        refused: targets that cannot be told, each with the field that the refusal names; by dialect if they differ.
        params: what a refused request says more than a plain one.
        unsaid: targets that the row does not apply to, each with the reason.
        takes_a_second: the client itself waits that long.
    """

    name: str
    run: Check
    dialects: tuple[str, ...] = ("chat", "responses", "messages")
    refused: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unsaid: Mapping[str, str] = field(default_factory=dict)
    takes_a_second: bool = False

    async def check(self, bench: Bench) -> None:
        """Run it, or see it refused by name with nothing sent."""
        named = self.refused.get(bench.kind)
        if named is None:
            await self.run(bench)
            return
        wanted = named if isinstance(named, str) else named[bench.dialect]
        sent = len(bench.fleet.stub.calls)
        for is_stream in (False, True):
            with pytest.raises(bench.driver.talk.errors.BadRequestError) as caught:
                await bench.driver.call(
                    bench.driver.params(Ask("hello"), is_stream=is_stream, **self.params[bench.dialect])
                )
            assert wanted in str(caught.value)
            assert caught.value.response.headers["x-iop-origin"] == "edge"
            if bench.dialect != "messages":
                assert caught.value.param == wanted
        assert len(bench.fleet.stub.calls) == sent


# ---- the scenarios ----


async def plain(bench: Bench) -> None:
    for is_stream in (False, True):
        said = await bench.driver.say(Ask("hello"), is_stream=is_stream)
        assert (said.text, said.stop, said.tokens) == ("Héllo 🚀", "stop", (3, 2))
        assert said.model == (bench.model or ("org/Real-8B-Instruct" if bench.kind == "run" else "real"))


async def parallel_tools(bench: Bench) -> None:
    for is_stream in (False, True):
        said = await bench.driver.say(Ask("weather?", with_tools=True), is_stream=is_stream)
        assert said.calls == [("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})]
        assert (said.text, said.stop) == ("Let me see. ", "tool_calls")


async def tool_results(bench: Bench) -> None:
    for is_stream in (False, True):
        said = await bench.driver.say(Ask("weather?", results=("sun", "rain")), is_stream=is_stream)
        assert said.text == "It is sun and rain"


async def reasoning(bench: Bench) -> None:
    for is_stream in (False, True):
        said = await bench.driver.say(Ask("think"), is_stream=is_stream)
        assert said.text == "42"
        if not bench.tells_reasoning:
            assert said.reasoning == ""
            continue
        # On its own tunnel a chat's reasoning has the field that its provider chose.
        assert said.reasoning == "Hm, six by seven." or (bench.dialect == bench.kind == "chat")


async def image(bench: Bench) -> None:
    for is_stream in (False, True):
        said = await bench.driver.say(Ask("look", with_image=True), is_stream=is_stream)
        assert said.text == "1 picture"


async def token_limit(bench: Bench) -> None:
    for is_stream in (False, True):
        said = await bench.driver.say(Ask("hello", max_tokens=1), is_stream=is_stream)
        assert (said.text, said.stop) == ("Hé", "length")


async def stop_words(bench: Bench) -> None:
    word = {"chat": {"stop": ["llo"]}, "messages": {"stop_sequences": ["llo"]}}[bench.dialect]
    for is_stream in (False, True):
        said = await bench.driver.say(Ask("hello"), is_stream=is_stream, **word)
        assert (said.text, said.stop) == ("Hé", "stop")


async def two_choices(bench: Bench) -> None:
    answer = await bench.driver.call(bench.driver.params(Ask("hello"), n=2))
    assert [choice.message.content for choice in answer.choices] == ["Héllo 🚀"] * 2
    chunks = await bench.driver.call(bench.driver.params(Ask("hello"), n=2, stream=True))
    said = ["", ""]
    ends = []
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert (said, ends) == (["Héllo 🚀"] * 2, ["stop"] * 2)


async def probabilities(bench: Bench) -> None:
    if bench.dialect == "responses":
        await probabilities_of_responses(bench)
        return
    more = {"logprobs": True, "top_logprobs": 1}
    answer = await bench.driver.call(bench.driver.params(Ask("hello"), **more))
    assert answer.choices[0].logprobs.content[0].logprob == -0.5
    chunks = await bench.driver.call(bench.driver.params(Ask("hello"), stream=True, **more))
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert next(each.content[0].logprob for each in told if each is not None) == -0.5


async def probabilities_of_responses(bench: Bench) -> None:
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = await bench.driver.call(bench.driver.params(Ask("hello"), **more))
    (message,) = [item for item in answer.output if item.type == "message"]
    assert message.content[0].logprobs[0].logprob == -0.5
    events = await bench.driver.call(bench.driver.params(Ask("hello"), stream=True, **more))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas and all(event.logprobs[0].logprob == -0.5 for event in deltas)


async def usage_by_request(bench: Bench) -> None:
    wanted = {"include_usage": True}
    chunks = await bench.driver.call(bench.driver.params(Ask("hello"), stream=True, stream_options=wanted))
    counted = [chunk for chunk in chunks if chunk.usage is not None]
    assert len(counted) == 1 and chunks[-1] is counted[0] and counted[0].choices == []
    assert counted[0].usage.total_tokens == 5
    chunks = await bench.driver.call(bench.driver.params(Ask("hello"), stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


STATUS_ERRORS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "InternalServerError",
}


async def provider_errors(bench: Bench) -> None:
    errors = bench.driver.talk.errors
    for status, name in STATUS_ERRORS.items():
        if bench.kind == "run" and status != 400:
            continue  # a run says what went wrong, not with which status: see run_errors
        for is_stream in (False, True):
            with pytest.raises(getattr(errors, name)) as caught:
                await bench.driver.call(
                    bench.driver.params(Ask(f"do:status-{status} now"), is_stream=is_stream)
                )
            assert caught.value.status_code == status
            assert "no good" in str(caught.value)


async def run_errors(bench: Bench) -> None:
    if bench.kind != "run":
        return
    for status in (401, 500):
        with pytest.raises(bench.driver.talk.errors.InternalServerError) as caught:
            await bench.driver.call(bench.driver.params(Ask(f"do:status-{status} now")))
        assert caught.value.status_code == 502
        assert caught.value.response.headers["x-iop-reason"] == "upstream_error"


async def own_errors(bench: Bench) -> None:
    errors = bench.driver.talk.errors
    for is_stream in (False, True):
        with pytest.raises(errors.NotFoundError) as caught:
            await bench.driver.call(bench.driver.params(Ask("hello"), is_stream=is_stream, model="nobody"))
        assert caught.value.response.headers["x-iop-reason"] == "model_not_found"
        assert "nobody" in str(caught.value)


async def retry_after(bench: Bench) -> None:
    """The client waits as long as the provider says, then gets its answer."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    ask = Ask(f"do:limited-{bench.driver.is_sync} now")
    answer = await bench.driver.call(bench.driver.params(ask), max_retries=2)
    assert bench.driver.talk.whole(answer).text == "Héllo 🚀"
    assert 0.9 <= loop.time() - begun < 20  # the client's own first wait would be half a second


async def time_out(bench: Bench) -> None:
    with pytest.raises(bench.driver.talk.errors.APITimeoutError):
        await bench.driver.call(bench.driver.params(Ask("do:hang now")), timeout=1.0)
    await bench.fleet.stub.calls[-1].wait_gone(within_s=SOON_S)


async def cancel_stream(bench: Bench) -> None:
    events = await bench.driver.call(bench.driver.params(Ask("do:hold now"), is_stream=True), leave_after=1)
    assert len(events) == 1
    await bench.fleet.stub.calls[-1].wait_gone(within_s=SOON_S)


SCENARIOS = (
    Scenario(name="plain", run=plain),
    Scenario(name="parallel tools", run=parallel_tools),
    Scenario(name="tool results", run=tool_results),
    Scenario(name="reasoning", run=reasoning),
    Scenario(name="image", run=image),
    Scenario(name="token limit", run=token_limit),
    Scenario(
        name="stop words",
        run=stop_words,
        dialects=("chat", "messages"),  # responses have no such field
        refused={"responses": {"chat": "stop", "messages": "stop_sequences"}},
        params={"chat": {"stop": ["llo"]}, "messages": {"stop_sequences": ["llo"]}},
    ),
    Scenario(
        name="two choices",
        run=two_choices,
        dialects=("chat",),  # the others give one answer
        refused={"messages": "n", "responses": "n", "run": "n"},
        params={"chat": {"n": 2}},
    ),
    Scenario(
        name="probabilities",
        run=probabilities,
        dialects=("chat", "responses"),  # messages have none
        refused={
            "messages": {"chat": "logprobs", "responses": "include"},
            "run": {"chat": "logprobs", "responses": "include"},
        },
        params={
            "chat": {"logprobs": True},
            "responses": {"include": ["message.output_text.logprobs"]},
        },
    ),
    Scenario(name="usage by request", run=usage_by_request, dialects=("chat",)),  # the others always tell it
    Scenario(name="provider's errors", run=provider_errors),
    Scenario(name="a run's errors", run=run_errors),
    Scenario(name="our errors", run=own_errors),
    Scenario(
        name="Retry-After",
        run=retry_after,
        takes_a_second=True,
        unsaid={"run": "a busy run is repeated behind the scenes (EN-112); ours is tested by key"},
    ),
    Scenario(name="time-out", run=time_out, takes_a_second=True),
    Scenario(name="leaving a stream", run=cancel_stream),
)
