"""One rank's share of the transformer: whole attention heads, a slice of each feed-forward, a slice of the vocabulary.

Every step computes some *items*: a run of new positions of one sequence, with the blocks that hold its earlier keys
and values. Matrix products run over all items' rows at once; attention runs per prompt item, and at once over all
items of one row. By the rules of ``exact`` none of this grouping shows in the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from iop.engine.arena import ArraySpec
from iop.engine.checkpoint import ModelConfig
from iop.engine.exact import (
    ACTIVATION_LEVELS,
    F32,
    F64,
    KV_LEVELS,
    LANES,
    exp_of_negative,
    inverse_rms,
    quantise,
    silu,
)

__all__ = ["Shard", "StepItem", "kv_specs"]

_FIXED: Final = 2.0**31
"""Grid of attention weights. Times 127 and summed over a window of 8192 it stays below 2**53, so sums are exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """New positions of one sequence.

    Attributes:
        tokens: ids to run, at positions ``start``, ``start + 1``, ...
        blocks: the sequence's blocks from number ``first_block`` on, up to the one of the last position.
        logits_from: index in ``tokens`` of the first row whose logits are wanted; ``len(tokens)`` for none.
    """

    tokens: Sequence[int]
    start: int
    first_block: int
    blocks: Sequence[int]
    logits_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Items of equally many rows whose attention is computed at once; arrays are indexed by item first."""

    rows: NDArray[np.int64]
    table: NDArray[np.int64]
    visible: NDArray[np.bool_]


def kv_specs(config: ModelConfig, *, ranks: int, blocks: int, block_tokens: int) -> dict[str, ArraySpec]:
    """Arrays of one rank's KV arena: 8-bit integers, and a scale per position and head."""
    shape = (config.layers, blocks, config.heads // ranks, block_tokens)
    specs: dict[str, ArraySpec] = {}
    for name in ("k", "v"):
        specs[name] = ArraySpec(shape=(*shape, config.head_width), dtype="int8")
        specs[name + ".scale"] = ArraySpec(shape=(*shape, 1), dtype="float32")
    return specs


class Shard:
    """Computes steps from the arrays it is lent; keeps none of them between calls."""

    def __init__(self, config: ModelConfig, *, rank: int, ranks: int, block_tokens: int) -> None:
        self._config = config
        self._rank, self._ranks = rank, ranks
        self._block_tokens = block_tokens
        self._heads = config.heads // ranks
        half = config.head_width // 2
        angle = np.outer(np.arange(config.context_tokens), config.rope_base ** (-np.arange(half) / half))
        self._cos = np.cos(angle).astype(np.float32)[:, None, :]
        self._sin = np.sin(angle).astype(np.float32)[:, None, :]

    def run(
        self,
        items: Sequence[StepItem],
        weights: Mapping[str, F32],
        kv: Mapping[str, NDArray[Any]],
        reduce: Callable[[F32], F32],
        logits: F32,
    ) -> int:
        """Run one step: store the new keys and values, write this rank's columns of the wanted logits.

        Args:
            items: at least one.
            weights: arrays of ``shard_specs``.
            kv: arrays of ``kv_specs``; written.
            reduce: sums a (R, width) array over all ranks.
            logits: shape (rows, vocabulary); wanted rows are written from row 0 on, in order of items.

        Returns:
            How many rows of logits were wanted.
        """
        config = self._config
        tokens = np.array([token for item in items for token in item.tokens], dtype=np.int64)
        positions = np.concatenate([np.arange(item.start, item.start + len(item.tokens)) for item in items])
        groups = self._groups(items)
        target = self._targets(items, positions)
        x = reduce(self._embed(tokens, weights))
        for layer in range(config.layers):
            at = f"{layer}."
            h = x * inverse_rms(x, config.norm_epsilon) * weights[at + "attn_norm"]
            q, k, v = self._project(h, weights, at, positions)
            self._store(kv, layer, target, k, v)
            mixed = self._attend(kv, layer, groups, q)
            x = x + reduce(self._row_parallel(mixed, weights, at + "o"))
            h = x * inverse_rms(x, config.norm_epsilon) * weights[at + "mlp_norm"]
            gate, up = np.split(_linear(h, weights, at + "gate_up"), 2, axis=1)
            x = x + reduce(self._row_parallel(silu(gate) * up, weights, at + "down"))
        wanted = self._wanted(items)
        if len(wanted):
            h = x[wanted]
            h = h * inverse_rms(h, config.norm_epsilon) * weights["norm"]
            integers, scale = quantise(h, ACTIVATION_LEVELS)
            columns = slice(
                self._rank * config.vocabulary // self._ranks,
                (self._rank + 1) * config.vocabulary // self._ranks,
            )
            logits[: len(wanted), columns] = (
                (integers @ weights["embed"].T) * scale * weights["embed.scale"][:, 0]
            )
        return len(wanted)

    def _embed(self, tokens: NDArray[np.int64], weights: Mapping[str, F32]) -> F32:
        size = self._config.vocabulary // self._ranks
        local = tokens - self._rank * size
        mine = (local >= 0) & (local < size)
        out = np.zeros((len(tokens), self._config.width), dtype=np.float32)
        out[mine] = weights["embed"][local[mine]] * weights["embed.scale"][local[mine]]
        return out

    def _project(
        self, h: F32, weights: Mapping[str, F32], at: str, positions: NDArray[np.int64]
    ) -> tuple[F32, F32, F32]:
        """Queries, keys and values, each (R, heads, head width), the first two turned by their positions."""
        qkv = _linear(h, weights, at + "qkv").reshape(len(h), 3, self._heads, -1)
        cos, sin = self._cos[positions], self._sin[positions]
        return _rotate(qkv[:, 0], cos, sin), _rotate(qkv[:, 1], cos, sin), qkv[:, 2]

    @staticmethod
    def _store(
        kv: Mapping[str, NDArray[Any]],
        layer: int,
        target: tuple[NDArray[np.int64], NDArray[np.int64]],
        k: F32,
        v: F32,
    ) -> None:
        blocks, offsets = target
        for name, values in (("k", k), ("v", v)):
            integers, scale = quantise(values, KV_LEVELS)
            kv[name][layer, blocks, :, offsets] = integers
            kv[name + ".scale"][layer, blocks, :, offsets] = scale

    def _attend(self, kv: Mapping[str, NDArray[Any]], layer: int, groups: Sequence[_Group], q: F32) -> F32:
        """Mixed values (R, heads * head width) of all rows."""
        width = self._config.head_width
        out = np.empty((len(q), self._heads * width), dtype=np.float32)
        for group in groups:
            count, rows = group.rows.shape
            keys = _gather(kv["k"], layer, group.table).astype(np.float32)
            key_scale = _gather(kv["k.scale"], layer, group.table)
            values = _gather(kv["v"], layer, group.table).astype(np.float64)
            value_scale = _gather(kv["v.scale"], layer, group.table)
            integers, scale = quantise(q[group.rows].transpose(0, 2, 1, 3), ACTIVATION_LEVELS)
            dots = integers @ keys.swapaxes(-1, -2)
            scores = dots * (scale * np.float32(1.0 / math.sqrt(width))) * key_scale.swapaxes(-1, -2)
            mixed = _mix(scores, group.visible[:, None], values, value_scale)
            out[group.rows.reshape(-1)] = mixed.transpose(0, 2, 1, 3).reshape(count * rows, -1)
        return out

    def _row_parallel(self, x: F32, weights: Mapping[str, F32], name: str) -> F32:
        """This rank's part of a product over its lanes; lanes are rounded one by one and added as a tree."""
        lanes = LANES // self._ranks
        integers, scale = quantise(x.reshape(len(x), lanes, -1).swapaxes(0, 1), ACTIVATION_LEVELS)
        parts = list((integers @ weights[name]) * scale * weights[name + ".scale"])
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        return np.asarray(parts[0], dtype=np.float32)

    def _groups(self, items: Sequence[StepItem]) -> list[_Group]:
        singles: list[tuple[int, StepItem]] = []
        groups: list[_Group] = []
        row = 0
        for item in items:
            if len(item.tokens) == 1:
                singles.append((row, item))
            else:
                groups.append(self._group([(row, item)]))
            row += len(item.tokens)
        if singles:
            groups.append(self._group(singles))
        return groups

    def _group(self, members: Sequence[tuple[int, StepItem]]) -> _Group:
        rows = len(members[0][1].tokens)
        blocks = max(len(item.blocks) for _, item in members)
        table = np.zeros((len(members), blocks), dtype=np.int64)
        first = np.empty((len(members), 1, 1), dtype=np.int64)
        at = np.empty((len(members), rows, 1), dtype=np.int64)
        for index, (_, item) in enumerate(members):
            table[index, : len(item.blocks)] = item.blocks
            first[index] = item.first_block * self._block_tokens
            at[index, :, 0] = np.arange(item.start, item.start + rows)
        keys = first + np.arange(blocks * self._block_tokens)
        visible = (keys <= at) & (keys > at - self._config.window_tokens)
        index_of_rows = np.array(
            [[row + offset for offset in range(rows)] for row, _ in members], dtype=np.int64
        )
        return _Group(rows=index_of_rows, table=table, visible=visible)

    def _targets(
        self, items: Sequence[StepItem], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        size = self._block_tokens
        blocks = [
            item.blocks[position // size - item.first_block]
            for item in items
            for position in range(item.start, item.start + len(item.tokens))
        ]
        return np.array(blocks, dtype=np.int64), positions % size

    @staticmethod
    def _wanted(items: Sequence[StepItem]) -> NDArray[np.int64]:
        rows: list[int] = []
        row = 0
        for item in items:
            rows.extend(range(row + item.logits_from, row + len(item.tokens)))
            row += len(item.tokens)
        return np.array(rows, dtype=np.int64)


def _linear(x: F32, weights: Mapping[str, F32], name: str) -> F32:
    integers, scale = quantise(x, ACTIVATION_LEVELS)
    return (integers @ weights[name]) * scale * weights[name + ".scale"]


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)


def _gather(array: NDArray[Any], layer: int, table: NDArray[np.int64]) -> NDArray[Any]:
    """Blocks of each item, joined along positions: (items, heads, positions, last)."""
    found = array[layer][table]
    items, blocks, heads, size, last = found.shape
    return np.asarray(found.transpose(0, 2, 1, 3, 4).reshape(items, heads, blocks * size, last))


def _mix(scores: F32, visible: NDArray[np.bool_], values: F64, value_scale: F32) -> F32:
    """Softmax over visible positions, then the weighted mean of values, both in fixed point.

    Args:
        scores: (items, heads, rows, positions).
        visible: (items, 1, rows, positions); at least one per row.
        values: integers (items, heads, positions, width).
        value_scale: what one step of those integers is worth: (items, heads, positions, 1).
    """
    masked = np.where(visible, scores, np.float32(-np.inf))
    peak = masked.max(axis=-1, keepdims=True)
    distance = np.where(visible, scores - peak, np.float32(0)).astype(np.float64)
    share = np.rint(exp_of_negative(distance) * _FIXED) * visible
    scaled = share * value_scale.swapaxes(-1, -2)
    top = scaled.max(axis=-1, keepdims=True)
    grid = np.rint(scaled * (_FIXED / top))
    mean = (grid @ values) * (top / _FIXED) / share.sum(axis=-1, keepdims=True)
    return np.asarray(mean, dtype=np.float32)
