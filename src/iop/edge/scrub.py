"""Texts from Nodes, before they leave the Edge: without addresses (EN-04). Pure."""

from __future__ import annotations

import re
from typing import Final

TEXT_CHARS_MAX: Final = 2000
"""Longest text taken from a Node. Longer ones say nothing more and would fill logs and answers."""

_ADDRESS: Final = re.compile(
    r"""
    \b[a-z][a-z0-9+.-]{1,30}://[^\s"'<>)\]]+            # a URL, whatever its scheme
    | \[(?=[^\]]{0,45}:[^\]]{0,45}:)[0-9a-f:.]{2,45}(?:%\w{1,16})?\](?::\d+)?      # [IPv6], with or without a port
    | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b       # IPv4, with or without a port
    | \b(?:[a-z0-9_-]{1,63}\.){1,8}[a-z][a-z0-9-]{1,62}:\d{1,5}\b   # name.domain:port
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
