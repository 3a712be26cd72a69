"""Refusals of the pools as the errors that surfaces translate (EN-110)."""

from __future__ import annotations

from typing import assert_never

from iop.core.errors import (
    Draining,
    InvalidRequest,
    IopError,
    NotFound,
    Overloaded,
    Unavailable,
    Unsupported,
)
from iop.edge.pools import Refusal, RefusalReason


def error_of_refusal(refusal: Refusal, model: str) -> IopError:
    """The error for one refusal; ``model`` as the caller named it."""
    reason, details, after = refusal.reason.value, refusal.details, refusal.retry_after_s
    match refusal.reason:
        case RefusalReason.QUEUE_FULL:
            message = f"the queue of model {model!r} is full"
            return Overloaded(message, reason=reason, details=details, retry_after_s=after)
        case RefusalReason.QUEUE_TIMEOUT:
            message = f"no provider of model {model!r} became free in time"
            return Overloaded(message, reason=reason, details=details, retry_after_s=after)
        case RefusalReason.NO_CAPACITY:
            message = f"no provider of model {model!r} is available"
            return Unavailable(message, reason=reason, details=details, retry_after_s=after)
        case RefusalReason.PAUSED:
            message = f"model {model!r} is paused"
            return Draining(message, reason=reason, details=details, retry_after_s=after)
        case RefusalReason.SHUTDOWN:
            return Draining("the gateway is shutting down", reason=reason, retry_after_s=after)
        case RefusalReason.MODEL_NOT_FOUND:
            return NotFound(f"the model {model!r} is not served here", reason=reason)
        case RefusalReason.OPERATION_NOT_SUPPORTED:
            offered = details.get("offered", "")
            message = f"model {model!r} does not offer this operation; it offers: {offered or 'none'}"
            return Unsupported(message, reason=reason, details=details)
        case RefusalReason.LONG_CONTEXT_NOT_SUPPORTED:
            message = f"no provider of model {model!r} takes prompts of this length"
            return Unsupported(message, reason=reason, details=details)
        case RefusalReason.TARGET_RANK_NOT_SERVED:
            ranks = details.get("ranks", "")
            message = f"no provider of model {model!r} has this data-parallel rank; " + (
                f"it has: {ranks}" if ranks else "none of them told of ranks: ask for none"
            )
            return InvalidRequest(message, reason=reason, details=details)
        case _:
            assert_never(refusal.reason)
