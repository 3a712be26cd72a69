"""Mutations as they come in: unknown fields, digest, record (AD-10, AD-12, AD-16)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from iop.admin.codec import RecordCodec
from iop.admin.core import MutationCall
from iop.admin.permissions import Principal
from iop.admin.requests import MutationRequest
from iop.admin.shape import REASON_BYTES_MAX
from iop.core.errors import InvalidRequest

__all__ = [
    "CODEC",
    "check_reason",
    "check_unknown_fields",
    "decode_mutation",
    "payload_digest",
    "require_text",
]

CODEC: Final = RecordCodec(error=InvalidRequest)
"""Reads requests strictly and writes answers."""

Mutation = TypeVar("Mutation", bound=MutationRequest)

NAME_CHARS_MAX: Final = 128
"""Longest operation id that is looked up: what is asked for goes into the audit, and no id of ours is longer."""

NAMED_MAX: Final = 8
"""Most unknown fields named in one refusal; the text is a header."""


def decode_mutation(
    message: Any, record_type: type[Mutation], *, rpc: str, principal: Principal
) -> MutationCall:
    """One mutation, ready for the operation core. Consumes the message: its key and dry-run mark are cleared.

    Raises:
        InvalidRequest: UNKNOWN_FIELDS, UNSPECIFIED_ENUM, UNKNOWN_ENUM or EMPTY_SELECTOR, naming the field.
    """
    check_unknown_fields(message)
    request = CODEC.decode(message, record_type)
    return MutationCall(principal=principal, request=request, request_sha256=payload_digest(message, rpc))


def payload_digest(message: Any, rpc: str) -> bytes:
    """SHA-256 of a mutation's payload. Consumes the message: its key and dry-run mark are cleared."""
    # What makes two requests the same is all but the key and whether it is a dry run (AD-12). Clearing them here
    # instead of in a copy spares a second set of the tensors that an update may carry.
    message.options.ClearField("idempotency_key")
    message.options.ClearField("validate_only")
    payload: bytes = message.SerializeToString(deterministic=True)
    return hashlib.sha256(b"%s\0%b" % (rpc.encode("ascii"), payload)).digest()


def check_unknown_fields(message: Message) -> None:
    """Refuse fields that this server does not know, at any depth (AD-16).

    Raises:
        InvalidRequest: UNKNOWN_FIELDS, naming where and which numbers.
    """
    found: list[str] = []
    for path in _unknown_paths(message, ""):
        found.append(path)
        if len(found) == NAMED_MAX:
            break
    if found:
        raise InvalidRequest(
            f"Unknown fields: {', '.join(found)}. This server is older than the request, or it is malformed.",
            reason="UNKNOWN_FIELDS",
            details={"fields": ",".join(found)},
        )


def _unknown_paths(message: Message, path: str) -> Iterator[str]:
    unknown_fields: Any = UnknownFieldSet(message)  # iterable, though its types do not say so
    for unknown in unknown_fields:
        yield f"{path}{unknown.field_number}"
    value: Any
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for index, item in enumerate(value if field.is_repeated else (value,)):
            suffix = f"[{index}]" if field.is_repeated else ""
            yield from _unknown_paths(item, f"{path}{field.name}{suffix}.")


def require_text(value: str, field: str, *, chars_max: int = NAME_CHARS_MAX) -> str:
    """A required string of a call that names something.

    Raises:
        InvalidRequest: INVALID_FIELD, it is empty, or no name: longer than any, or not printable.
    """
    if not value:
        raise _bad_field(field, "required")
    if len(value) > chars_max or not value.isprintable():
        raise _bad_field(field, f"at most {chars_max} printable characters")
    return value


def check_reason(value: str) -> str:
    """The reason that a cancel gives.

    Raises:
        InvalidRequest: INVALID_FIELD, it is too long to be kept.
    """
    if len(value.encode()) > REASON_BYTES_MAX:
        raise _bad_field("reason", f"at most {REASON_BYTES_MAX} bytes")
    return value


def _bad_field(field: str, fix: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {fix}", reason="INVALID_FIELD", details={"field": field})
