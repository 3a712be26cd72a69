"""What an engine refuses, in the words of the body that its caller wrote (SF-10). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from iop.core.errors import IopError

__all__ = ["in_callers_words"]

_WORDS: Final = {
    "sampling.num_sequences": "n",
    "response.return_output_logprobs": "logprobs",
    "stopping.conditions": "stop",
    "token_ids": "prompt",
}
"""OpenEngine's names of fields where a body has another one; else it is the last part of the name."""


def in_callers_words(error: IopError, body: Mapping[str, Any]) -> str:
    """The engine's words, with the caller's own name of the field in front where they tell of one.

    Args:
        error: the refusal; its details name a ``field`` or a ``feature``.
        body: the request as it was asked here.
    """
    name = error.details.get("field") or error.details.get("feature") or ""
    own = _own(name, body)
    if own not in body:
        return error.message
    return f"{own}: {error.message.replace(f'`{name}`', f'`{own}`')}"


def _own(name: str, body: Mapping[str, Any]) -> str:
    is_chat = "messages" in body
    if name in _WORDS:
        return _WORDS[name]
    if name.startswith("guided."):
        return "response_format"
    if name.startswith("response.output_candidates"):
        return "top_logprobs" if is_chat else "logprobs"
    if name in {"prompt", "media"} or name.startswith("extra."):
        return "messages" if is_chat else "prompt"
    if name == "stopping.max_tokens" and "max_completion_tokens" in body:
        return "max_completion_tokens"
    return name.rpartition(".")[2]
