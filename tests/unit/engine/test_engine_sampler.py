"""Sampling: each knob does what it says, and the same seed draws the same."""

from __future__ import annotations

import numpy as np
import pytest

from iop.engine.exact import F32
from iop.engine.generation import Sampling
from iop.engine.sampler import TokenHistory, choose, log_softmax, random_stream, score
from iop.engine.settings import builtin_checkpoint
from iop.engine.tokenizer import Tokenizer

LOGITS: F32 = np.array([0.0, 3.0, 2.0, 1.0, 2.9, -5.0], dtype=np.float32)


def draws(
    sampling: Sampling, *, count: int = 300, logits: F32 = LOGITS, prompt: tuple[int, ...] = ()
) -> set[int]:
    random = random_stream(1, 0)
    return {choose(logits, sampling, TokenHistory(prompt), random) for _ in range(count)}


def test_greedy_takes_the_likeliest_and_the_lower_id_on_a_tie() -> None:
    assert draws(Sampling(temperature=0.0)) == {1}
    tie = np.array([1.0, 2.0, 2.0], dtype=np.float32)
    assert draws(Sampling(temperature=0.0), logits=tie) == {1}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=5.0), {0, 1, 2, 3, 4, 5}),
        (Sampling(temperature=5.0, top_k=2), {1, 4}),
        (Sampling(temperature=1.0, top_p=0.4), {1}),
        (Sampling(temperature=1.0, top_p=0.5), {1, 4}),
        (Sampling(temperature=1.0, min_p=0.5), {1, 4}),
        (Sampling(temperature=1e-9), {1}),
        (Sampling(temperature=5.0, top_k=3, min_p=0.99), {1}),
    ],
)
def test_each_cut_leaves_the_expected_candidates(sampling: Sampling, expected: set[int]) -> None:
    assert draws(sampling, count=2000) == expected


def test_frequencies_follow_the_softmax() -> None:
    random, history = random_stream(9, 0), TokenHistory(())
    counts = np.bincount([choose(LOGITS, Sampling(), history, random) for _ in range(20_000)], minlength=6)
    assert np.allclose(counts / 20_000, np.exp(log_softmax(LOGITS)), atol=0.015)


def test_penalties_move_used_tokens_down() -> None:
    greedy = Sampling(temperature=0.0)
    history = TokenHistory((4,))
    random = random_stream(0, 0)
    history.add(1)
    assert choose(LOGITS, Sampling(temperature=0.0, presence_penalty=0.2), history, random) == 4
    assert choose(LOGITS, Sampling(temperature=0.0, repetition_penalty=2.0), history, random) == 2
    history.add(1)
    assert choose(LOGITS, Sampling(temperature=0.0, frequency_penalty=0.04), history, random) == 1
    assert choose(LOGITS, Sampling(temperature=0.0, frequency_penalty=0.06), history, random) == 4
    assert choose(LOGITS, greedy, history, random, banned=[1]) == 4


def test_the_same_seed_and_index_draw_the_same() -> None:
    def sequence(seed: int, index: int) -> list[int]:
        random = random_stream(seed, index)
        return [choose(LOGITS, Sampling(temperature=3.0), TokenHistory(()), random) for _ in range(50)]

    assert sequence(5, 0) == sequence(5, 0)
    assert sequence(5, 0) != sequence(5, 1)
    assert sequence(-1, 0) == sequence(2**64 - 1, 0)


def test_scores_rank_the_raw_model() -> None:
    tokenizer = Tokenizer.load(builtin_checkpoint("first") / "tokenizer.json")
    found = score(LOGITS, 2, 2, tokenizer)
    assert (found.chosen.token_id, found.chosen.rank) == (2, 3)
    assert [entry.token_id for entry in found.top] == [1, 4]
    assert found.top[0].logprob == pytest.approx(float(log_softmax(LOGITS)[1]))
