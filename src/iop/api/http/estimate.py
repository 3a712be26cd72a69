"""Estimates of prompt tokens, before any tokenizer is asked (EN-111)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from iop.api.http.splice import RequestFields

__all__ = ["BINARY_KEYS", "MORE_BYTES_MIN", "PROMPT_KEYS", "estimate_tokens", "prompt_bytes", "text_bytes"]

PROMPT_KEYS: Final = ("messages", "prompt", "input", "system", "instructions", "tools")
"""Top-level members that hold what the model reads."""

BINARY_KEYS: Final = frozenset({"url", "data", "image_url", "file_data", "b64_json"})
"""Members that hold encoded pictures and files: their length says nothing about tokens."""

MORE_BYTES_MIN: Final = 128
"""Shorter strings have nothing beyond their own bytes."""

DEPTH_MAX: Final = 64
"""How deep text is looked for; the body's own depth limit is checked elsewhere."""


def estimate_tokens(fields: RequestFields, *, threshold: int | None, bytes_per_token: float) -> int:
    """About how many prompt tokens a request has.

    Where the whole body is too small to exceed ``threshold``, its size is the answer and nothing is parsed.
    """
    most = int(fields.size / bytes_per_token)
    if threshold is None or most <= threshold:
        return most
    return int(prompt_bytes(fields) / bytes_per_token)


def prompt_bytes(fields: RequestFields) -> int:
    """UTF-8 bytes of the text of a request's prompt."""
    if fields.text_bytes is not None:
        return fields.text_bytes
    total = 0
    for key in PROMPT_KEYS:
        raw = fields.raw.get(key)
        if raw is not None:
            try:
                total += text_bytes(orjson.loads(memoryview(raw)))
            except orjson.JSONDecodeError:
                total += len(raw)
    return total


def text_bytes(value: Any, depth: int = 0, *, more: Callable[[str], int] | None = None) -> int:
    """UTF-8 bytes of all text in ``value``; a list of token ids counts four bytes each.

    Args:
        value: decoded JSON.
        depth: how deep it lies in what is counted.
        more: what a string counts beyond its own bytes.
    """
    if isinstance(value, str):
        size = len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
        return size if more is None or size < MORE_BYTES_MIN else size + more(value)
    if depth >= DEPTH_MAX:
        return 0
    if isinstance(value, list):
        return sum(4 if isinstance(item, int) else text_bytes(item, depth + 1, more=more) for item in value)
    if isinstance(value, dict):
        return sum(
            text_bytes(item, depth + 1, more=more) for key, item in value.items() if key not in BINARY_KEYS
        )
    return 0
