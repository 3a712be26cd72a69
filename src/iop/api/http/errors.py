"""Errors as callers of the HTTP surfaces see them: status, envelope, headers (SF-06, SF-09).

An error's stable code on this surface is its ``reason`` in lower case; it stands in the body and in
``x-iop-reason``. The status is its family's, unless the reason has one of its own below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, unique
from typing import Any, Final

import orjson

from iop.api.http.head import HeaderList
from iop.api.http.json_text import json_text
from iop.core.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    IopError,
    NotFound,
    Overloaded,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)
from iop.wire.messages import StreamError

__all__ = [
    "STATUS_BY_REASON",
    "Dialect",
    "error_body",
    "error_code",
    "error_event",
    "error_headers",
    "error_of_stream",
    "error_status",
    "error_type",
    "late_answer_event",
]


@unique
class Dialect(Enum):
    """Whose error envelope and stream events a route speaks."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    PLAIN = "plain"

    @property
    def is_anthropic(self) -> bool:
        """Whether errors have Anthropic's envelope; all others have OpenAI's."""
        return self is Dialect.MESSAGES


STATUS_BY_REASON: Final[Mapping[str, int]] = {
    "UNSUPPORTED_FIELD": 400,
    "UNSUPPORTED_FEATURE": 400,
    "METHOD_NOT_ALLOWED": 405,
    "REQUEST_TIMEOUT": 408,
    "BODY_TOO_LARGE": 413,
    "TARGET_TOO_LONG": 414,
    "CONTENT_ENCODING": 415,
    "EXPECTATION": 417,
    "HEADER_TOO_LARGE": 431,
    "METHOD_UNKNOWN": 501,
    "HTTP_VERSION": 505,
    "LOOP_DETECTED": 508,
    "OPERATION_NOT_SUPPORTED": 404,
    "LONG_CONTEXT_NOT_SUPPORTED": 400,
    "BUSY": 503,
    "CANCELLED": 503,
    "UNSUPPORTED_ENCODING": 502,
    "EVENT_TOO_LARGE": 502,
    "UPSTREAM_ERROR": 502,
    "UPSTREAM_TRUNCATED": 502,
    "CONNECT_FAILED": 502,
}
"""Reasons whose HTTP status is more exact than their family's."""

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_OPENAI_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


_STREAM_ERRORS: Final[Mapping[str, tuple[type[IopError], str]]] = {
    "busy": (Overloaded, "The provider is busy. Try again."),
    "connect_failed": (Unavailable, "The provider cannot be reached."),
    "upstream_error": (Unavailable, "The provider failed before its answer was whole."),
    "upstream_truncated": (Unavailable, "The provider's answer ended before it was whole."),
    "timeout": (DeadlineExceeded, "The provider did not answer in time."),
    "no_output": (DeadlineExceeded, "The agent produced no output in time. Does it wait for input?"),
    "node_lost": (Unavailable, "The provider was lost while it answered."),
    "node_shutdown": (Unavailable, "The provider is shutting down."),
    "edge_shutdown": (Draining, "The gateway is shutting down."),
    "aborted_by_admin": (Unavailable, "An operator ended the request."),
    "cancelled": (Unavailable, "The request was called off."),
    "operation_not_supported": (Unsupported, "The provider does not offer this operation."),
    "invalid_request": (InvalidRequest, "The provider cannot be sent this request."),
    "unsupported_feature": (Unsupported, "The provider does not offer a feature that was asked for."),
    "model_not_found": (NotFound, "The provider does not know the model."),
    "loop_detected": (PreconditionFailed, "The request came back to a gateway that it had passed."),
    "queue_full": (Overloaded, "The model's queue is full."),
    "queue_timeout": (Overloaded, "No provider of the model became free in time."),
    "no_capacity": (Unavailable, "No provider of the model is available."),
    "paused": (Draining, "The model is paused."),
}
"""What callers read where a stream ended badly. A Node's own words stay inside: they may name addresses
(EN-04).
"""

