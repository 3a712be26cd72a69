"""Continuous batching: which sequences compute what in the next step. Pure; the engine feeds it and acts on its plans.

Each step runs one new position for every running sequence that is decoding and, within a budget, the next part of the
prompts. Sequences start in order of priority and arrival, when a slot and the blocks for their prompt are there. When
the blocks run out, the one that started last gives its own back and starts again later from its tokens, of which none
is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, unique

from iop.engine.blocks import BlockPool, chain_hash

__all__ = ["Hold", "Scheduler", "Sequence", "StepPlan", "Work"]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One sequence of tokens on its way: prompt, then output. Owned and changed by the scheduler and its engine.

    ``computed`` positions have keys and values in ``blocks``, of which ``published`` are named in the prefix cache.
    ``leader`` is the sequence of the same prompt whose prefill this one waits for, to take its blocks over.
    ``must_finish`` lets it start although admission is closed: it belongs to work that a drain waits for.
    ``score_prompt`` asks for the logits of every prompt position, which only computing them gives, not the cache.
    """

    order: tuple[int, int]
    tokens: list[int]
    prompt_tokens: int
    score_prompt: bool = False
    leader: Sequence | None = None
    use_cache: bool = True
    must_finish: bool = False
    computed: int = 0
    published: int = 0
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    root: bytes = b""
    cached_tokens: int | None = None
    is_live: bool = True

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt has been computed at least once."""
        return len(self.tokens) > self.prompt_tokens or self.computed >= self.prompt_tokens


@unique
class Hold(Enum):
    """What keeps new sequences from starting; each is set and lifted by its own cause alone."""

    PAUSE = "pause"
    FLUSH = "flush"
    GATE = "gate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Positions ``start`` to ``end`` of one sequence; logits are wanted from position ``logits_from`` on."""

    sequence: Sequence
    start: int
    end: int
    logits_from: int

    @property
    def is_last(self) -> bool:
        """Whether the last position's logits choose the sequence's next token."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the next step computes; empty when there is nothing to do."""

    works: tuple[Work, ...]


