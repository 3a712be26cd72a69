"""Neutral events as Anthropic messages, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, assert_never

from iop.api.http.convert.blocks import Block, BlockKind, Move, Step
from iop.api.http.convert.events import Begin, Counted, Event, Failure, Stop
from iop.api.http.convert.numbers import load_text
from iop.api.http.convert.writers import Gathering, named_event

__all__ = ["MessagesWriter"]

_STOPS: Final = {
    Stop.END: "end_turn",
    Stop.SEQUENCE: "stop_sequence",
    Stop.LENGTH: "max_tokens",
    Stop.TOOLS: "tool_use",
    Stop.FILTER: "refusal",
}
_ERROR_TYPES: Final = frozenset(
    {
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
        "timeout_error",
    }
)


class MessagesWriter(Gathering):
    """Messages. Thinking has no signature: chats have none to give."""

    __slots__ = ()

    def feed(self, events: Iterable[Event]) -> bytes:
        """``message_start`` first, then blocks, one after the other."""
        out: list[bytes] = []
        for event in events:
            self.note(event)
            if not self.has_begun:
                self.has_begun = True
                message = self._message([], None)
                out.append(named_event({"type": "message_start", "message": message}))
            out += map(_block_event, self.blocks.feed(event))
        return b"".join(out)

    def end(self) -> bytes:
        """The last block's end, stop reason and usage, ``message_stop``."""
        out = [self.feed([Begin(model="")])] if not self.has_begun else []
        out += map(_block_event, self.blocks.finish())
        delta = {"stop_reason": _STOPS[self.stop], "stop_sequence": self._sequence()}
        out.append(named_event({"type": "message_delta", "delta": delta, "usage": _usage(self.counted)}))
        out.append(named_event({"type": "message_stop"}))
        return b"".join(out)

    def fail(self, failure: Failure) -> bytes:
        """An ``error`` event, no ``message_stop``."""
        kind = failure.kind if failure.kind in _ERROR_TYPES else "api_error"
        error = {"type": kind, "message": failure.message, "code": failure.code or "upstream_error"}
        return named_event({"type": "error", "error": error})

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        """A ``message`` object."""
        self.gather(events)
        return self._message([_whole_block(block) for block in self.blocks.all], _STOPS[self.stop])

    def _message(self, content: list[dict[str, Any]], stop: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self.terms.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop,
            "stop_sequence": self._sequence() if stop is not None else None,
            "usage": _usage(self.counted),
        }

    def _sequence(self) -> str | None:
        return self.finish.sequence if self.stop is Stop.SEQUENCE else None


def _block_event(step: Step) -> bytes:
    index, block = step.block.index, step.block
    match step.move:
        case Move.OPEN:
            value = {"type": "content_block_start", "index": index, "content_block": _empty_block(block)}
        case Move.GROW:
            value = {"type": "content_block_delta", "index": index, "delta": _delta(block.kind, step.text)}
        case Move.CLOSE:
            value = {"type": "content_block_stop", "index": index}
        case _:
            assert_never(step.move)
    return named_event(value)


def _empty_block(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT | BlockKind.REFUSAL:
            return {"type": "text", "text": ""}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.TOOL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _whole_block(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT | BlockKind.REFUSAL:
            return {"type": "text", "text": block.text}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.TOOL:
            return _empty_block(block) | {"input": _arguments(block.text)}


def _arguments(text: str) -> Any:
    try:
        return load_text(text)
    except (ValueError, RecursionError):
        return text  # an answer cut by its length limit; the caller sees what there is


def _delta(kind: BlockKind, text: str) -> dict[str, Any]:
    match kind:
        case BlockKind.TEXT | BlockKind.REFUSAL:
            return {"type": "text_delta", "text": text}
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.TOOL:
            return {"type": "input_json_delta", "partial_json": text}


def _usage(counted: Counted | None) -> dict[str, Any]:
    counted = counted or Counted()
    return {
        "input_tokens": max(0, counted.prompt - counted.cached - counted.written),
        "cache_creation_input_tokens": counted.written,
        "cache_read_input_tokens": counted.cached,
        "output_tokens": counted.answer,
    }