_RETRY_SOON_S: Final = 1.0


def error_of_stream(error: StreamError) -> IopError:
    """The error that a caller gets for one on the wire."""
    code = "operation_not_supported" if error.code == "unknown_operation" else error.code.lower()
    kind, message = _STREAM_ERRORS.get(code, (Unavailable, "The provider failed."))
    after = _RETRY_SOON_S if kind in (Unavailable, Overloaded, Draining) else None
    return kind(message, reason=code if code in _STREAM_ERRORS else "upstream_error", retry_after_s=after)


def error_status(error: IopError) -> int:
    """The HTTP status that ``error`` is answered with."""
    return STATUS_BY_REASON.get(error.reason.upper(), error.status.http)


def error_code(error: IopError) -> str:
    """The stable code that programs match on."""
    return error.reason.lower()


def error_type(status: int, dialect: Dialect) -> str:
    """The dialect's name for errors of ``status``."""
    if dialect.is_anthropic:
        return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def _openai(error: IopError, status: int) -> dict[str, Any]:
    return {
        "message": error.message,
        "type": error_type(status, Dialect.CHAT),
        "param": error.details.get("field"),
        "code": error_code(error),
    }


def _anthropic(error: IopError, status: int) -> dict[str, Any]:
    kind = error_type(status, Dialect.MESSAGES)
    return {"type": kind, "message": error.message, "code": error_code(error)}


def error_body(error: IopError, dialect: Dialect, request_id: str) -> bytes:
    """The error as a JSON body in the dialect's envelope."""
    status = error_status(error)
    if dialect.is_anthropic:
        return json_text(
            {"type": "error", "error": _anthropic(error, status), "request_id": request_id or None}
        )
    return json_text({"error": _openai(error, status)})


def error_event(error: IopError, dialect: Dialect, *, newline: bytes = b"\n") -> bytes:
    """The error as one event of a stream that has begun; the stream ends after it (SF-06, SF-14)."""
    status = error_status(error)
    if dialect.is_anthropic:
        data = json_text({"type": "error", "error": _anthropic(error, status)})
        return b"event: error" + newline + b"data: " + data + newline + newline
    if dialect is Dialect.RESPONSES:
        # `code`, `message` and `param` are that dialect's own; `error` is what makes its official client
        # raise.
        shape = _openai(error, status)
        event = {"type": "error", "code": shape["code"], "message": shape["message"], "param": shape["param"]}
        data = json_text(event | {"error": shape})
        return b"event: error" + newline + b"data: " + data + newline + newline
    return b"data: " + json_text({"error": _openai(error, status)}) + newline + newline


def late_answer_event(status: int, body: bytes, dialect: Dialect) -> bytes:
    """A whole answer as the last event of a stream that was begun before it came (SF-06, EN-110).

    An error in the dialect's envelope, ours or the provider's, keeps its words; of anything else only the status is
    told.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = None
    if status >= 400 and isinstance(value, dict) and isinstance(error := value.get("error"), dict):
        if dialect.is_anthropic:
            return b"event: error\ndata: " + json_text(value | {"type": "error"}) + b"\n\n"
        if dialect is Dialect.RESPONSES:
            value = {
                "type": "error",
                **{key: error.get(key) for key in ("code", "message", "param")},
                "error": error,
            }
            return b"event: error\ndata: " + json_text(value) + b"\n\n"
        return b"data: " + json_text(value) + b"\n\n"
    told = f"The provider answered with status {status} and no event stream."
    return error_event(Unavailable(told, reason="upstream_error", retry_after_s=1.0), dialect)


def error_headers(error: IopError) -> HeaderList:
    """Header fields that go with an error of any surface: content type, ``Retry-After``, ``Allow``,
    ``Accept-Encoding``.
    """
    headers: HeaderList = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if error.reason == "CONTENT_ENCODING":
        headers.append((b"accept-encoding", b"identity"))
    allow = error.details.get("allow")
    if allow:
        headers.append((b"allow", allow.encode("ascii", "replace")))
    return headers
