"""Puts an answer's events in the order of blocks, one open at a time (P-11 to P-13).

Chat streams may mix the arguments of several calls, and text with both. Messages and Responses open a block,
grow it and close it. The first open block grows as its bytes come; what belongs to later ones waits. A call
can be known to be whole only when the answer ends, text as soon as something else begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique

from iop.api.http.convert.events import Event, Reasoning, Text, ToolArguments, ToolBegin
from iop.api.http.convert.scores import Score

__all__ = ["Block", "BlockKind", "Blocks", "Move", "Step"]


@unique
class BlockKind(Enum):
    """What a block holds."""

    TEXT = "text"
    REFUSAL = "refusal"
    REASONING = "reasoning"
    TOOL = "tool"


@unique
class Move(Enum):
    """What happens to a block."""

    OPEN = "open"
    GROW = "grow"
    CLOSE = "close"


class Block:
    """One block; ``index`` counts from 0 without gaps."""

    __slots__ = ("id", "index", "kind", "name", "parts", "scores")

    def __init__(self, kind: BlockKind, index: int, *, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.index = index
        self.id = call_id
        self.name = name
        self.parts: list[str] = []
        self.scores: list[Score] = []

    @property
    def text(self) -> str:
        """All so far; of a call its arguments."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One move of one block; ``text`` is what it grew by, with the ``scores`` of its tokens."""

    move: Move
    block: Block
    text: str = ""
    scores: tuple[Score, ...] = ()


class Blocks:
    """The blocks of one answer.

    Attributes:
        all: in order of first appearance.
    """

    __slots__ = ("_calls", "_is_open", "_place", "all")

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._calls: dict[int, Block] = {}
        self._place = 0
        self._is_open = False

    @property
    def has_tools(self) -> bool:
        """Whether the answer calls a tool."""
        return bool(self._calls)

    def feed(self, event: Event) -> list[Step]:
        """Take one event; those that are not content move nothing."""
        match event:
            case Text(text=text, is_refusal=is_refusal, scores=scores):
                kind = BlockKind.REFUSAL if is_refusal else BlockKind.TEXT
                if not text:
                    return self._add_scores(scores) if scores else []
                return self._grow(self._last(kind), text, scores)
            case Reasoning(text=text):
                return self._grow(self._last(BlockKind.REASONING), text) if text else []
            case ToolBegin(slot=slot, id=call_id, name=name):
                self._calls[slot] = self._new(BlockKind.TOOL, call_id=call_id, name=name)
                return self._advance(is_over=False)
            case ToolArguments(slot=slot, text=text):
                return self._grow(self._calls[slot], text) if text else []
            case _:
                return []

    def finish(self) -> list[Step]:
        """The answer is whole: everything that waited comes out. A call without arguments has none: ``{}``."""
        return self._advance(is_over=True)

    def _last(self, kind: BlockKind) -> Block:
        if self.all and self.all[-1].kind is kind:
            return self.all[-1]
        return self._new(kind)

    def _new(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> Block:
        block = Block(kind, len(self.all), call_id=call_id, name=name)
        self.all.append(block)
        return block

    def _grow(self, block: Block, text: str, scores: tuple[Score, ...] = ()) -> list[Step]:
        block.parts.append(text)
        block.scores += scores
        if self._is_open and self._place == block.index:
            return [Step(move=Move.GROW, block=block, text=text, scores=scores)]
        return self._advance(is_over=False)

    def _add_scores(self, scores: tuple[Score, ...]) -> list[Step]:
        """Of tokens that end no character: they belong to the text before them, if that can still be said."""
        block = next((block for block in reversed(self.all) if block.kind is BlockKind.TEXT), None)
        if block is None or block.index < self._place:
            return []
        return self._grow(block, "", scores)

    def _advance(self, *, is_over: bool) -> list[Step]:
        steps: list[Step] = []
        while self._place < len(self.all):
            block = self.all[self._place]
            if not self._is_open:
                self._is_open = True
                steps.append(Step(move=Move.OPEN, block=block))
                if block.parts:
                    scores = tuple(block.scores)
                    steps.append(Step(move=Move.GROW, block=block, text=block.text, scores=scores))
            is_last = self._place == len(self.all) - 1
            if not is_over and (is_last or block.kind is BlockKind.TOOL):
                break
            if block.kind is BlockKind.TOOL and not block.text.strip():
                block.parts.append("{}")
                steps.append(Step(move=Move.GROW, block=block, text="{}"))
            steps.append(Step(move=Move.CLOSE, block=block))
            self._place += 1
            self._is_open = False
        return steps
