"""What never reaches a log: credentials and content.

By key, because only the writer of a log line knows what a value is; and for bearer credentials also by look, because
they hide in texts that others made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["clean_text", "redact"]

HIDDEN: Final = "***"
OMITTED: Final = "(content omitted)"

SECRET_KEYS: Final = frozenset(
    {
        "api_key",
        "authorization",
        "bearer",
        "cookie",
        "credential",
        "password",
        "proxy_authorization",
        "secret",
        "set_cookie",
        "token",
        "tokens",
        "x_api_key",
    }
)
CONTENT_KEYS: Final = frozenset(
    {"body", "completion", "content", "delta", "input", "messages", "output", "prompt", "response_text"}
)

_BEARER: Final = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_URL_PASSWORD: Final = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]*@")

DEPTH_MAX: Final = 6
"""Nesting beyond which a value is not worth logging at all."""


def redact(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields, with credentials and content hidden at any depth."""
    return {key: _clean(key, value, 0) for key, value in fields.items()}


def _clean(key: str, value: object, depth: int) -> object:
    name = key.lower().replace("-", "_")
    if name in SECRET_KEYS or name.endswith(("_token", "_secret", "_password", "_api_key")):
        return HIDDEN if value else value
    if name in CONTENT_KEYS and isinstance(value, str | bytes | list | tuple | dict):
        return OMITTED
    if isinstance(value, str):
        return clean_text(value)
    if depth >= DEPTH_MAX:
        return "(nested too deeply)"
    if isinstance(value, Mapping):
        return {str(inner): _clean(str(inner), item, depth + 1) for inner, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean("", item, depth + 1) for item in value]
    return value


def clean_text(text: str) -> str:
    """``text`` without bearer credentials and passwords in URLs."""
    return _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", _BEARER.sub(rf"\1 {HIDDEN}", text))
