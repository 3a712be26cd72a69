"""Neutral events as OpenAI responses, whole or streamed (P-13)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from iop.api.http.convert.blocks import Block, BlockKind, Move, Step
from iop.api.http.convert.events import Begin, Counted, Event, Failure, Stop
from iop.api.http.convert.scores import response_scores
from iop.api.http.convert.writers import AnswerTerms, Gathering, named_event

__all__ = ["ResponsesWriter"]

_INCOMPLETE: Final = {Stop.LENGTH: "max_output_tokens", Stop.FILTER: "content_filter"}

_KIND_IDS: Final = {
    BlockKind.TEXT: "msg",
    BlockKind.REFUSAL: "msg",
    BlockKind.REASONING: "rs",
    BlockKind.TOOL: "fc",
}


class ResponsesWriter(Gathering):
    """Responses. Each block is an item of its own, so that text, calls and reasoning keep their order."""

    __slots__ = ("_number",)

    def __init__(self, terms: AnswerTerms) -> None:
        super().__init__(terms)
        self._number = 0

    def feed(self, events: Iterable[Event]) -> bytes:
        """``response.created`` first, then items, one after the other."""
        out: list[bytes] = []
        for event in events:
            self.note(event)
            if not self.has_begun:
                self.has_begun = True
                response = self._response("in_progress", [])
                out.append(self._event("response.created", response=response))
                out.append(self._event("response.in_progress", response=response))
            for step in self.blocks.feed(event):
                out += self._step(step)
        return b"".join(out)

    def end(self) -> bytes:
        """The last item's end and the closing event."""
        out = [self.feed([Begin(model="")])] if not self.has_begun else []
        for step in self.blocks.finish():
            out += self._step(step)
        response = self._finished()
        out.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(out)

    def fail(self, failure: Failure) -> bytes:
        """``response.failed`` with what there is so far; nothing follows."""
        out = [self.feed([Begin(model="")])] if not self.has_begun else []
        items = [self._item(block, "incomplete") for block in self.blocks.all]
        error = {"code": failure.code or "server_error", "message": failure.message}
        response = self._response("failed", items) | {"error": error}
        return b"".join([*out, self._event("response.failed", response=response)])

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        """A ``response`` object."""
        self.gather(events)
        return self._finished()

    # ---- inside ----

    def _finished(self) -> dict[str, Any]:
        reason = _INCOMPLETE.get(self.stop)
        status = "completed" if reason is None else "incomplete"
        items = [self._item(block, "completed") for block in self.blocks.all]
        if reason is not None and items:
            items[-1]["status"] = "incomplete"
        response = self._response(status, items)
        if reason is not None:
            response["incomplete_details"] = {"reason": reason}
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self.terms.request_id}",
            "object": "response",
            "created_at": self.terms.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": _usage(self.counted),
            "metadata": {},
            **self.terms.echo,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event({"type": kind, "sequence_number": number, **fields})

    def _item_id(self, block: Block) -> str:
        return f"{_KIND_IDS[block.kind]}_{self.terms.request_id}_{block.index}"

    def _item(self, block: Block, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        text = "" if is_empty else block.text
        match block.kind:
            case BlockKind.TEXT | BlockKind.REFUSAL:
                content = [] if is_empty else [_part(block.kind, text, response_scores(block.scores))]
                own: dict[str, Any] = {"type": "message", "role": "assistant", "content": content}
            case BlockKind.REASONING:
                content = [] if is_empty else [_part(block.kind, text)]
                own = {"type": "reasoning", "summary": [], "content": content}
            case BlockKind.TOOL:
                own = {"type": "function_call", "call_id": block.id, "name": block.name, "arguments": text}
        return {"id": self._item_id(block), "status": status, **own}

    def _step(self, step: Step) -> list[bytes]:
        block = step.block
        place: dict[str, Any] = {"output_index": block.index}
        item = {"item_id": self._item_id(block), **place}
        part = item if block.kind is BlockKind.TOOL else item | {"content_index": 0}
        name = _DELTA_NAMES[block.kind]
        is_text = block.kind is BlockKind.TEXT
        if step.move is Move.GROW:
            more: dict[str, Any] = {"logprobs": response_scores(step.scores)} if is_text else {}
            return [self._event(f"{name}.delta", **part, delta=step.text, **more)]
        if step.move is Move.OPEN:
            opened = self._item(block, "in_progress", is_empty=True)
            out = [self._event("response.output_item.added", **place, item=opened)]
            if block.kind is not BlockKind.TOOL:
                out.append(self._event("response.content_part.added", **part, part=_part(block.kind, "")))
            return out
        if block.kind is BlockKind.TOOL:
            out = [self._event(f"{name}.done", **part, arguments=block.text, name=block.name)]
        else:
            key = "refusal" if block.kind is BlockKind.REFUSAL else "text"
            scores = response_scores(block.scores)
            more = {"logprobs": scores} if is_text else {}
            out = [self._event(f"{name}.done", **part, **{key: block.text}, **more)]
            whole = _part(block.kind, block.text, scores)
            out.append(self._event("response.content_part.done", **part, part=whole))
        done = self._item(block, "completed")
        return [*out, self._event("response.output_item.done", **place, item=done)]


_DELTA_NAMES: Final = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REFUSAL: "response.refusal",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TOOL: "response.function_call_arguments",
}


def _part(kind: BlockKind, text: str, scores: Sequence[Any] = ()) -> dict[str, Any]:
    if kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    if kind is BlockKind.REFUSAL:
        return {"type": "refusal", "refusal": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(scores)}


def _usage(counted: Counted | None) -> dict[str, Any] | None:
    if counted is None:
        return None
    return {
        "input_tokens": counted.prompt,
        "input_tokens_details": {"cached_tokens": counted.cached},
        "output_tokens": counted.answer,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning},
        "total_tokens": counted.prompt + counted.answer,
    }
