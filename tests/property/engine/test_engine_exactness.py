"""Greedy decoding rests on this: logits have the same bits whatever the batch, the chunks, the blocks and the ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iop.engine.checkpoint import TensorFile, fill_shard, load_config, shard_specs, weights_file
from iop.engine.exact import F32, exp_of_negative, quantise
from iop.engine.model import Shard, StepItem, kv_specs
from iop.engine.settings import builtin_checkpoint

BLOCK = 4
BLOCKS = 512
PATH = builtin_checkpoint("second")
CONFIG = load_config(PATH)


class LocalRanks:
    """All ranks of a model in threads of this process, with blocks handed out in any order one likes."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._shards = [Shard(CONFIG, rank=rank, ranks=ranks, block_tokens=BLOCK) for rank in range(ranks)]
        self._weights = []
        with TensorFile(weights_file(PATH)) as file:
            for rank in range(ranks):
                arrays = {key: np.zeros(s.shape, s.dtype) for key, s in shard_specs(CONFIG, ranks).items()}
                fill_shard(arrays, file, CONFIG, rank=rank, ranks=ranks)
                self._weights.append(arrays)
        specs = kv_specs(CONFIG, ranks=ranks, blocks=BLOCKS, block_tokens=BLOCK)
        self._kv = [{key: np.zeros(s.shape, s.dtype) for key, s in specs.items()} for _ in range(ranks)]
        self._parts: list[F32 | None] = [None] * ranks
        self._barrier = threading.Barrier(ranks)
        self._pool = ThreadPoolExecutor(ranks)

    def _sum(self, rank: int, part: F32) -> F32:
        self._parts[rank] = part
        self._barrier.wait(30)
        parts = [one for one in self._parts if one is not None]
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        self._barrier.wait(30)
        return parts[0]

    def close(self) -> None:
        self._pool.shutdown()

    def run(self, items: list[StepItem]) -> F32:
        logits = np.zeros((sum(len(item.tokens) for item in items), CONFIG.vocabulary), np.float32)
        runs = [
            self._pool.submit(
                shard.run, items, weights, kv, lambda part, rank=rank: self._sum(rank, part), logits
            )
            for rank, (shard, weights, kv) in enumerate(
                zip(self._shards, self._weights, self._kv, strict=True)
            )
        ]
        rows = {run.result(60) for run in runs}
        assert len(rows) == 1
        return logits[: rows.pop()]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[int, LocalRanks]]:
    made = {ranks: LocalRanks(ranks) for ranks in (1, 2, 4)}
    yield made
    for one in made.values():
        one.close()


def item(tokens: list[int], start: int, end: int, blocks: list[int]) -> StepItem:
    first = max(0, start - CONFIG.window_tokens + 1) // BLOCK
    return StepItem(
        tokens=tokens[start:end],
        start=start,
        first_block=first,
        blocks=blocks[first : (end - 1) // BLOCK + 1],
        logits_from=0,
    )


def reference(engine: LocalRanks, tokens: list[int]) -> F32:
    """Logits of every position: one rank, one sequence, one step per position."""
    blocks = list(range(-(-len(tokens) // BLOCK)))
    return np.concatenate(
        [engine.run([item(tokens, at, at + 1, blocks)]).copy() for at in range(len(tokens))]
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[tuple[int, int]]]]:
    """Sequences, their blocks, and steps: which sequence advances by how much, side by side."""
    token = st.integers(0, CONFIG.vocabulary - 1)
    sequences = draw(st.lists(st.lists(token, min_size=1, max_size=24), min_size=1, max_size=4))
    order = draw(st.permutations(range(40)))
    blocks: list[list[int]] = []
    for tokens in sequences:
        need = -(-len(tokens) // BLOCK)
        blocks.append(list(order[:need]))
        order = order[need:]
    done = [0] * len(sequences)
    steps: list[list[tuple[int, int]]] = []
    while any(count < len(tokens) for count, tokens in zip(done, sequences, strict=True)):
        step: list[tuple[int, int]] = []
        for index, tokens in enumerate(sequences):
            left = len(tokens) - done[index]
            count = draw(st.integers(0 if step or len(sequences) > index + 1 else 1, left)) if left else 0
            if count:
                step.append((index, count))
                done[index] += count
        if step:
            steps.append(step)
    return sequences, blocks, steps


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@settings(max_examples=12, deadline=None)
@given(batch=batches())
def test_logits_have_the_same_bits_in_any_batch_chunking_and_rank_count(
    engines: dict[int, LocalRanks],
    ranks: int,
    batch: tuple[list[list[int]], list[list[int]], list[list[tuple[int, int]]]],
) -> None:
    sequences, blocks, steps = batch
    found: list[list[F32]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for step in steps:
        items = [item(sequences[i], done[i], done[i] + count, blocks[i]) for i, count in step]
        rows = engines[ranks].run(items)
        for index, count in step:
            found[index].append(rows[:count].copy())
            rows = rows[count:]
            done[index] += count
    for tokens, parts in zip(sequences, found, strict=True):
        assert np.array_equal(np.concatenate(parts), reference(engines[1], tokens))


@pytest.mark.slow
def test_positions_beyond_the_window_are_the_same_by_steps_and_by_chunks(
    engines: dict[int, LocalRanks],
) -> None:
    rng = np.random.default_rng(3)
    tokens = [int(one) for one in rng.integers(0, CONFIG.vocabulary, CONFIG.window_tokens + 40)]
    blocks = [int(one) for one in rng.permutation(BLOCKS)[: -(-len(tokens) // BLOCK)]]
    by_steps = reference(engines[1], tokens)
    at, parts = 0, []
    for size in (100, 1, 130, 33, 32):
        parts.append(engines[2].run([item(tokens, at, at + size, blocks)]).copy())
        at += size
    assert at == len(tokens)
    assert np.array_equal(np.concatenate(parts), by_steps)


@given(st.lists(st.floats(-60, 0), min_size=1, max_size=50))
def test_exponential_is_accurate_and_independent_of_its_neighbours(values: list[float]) -> None:
    together = exp_of_negative(np.array(values))
    alone = np.array([exp_of_negative(np.array([value]))[0] for value in values])
    assert np.array_equal(together, alone)
    big = np.array(values) > -41
    assert np.allclose(together[big], np.exp(np.array(values))[big], rtol=1e-9, atol=0)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=64), st.sampled_from([127, 511]))
def test_quantised_values_are_integers_within_the_levels(values: list[float], levels: int) -> None:
    integers, scale = quantise(np.array([values], dtype=np.float32), levels)
    assert np.array_equal(integers, np.rint(integers))
    assert np.abs(integers).max() <= levels
    assert np.abs(integers * scale - np.array(values)).max() <= scale.max() * 0.51