class Scheduler:
    """State of all live sequences.

    ``holds`` keeps waiting sequences from starting while it is not empty; ``can_run`` stops everything. ``root``
    starts every chain of block names: weights with another identity have another root, so what was cached under one
    never matches under the other (AD-34).
    """

    def __init__(self, *, pool: BlockPool, slots: int, prefill_chunk_tokens: int) -> None:
        self.pool = pool
        self.slots = slots
        self._chunk = prefill_chunk_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.holds: set[Hold] = set()
        self.can_run = True
        self.root = b""
        self.preemptions = 0
        self.tokens_queried = 0
        self.tokens_hit = 0
        self.prefill_positions = 0

    @property
    def can_admit(self) -> bool:
        """Whether waiting sequences may start."""
        return not self.holds

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; equal priorities keep their order of arrival."""
        at = len(self.waiting)
        while at > 0 and self.waiting[at - 1].order > sequence.order:
            at -= 1
        self.waiting.insert(at, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back. Idempotent."""
        if not sequence.is_live:
            return
        sequence.is_live = False
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._give_back(sequence)

    def has_work(self) -> bool:
        """Whether ``plan`` could find something to do now."""
        return self.can_run and bool(self.running or any(self._may_start(one) for one in self.waiting))

    def plan(self) -> StepPlan:
        """Decide the next step: decoding first, then prompts within the budget, then new sequences."""
        if not self.can_run:
            return StepPlan(works=())
        works: list[Work] = []
        budget = self._chunk
        for sequence in tuple(self.running):
            if sequence not in self.running:
                continue
            need = len(sequence.tokens) - sequence.computed
            count = 1 if need == 1 else min(need, budget)
            if count and self._make_room(sequence, sequence.computed + count):
                budget -= count if need > 1 else 0
                works.append(_work(sequence, count))
        while budget > 0 and len(self.running) < self.slots:
            admitted = self._admit()
            if admitted is None:
                break
            count = min(len(admitted.tokens) - admitted.computed, budget)
            if not self._make_room(admitted, admitted.computed + count):
                break
            budget -= count
            works.append(_work(admitted, count))
        return StepPlan(works=tuple(works))

    def complete(self, plan: StepPlan) -> None:
        """Record that a planned step was computed. Sequences removed meanwhile are skipped."""
        for work in plan.works:
            sequence = work.sequence
            self.prefill_positions += max(0, min(work.end, sequence.prompt_tokens) - work.start)
            if not sequence.is_live or not sequence.blocks:
                continue
            sequence.computed = work.end
            self._publish(sequence)

    def preempt_all(self) -> int:
        """Take all blocks from running sequences and queue them again, first in line. Returns how many."""
        running = tuple(self.running)
        for sequence in reversed(running):
            self._preempt(sequence)
        return len(running)

    def forget_prefixes(self) -> tuple[int, list[int]]:
        """Empty the prefix cache: entries dropped and blocks freed.

        Running sequences publish no more: their older blocks have no names now, so nobody could find the newer ones.
        """
        for sequence in self.running:
            sequence.use_cache = False
        return self.pool.forget()

    def _admit(self) -> Sequence | None:
        for at, sequence in enumerate(self.waiting):
            if not self._may_start(sequence):
                continue
            size = self.pool.block_tokens
            if self.running and self.pool.available < -(-len(sequence.tokens) // size):
                return None
            del self.waiting[at]
            self.running.append(sequence)
            self._look_up(sequence)
            return sequence
        return None

    def _may_start(self, sequence: Sequence) -> bool:
        leader = sequence.leader
        if leader is not None and leader.is_live and not leader.is_prefilled:
            return False
        # What has started before is no new work: preempted, it comes back although admission is closed.
        return self.can_admit or sequence.must_finish or sequence.cached_tokens is not None

    def _look_up(self, sequence: Sequence) -> None:
        """Take cached blocks over. The last token is always computed anew: its logits are wanted."""
        size = self.pool.block_tokens
        found: list[int] = []
        if sequence.root != self.root:
            sequence.root = self.root
            sequence.names.clear()
        if sequence.use_cache and not sequence.score_prompt:
            full = (len(sequence.tokens) - 1) // size
            self._extend_names(sequence, full)
            found = self.pool.find(sequence.names[:full])
        sequence.blocks = found
        sequence.computed = len(found) * size
        sequence.published = len(found)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if sequence.use_cache and not sequence.score_prompt:
                self.tokens_queried += sequence.prompt_tokens
                self.tokens_hit += sequence.cached_tokens

    def _make_room(self, sequence: Sequence, positions: int) -> bool:
        """Hold blocks for so many positions, taking them from later sequences if need be."""
        while len(sequence.blocks) * self.pool.block_tokens < positions:
            block = self.pool.take()
            if block is not None:
                sequence.blocks.append(block)
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        self.preemptions += 1
        self.waiting.insert(0, sequence)

    def _give_back(self, sequence: Sequence) -> None:
        # Last block first: eviction then starts at a prefix's end, and its beginning stays of use.
        for block in reversed(sequence.blocks):
            self.pool.give_back(block)
        sequence.blocks = []
        sequence.computed = 0

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // self.pool.block_tokens
        if not sequence.use_cache or full == sequence.published:
            return
        self._extend_names(sequence, full)
        for index in range(sequence.published, full):
            self.pool.publish(sequence.blocks[index], sequence.names[index])
        sequence.published = full

    def _extend_names(self, sequence: Sequence, full: int) -> None:
        size = self.pool.block_tokens
        while len(sequence.names) < full:
            index = len(sequence.names)
            parent = sequence.names[-1] if sequence.names else sequence.root
            sequence.names.append(chain_hash(parent, sequence.tokens[index * size : (index + 1) * size]))


def _work(sequence: Sequence, count: int) -> Work:
    end = sequence.computed + count
    logits_from = end - 1 if end == len(sequence.tokens) else end
    if sequence.score_prompt and sequence.computed < sequence.prompt_tokens:
        logits_from = sequence.computed
    return Work(sequence=sequence, start=sequence.computed, end=end, logits_from=logits_from)
