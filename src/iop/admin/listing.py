"""Pages of operations: opaque tokens over the order of acceptance. Pure."""

from __future__ import annotations

import base64
from typing import Final

from iop.core.errors import InvalidRequest

__all__ = ["PAGE_SIZE_MAX", "decode_page_token", "encode_page_token"]

PAGE_SIZE_MAX: Final = 100
"""Most operations in one answer, and the default; each may carry a status per participant."""


def encode_page_token(before_ordinal: int) -> str:
    """The token of the page that starts below an ordinal."""
    return base64.urlsafe_b64encode(f"o{before_ordinal}".encode()).decode()


def decode_page_token(token: str) -> int | None:
    """The ordinal below which a page starts; None for the first page.

    Raises:
        InvalidRequest: not a token of ours.
    """
    if not token:
        return None
    try:
        text = base64.urlsafe_b64decode(token.encode("ascii")).decode("ascii")
        if not text.startswith("o") or not text[1:].isdigit() or len(text) > 20:
            raise ValueError
        return int(text[1:])
    except ValueError:
        raise InvalidRequest(
            "page_token: use the one that the last page gave",
            reason="INVALID_FIELD",
            details={"field": "page_token"},
        ) from None
