"""The published messages as a black box uses them: untyped, since any number may go into an enum field."""

from __future__ import annotations

from typing import Any, Final

from iop.pb.openengine.v1 import admin_pb2

__all__ = ["pb"]

pb: Final[Any] = admin_pb2
