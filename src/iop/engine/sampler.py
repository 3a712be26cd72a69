"""Chooses the next token from one row of logits. Pure but for the random stream that is passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from iop.engine.exact import F32, F64
from iop.engine.generation import Sampling, TokenLogprob, TokenScore
from iop.engine.tokenizer import Tokenizer

__all__ = ["TokenHistory", "choose", "log_softmax", "random_stream", "score"]


class TokenHistory:
    """Which tokens a sequence has used: what penalties look at."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = frozenset(prompt)
        self.counts: Counter[int] = Counter()

    def add(self, token: int) -> None:
        """Count one generated token."""
        self.counts[token] += 1


def random_stream(seed: int, index: int) -> np.random.Generator:
    """The random numbers of one sequence: the same seed and index give the same ones everywhere."""
    return np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, index], dtype=np.uint64)))


def choose(
    logits: F32,
    sampling: Sampling,
    history: TokenHistory,
    random: np.random.Generator,
    *,
    banned: Sequence[int] = (),
) -> int:
    """The next token's id.

    Args:
        logits: shape (V,); not changed.
        sampling: the caller's wishes, validated.
        history: what the sequence has used so far; not changed.
        random: the sequence's own stream; one number is drawn unless greedy.
        banned: ids that must not come now.
    """
    scores = logits.astype(np.float64)
    _penalise(scores, sampling, history.prompt, history.counts)
    scores[list(banned)] = -np.inf
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    return _draw(scores / max(sampling.temperature, 1e-4), sampling, random)


def _penalise(scores: F64, sampling: Sampling, prompt: frozenset[int], counts: Mapping[int, int]) -> None:
    if sampling.repetition_penalty != 1.0:
        seen = sorted(prompt | counts.keys())
        values = scores[seen]
        factor = sampling.repetition_penalty
        scores[seen] = np.where(values > 0, values / factor, values * factor)
    if counts and (sampling.frequency_penalty or sampling.presence_penalty):
        used = list(counts)
        times = np.array([counts[token] for token in used])
        scores[used] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _draw(scores: F64, sampling: Sampling, random: np.random.Generator) -> int:
    """Sort likeliest first, cut the tail by top_k, top_p and min_p, draw from what is left."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    weights = np.exp(scores[order] - scores[order[0]])
    total = np.cumsum(weights)
    keep = len(order)
    if sampling.top_p < 1.0:
        keep = int(np.searchsorted(total, sampling.top_p * total[-1])) + 1
    if sampling.min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(weights >= sampling.min_p)))
    keep = max(1, min(keep, len(order)))
    at = int(np.searchsorted(total[:keep], random.random() * total[keep - 1], side="right"))
    return int(order[min(at, keep - 1)])


def log_softmax(logits: F32) -> F64:
    """Natural log-probabilities of a row."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    return np.asarray(scores - np.log(np.exp(scores).sum()), dtype=np.float64)


def score(logits: F32, token: int, top: int, tokenizer: Tokenizer) -> TokenLogprob:
    """Log-probability of ``token`` under the raw model, and the ``top`` likeliest ones."""
    values = log_softmax(logits)

    def entry(one: int, rank: int) -> TokenScore:
        return TokenScore(
            token_id=one,
            text=tokenizer.name(one),
            token_bytes=tokenizer.token_bytes(one),
            logprob=float(values[one]),
            rank=rank,
        )

    best = np.lexsort((np.arange(len(values)), -values))[:top]
    rank = 1 + int(
        np.count_nonzero(values > values[token]) + np.count_nonzero(values[:token] == values[token])
    )
    return TokenLogprob(
        chosen=entry(token, rank), top=tuple(entry(int(one), at) for at, one in enumerate(best, start=1))
    )
