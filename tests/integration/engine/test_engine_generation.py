"""Generation through real rank processes: the same answer in any company, and every way to end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine_kit import Answer, answer, as_answer, collect, eventually, request

from iop.core.errors import AlreadyExists, InvalidRequest, Overloaded
from iop.engine import (
    ChatMessage,
    Engine,
    EngineSettings,
    Finished,
    FinishReason,
    PromptScored,
    Sampling,
    Stopping,
    TokenChunk,
    builtin_checkpoint,
)

PROMPTS = ("Once upon a time", "The fox", "Tell me a story about a bear. " * 8, "A", "Grüße aus Köln: 你好!")


async def together(engine: Engine, prompts: tuple[str, ...]) -> list[Answer]:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(answer(engine, request(f"t{index}", prompt)))
            for index, prompt in enumerate(prompts)
        ]
    return [task.result() for task in tasks]


@pytest.mark.slow
async def test_greedy_answers_are_the_same_for_any_ranks_batch_chunks_and_cache(
    settings: EngineSettings,
) -> None:
    expected: list[list[int]] = []
    for ranks, chunk, block in ((1, 64, 16), (2, 7, 16), (4, 5, 8), (2, 64, 4)):
        changed = replace(
            settings, ranks=ranks, prefill_chunk_tokens=chunk, kv_block_tokens=block, kv_blocks=1024
        )
        async with Engine(changed) as engine:
            alone = [(await answer(engine, request("one", prompt))).tokens for prompt in PROMPTS]
            batched = await together(engine, PROMPTS + PROMPTS)
            hits = engine.counters().prefix_tokens_hit
        expected = expected or alone
        assert alone == expected
        assert [one.tokens for one in batched] == expected + expected
        assert hits > 0


async def test_preempted_sequences_lose_no_token(settings: EngineSettings) -> None:
    async with Engine(settings) as roomy:
        expected = [
            (await answer(roomy, request("one", prompt, max_tokens=200))).tokens for prompt in PROMPTS
        ]
    async with Engine(replace(settings, kv_blocks=130)) as tight:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(answer(tight, request(f"t{index}", PROMPTS[index % 5], max_tokens=200)))
                for index in range(15)
            ]
        assert tight.counters().preemptions > 0
    assert [task.result().tokens for task in tasks] == expected * 3


async def test_a_repeated_prompt_is_taken_from_the_prefix_cache(engine: Engine) -> None:
    prompt = "Tell me a story about a bear in the forest. " * 6
    first = await answer(engine, request("a", prompt, max_tokens=2))
    computed = engine.counters().prefill_positions_computed
    again = await answer(engine, request("b", prompt, max_tokens=2))
    assert first.finished.usage is not None
    assert again.finished.usage is not None
    assert first.finished.usage.cached_prompt_tokens == 0
    cached = again.finished.usage.cached_prompt_tokens
    assert cached > 0
    assert (
        engine.counters().prefill_positions_computed - computed == again.finished.usage.prompt_tokens - cached
    )
    assert again.tokens == first.tokens


async def test_alternatives_share_the_prompt_and_seeds_repeat(engine: Engine) -> None:
    prompt = "Tell me a story about a bear in the forest. " * 6
    wanted = request(
        "n", prompt, sampling=Sampling(temperature=1.0, seed=5), n=3, stopping=Stopping(max_tokens=12)
    )
    events = await collect(engine.generate(wanted))
    computed = engine.counters().prefill_positions_computed
    answers = [as_answer(events, index) for index in range(3)]
    assert len({tuple(one.tokens) for one in answers}) > 1
    usages = [event.usage for event in events if isinstance(event, Finished)]
    assert [usage is not None for usage in usages] == [False, False, True]
    assert computed < 2 * engine.count_tokens(prompt)
    again = await collect(engine.generate(replace(wanted, request_id="m")))
    assert [as_answer(again, index).tokens for index in range(3)] == [one.tokens for one in answers]


async def test_chat_answers_and_stops_at_the_end_mark(engine: Engine) -> None:
    prompt = engine.render_chat([ChatMessage(role="user", content="Hello!")])
    wanted = request("c", prompt.token_ids, stopping=Stopping(max_tokens=100))
    found = await answer(engine, wanted)
    assert found.finished.reason is FinishReason.STOP
    assert found.finished.stop is not None
    assert found.finished.stop.eos_token_id == engine.info.eos_token_id
    assert found.text.strip()
    assert "<|" not in found.text


async def test_stop_string_is_cut_and_nothing_follows(engine: Engine) -> None:
    whole = (await answer(engine, request("w", max_tokens=60))).text
    stop = whole[20:26]
    at = whole.index(stop)
    found = await answer(engine, request("s", stopping=Stopping(max_tokens=60, stop=(stop,))))
    assert found.text == whole[:at]
    assert found.finished.stop is not None
    assert found.finished.stop.text == stop
    kept = await answer(
        engine, request("k", stopping=Stopping(max_tokens=60, stop=(stop,), include_stop_in_output=True))
    )
    assert kept.text == whole[: at + len(stop)]


async def test_logprobs_tell_the_chosen_token_and_the_likeliest(engine: Engine) -> None:
    events = await collect(engine.generate(request("l", max_tokens=5, logprobs=3, prompt_logprobs=1)))
    scored = [event for event in events if isinstance(event, PromptScored)]
    assert len(scored) == 1
    assert isinstance(events[0], PromptScored)
    assert len(scored[0].logprobs) == len(scored[0].token_ids)
    assert scored[0].logprobs[0] is None
    for event in events:
        if isinstance(event, TokenChunk):
            (entry,) = event.logprobs
            assert entry.chosen.rank == 1
            assert entry.chosen == entry.top[0]
            assert [one.rank for one in entry.top] == [1, 2, 3]


@pytest.mark.clause("SF-07")
async def test_leaving_the_stream_frees_slot_and_blocks_at_once(engine: Engine) -> None:
    stream = engine.generate(request("gone", max_tokens=1500))
    async with stream:
        await anext(stream)
        assert engine.counters().running == 1
    counters = engine.counters()
    assert (counters.running, counters.waiting, counters.kv_blocks_used) == (0, 0, 0)
    assert counters.requests_cancelled == 1


async def test_cancelling_the_waiting_task_cancels_the_request(engine: Engine) -> None:
    await answer(engine, request("warm", max_tokens=1))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(answer(engine, request("gone", max_tokens=1500)))
        await eventually(lambda: engine.counters().running == 1)
        task.cancel()
    assert engine.counters().running == 0
    assert engine.counters().kv_blocks_used == 0


async def test_abort_ends_with_a_reason(engine: Engine) -> None:
    stream = engine.generate(request("x", max_tokens=1500))
    async with stream:
        await anext(stream)
        assert engine.abort("x", message="enough")
        events = [event async for event in stream]
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.message) == (FinishReason.ABORTED, "enough")
    assert end.usage is not None
    assert not engine.abort("x")


async def test_a_full_waiting_queue_refuses(settings: EngineSettings) -> None:
    async with Engine(replace(settings, slots=1, waiting_max=1)) as engine:
        first = engine.generate(request("a", max_tokens=1000))
        second = engine.generate(request("b"))
        with pytest.raises(Overloaded) as refused:
            engine.generate(request("c"))
        assert refused.value.reason == "WAITING_FULL"
        assert engine.counters().requests_overloaded == 1
        await first.aclose()
        assert (await collect(second))[-1]


async def test_refuses_what_cannot_be_served(engine: Engine) -> None:
    stream = engine.generate(request("same", max_tokens=1000))
    with pytest.raises(AlreadyExists):
        engine.generate(request("same"))
    await stream.aclose()
    room = engine.info.context_tokens
    for bad in (
        request("a", max_tokens=room),
        request("b", "bear " * 3000),
        request("c", ()),
        request("d", (99999,)),
        request("e", sampling=Sampling(temperature=float("nan"))),
        request("f", sampling=Sampling(top_p=0.0)),
        request("g", n=0),
        request("h", stopping=Stopping(max_tokens=0)),
        request("i", stopping=Stopping(stop=("",))),
    ):
        with pytest.raises(InvalidRequest):
            engine.generate(bad)
    assert engine.counters().waiting == 0


@pytest.mark.slow
async def test_a_prompt_that_fills_the_context_still_answers(engine: Engine) -> None:
    room = engine.info.context_tokens
    found = await answer(
        engine, request("full", tuple([300] * (room - 1)), stopping=Stopping(ignore_eos=True))
    )
    assert found.finished.reason is FinishReason.LENGTH
    assert len(found.tokens) == 1


async def test_the_second_checkpoint_is_the_better_one(settings: EngineSettings) -> None:
    text = (
        "Once upon a time there was a kind owl named Ruth. In the garden, the roses were red. The owl liked the"
        " garden more than anything. One evening, Ruth found a silver bell in the grass."
    )
    totals = {}
    for name in ("first", "second"):
        async with Engine(replace(settings, checkpoint=builtin_checkpoint(name))) as engine:
            events = await collect(engine.generate(request("p", text, max_tokens=1, prompt_logprobs=0)))
            assert engine.weight_version == name
        (scored,) = [event for event in events if isinstance(event, PromptScored)]
        totals[name] = sum(entry.chosen.logprob for entry in scored.logprobs if entry is not None)
    assert totals["second"] > totals["first"]
