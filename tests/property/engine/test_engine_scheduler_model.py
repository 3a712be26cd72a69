"""The scheduler under arbitrary histories: blocks are conserved, nobody starves, plans respect their limits."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from iop.engine.blocks import BlockPool
from iop.engine.scheduler import Hold, Scheduler, Sequence

BLOCKS, SIZE, SLOTS, CHUNK = 12, 4, 3, 6
LENGTH_MAX = (BLOCKS - 1) * SIZE


class SchedulerModel(RuleBasedStateMachine):
    """Adds, steps, cancels, preempts and flushes; ``content`` is what the ranks' blocks would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(blocks=BLOCKS, block_tokens=SIZE)
        self.scheduler = Scheduler(pool=self.pool, slots=SLOTS, prefill_chunk_tokens=CHUNK)
        self.scheduler.root = b"v1"
        self.live: list[tuple[Sequence, int]] = []
        self.content: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}
        self.arrivals = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        output=st.integers(1, 15),
        priority=st.integers(0, 1),
    )
    def add(self, prompt: list[int], output: int, priority: int) -> None:
        self.arrivals += 1
        sequence = Sequence(order=(priority, self.arrivals), tokens=list(prompt), prompt_tokens=len(prompt))
        self.live.append((sequence, min(len(prompt) + output, LENGTH_MAX)))
        self.scheduler.add(sequence)

    @rule()
    def step(self) -> None:
        plan = self.scheduler.plan()
        if self.scheduler.has_work():
            assert plan.works, "work that may run is planned"
        prefill = sum(work.end - work.start for work in plan.works if work.end - work.start > 1)
        assert prefill <= CHUNK
        assert len({id(work.sequence) for work in plan.works}) == len(plan.works)
        for work in plan.works:
            self.compute(work.sequence, work.start, work.end)
        last = [work.is_last for work in plan.works]
        self.scheduler.complete(plan)
        for work, is_last in zip(plan.works, last, strict=True):
            if is_last:
                work.sequence.tokens.append(len(work.sequence.tokens) % 2)
                limit = next(limit for one, limit in self.live if one is work.sequence)
                if len(work.sequence.tokens) >= limit:
                    self.finish(work.sequence)

    def compute(self, sequence: Sequence, start: int, end: int) -> None:
        """What a rank does: read everything before, which must be this sequence's own past, and write."""
        assert len(sequence.blocks) * SIZE >= end
        for position in range(end):
            key = (sequence.blocks[position // SIZE], position % SIZE)
            value = (sequence.root, tuple(sequence.tokens[: position + 1]))
            if position < start:
                assert self.content[key] == value, "a cached or kept block holds this sequence's own past"
            else:
                self.content[key] = value

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.live = [(one, limit) for one, limit in self.live if one is not sequence]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence, _ = data.draw(st.sampled_from(self.live))
        self.finish(sequence)
        self.scheduler.remove(sequence)

    @rule()
    def flush(self) -> None:
        self.scheduler.preempt_all()
        self.scheduler.forget_prefixes()
        assert self.pool.entries == 0
        for block in self.pool.free_blocks():
            for offset in range(SIZE):
                self.content.pop((block, offset), None)

    @rule(root=st.sampled_from([b"v1", b"v2"]))
    def change_weights(self, root: bytes) -> None:
        self.scheduler.root = root

    @rule(admit=st.booleans())
    def gate(self, admit: bool) -> None:
        (self.scheduler.holds.discard if admit else self.scheduler.holds.add)(Hold.PAUSE)

    @invariant()
    def blocks_are_conserved(self) -> None:
        held = {block for sequence in self.scheduler.running for block in sequence.blocks}
        assert len(held) == self.pool.used
        assert self.pool.used + self.pool.available == BLOCKS
        assert len(self.scheduler.running) <= SLOTS
        assert all(not sequence.blocks for sequence in self.scheduler.waiting)

    def teardown(self) -> None:
        self.scheduler.holds.clear()
        for _ in range(3000):
            if not self.live:
                break
            self.step()
        assert not self.live, "everything finishes"
        assert self.pool.used == 0


TestSchedulerModel = SchedulerModel.TestCase
TestSchedulerModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
