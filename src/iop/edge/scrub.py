"""Texts from Nodes, before they leave the Edge: without addresses (EN-04). Pure."""

from __future__ import annotations

import re
from typing import Final

TEXT_CHARS_MAX: Final = 2000
"""Longest text taken from a Node. Longer ones say nothing more and would fill logs and answers."""

_ADDRESS: Final = re.compile(
    r"""
    [a-z][a-z0-9+.-]*://[^\s"'<>)\]]+            # a URL, whatever its scheme
    | \[[0-9a-f:.]*:[0-9a-f:.]*(?:%\w+)?\](?::\d+)?      # [IPv6], with or without a port
    | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b       # IPv4, with or without a port
    | \b(?:[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?\.)+[a-z][a-z0-9-]*:\d{1,5}\b   # name.domain:port
    | \blocalhost(?::\d{1,5})?\b
    | \bunix:[^\s"'<>)\]]+
    """,
    re.IGNORECASE | re.VERBOSE,
)


def scrub(text: str) -> str:
    """``text`` with every address replaced by ``[address]``, bounded."""
    if len(text) > TEXT_CHARS_MAX:
        text = text[: TEXT_CHARS_MAX - 3] + "..."
    return _ADDRESS.sub("[address]", text)[:TEXT_CHARS_MAX]
