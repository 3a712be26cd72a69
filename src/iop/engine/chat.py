"""The chat template: marks around each turn, an opened assistant's turn at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from iop.core.errors import InvalidRequest
from iop.engine.generation import ChatMessage, ChatPrompt
from iop.engine.tokenizer import Tokenizer

__all__ = ["BOS", "END", "render_chat"]

BOS: Final = "<|bos|>"
END: Final = "<|end|>"
_ASSISTANT: Final = "<|assistant|>"
# The model has learned three voices; what a tool says reaches it as the user's.
_MARKS: Final[Mapping[str, str]] = {
    "system": "<|system|>",
    "developer": "<|system|>",
    "user": "<|user|>",
    "tool": "<|user|>",
    "assistant": _ASSISTANT,
}


def render_chat(messages: Sequence[ChatMessage], tokenizer: Tokenizer) -> ChatPrompt:
    """Render a conversation for the assistant's next turn; content can forge no mark.

    Raises:
        InvalidRequest: no message, or an unknown role.
    """
    if not messages:
        raise InvalidRequest("`messages` must hold at least one message.", details={"field": "messages"})
    marks = tokenizer.specials
    text, ids = [BOS], [marks[BOS]]
    for message in messages:
        mark = _MARKS.get(message.role)
        if mark is None:
            raise InvalidRequest(
                f"`messages` has the unknown role {message.role[:32]!r}; use {', '.join(_MARKS)}.",
                details={"field": "messages"},
            )
        text += (mark, message.content, END)
        ids += (marks[mark], *tokenizer.encode(message.content), marks[END])
    text.append(_ASSISTANT)
    ids.append(marks[_ASSISTANT])
    return ChatPrompt(text="".join(text), token_ids=tuple(ids))
