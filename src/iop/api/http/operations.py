"""The generating routes of the public listener: one place that says what each is called and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from iop.api.http.errors import Dialect

__all__ = ["GENERATING", "PATHS", "Operation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One generating route."""

    name: str
    path: str
    dialect: Dialect


GENERATING: Final = (
    Operation(name="chat_completions", path="/v1/chat/completions", dialect=Dialect.CHAT),
    Operation(name="completions", path="/v1/completions", dialect=Dialect.COMPLETIONS),
    Operation(name="embeddings", path="/v1/embeddings", dialect=Dialect.PLAIN),
    Operation(name="responses", path="/v1/responses", dialect=Dialect.RESPONSES),
    Operation(name="messages", path="/v1/messages", dialect=Dialect.MESSAGES),
    Operation(name="count_tokens", path="/v1/messages/count_tokens", dialect=Dialect.MESSAGES),
)

PATHS: Final = {operation.name: operation.path for operation in GENERATING}
"""Where each is asked for, here and at providers that speak its dialect."""
