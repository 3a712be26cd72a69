"""What is known of one request of the public listener while it is answered."""

from __future__ import annotations

from typing import Any

from iop.api.http.errors import Dialect
from iop.api.http.keys import Caller
from iop.api.http.operations import Operation
from iop.edge.dispatch import DispatchHandle

__all__ = ["Visit"]


class Visit:
    """What is known of one request while it is answered."""

    __slots__ = (
        "caller",
        "fields",
        "handle",
        "is_dispatched",
        "model",
        "operation",
        "relay",
        "request_id",
        "rest",
        "session",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.operation: Operation | None = None
        self.caller: Caller | None = None
        self.model = ""
        self.session = ""
        self.fields: Any = None  # RequestFields from dispatch to the first byte
        self.relay: Any = None  # Relay or RunRelay of the current attempt
        self.handle: DispatchHandle | None = None
        self.is_dispatched = False
        self.rest = b""

    def forget(self) -> None:
        """Let go of what only another attempt would need."""
        self.fields = self.relay = self.handle = None

    @property
    def dialect(self) -> Dialect:
        """In whose words errors are told."""
        return Dialect.CHAT if self.operation is None else self.operation.dialect
