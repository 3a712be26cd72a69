"""Typed errors as gRPC statuses with `google.rpc.ErrorInfo` (AD-17)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from iop.core.errors import IopError

__all__ = ["ERROR_DOMAIN", "RpcFailure", "failure_of"]

ERROR_DOMAIN: Final = "openengine.v1"
"""`ErrorInfo.domain` of every refusal: reasons are unique within it."""

DETAILS_KEY: Final = "grpc-status-details-bin"

MESSAGE_CHARS_MAX: Final = 1024
"""Longest status message. It travels as a header, and peers drop answers whose headers exceed 8 KiB."""

METADATA_BYTES_MAX: Final = 3072
"""Most bytes of ErrorInfo metadata, for the same reason: the status details are one header too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcFailure:
    """What `context.abort` needs: the status, its text and the trailing metadata with the details."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def failure_of(error: IopError) -> RpcFailure:
    """Translate one error by the row of its family; reason and details travel in ErrorInfo."""
    code = grpc.StatusCode[error.status.grpc]
    message = shorten(error.message, MESSAGE_CHARS_MAX)
    status = status_pb2.Status(code=code.value[0], message=message)
    info = error_details_pb2.ErrorInfo(
        # Reasons of the HTTP surface and its dispatch are lower case in headers; here they are as ErrorInfo wants.
        reason=error.reason.upper(),
        domain=ERROR_DOMAIN,
        metadata=bounded(error.details),
    )
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    details: bytes = status.SerializeToString()
    return RpcFailure(code=code, message=message, trailing_metadata=((DETAILS_KEY, details),))


def bounded(details: Mapping[str, str]) -> dict[str, str]:
    """Details cut so that they fit into a header: whole pairs first, then one shortened, then none."""
    kept: dict[str, str] = {}
    left = METADATA_BYTES_MAX
    for key, value in details.items():
        room = left - len(key.encode())
        if room <= 0:
            break
        text = shorten(value, room // 4) if len(value.encode()) > room else value
        kept[key] = text
        left -= len(key.encode()) + len(text.encode())
    return kept


def shorten(text: str, chars_max: int) -> str:
    """At most `chars_max` characters, with an ellipsis where something was cut."""
    return text if len(text) <= chars_max else text[: max(0, chars_max - 3)] + "..."[:chars_max]
