"""Every error that IOP raises, as one tree.

::

    IopError
    +-- InvalidRequest          the caller's input is wrong; the message names the field and the fix
    +-- Unsupported             a well-formed wish that is not offered here
    +-- Unauthenticated         no credential, or one that nobody knows
    +-- PermissionDenied        a known caller who may not do this
    +-- NotFound                the named thing is absent
    +-- AlreadyExists           the named thing is there, and different
    +-- PreconditionFailed      the thing is in the wrong state
    +-- Conflict                lost a race or a compare-and-swap; read again, then retry
    +-- Overloaded              a limit was hit; retry with backoff
    +-- Draining                shutting down or paused; retry elsewhere
    +-- Unavailable             cannot serve now
    +-- DeadlineExceeded        out of time
    +-- Cancelled               its caller called it off
    +-- RemoteProtocolError     the peer broke the wire contract
    +-- LocalProtocolError      our own misuse of a protocol object; changes nothing
    +-- Internal                our bug

Each error carries a closed ``code`` (its class), an optional stable ``reason`` (UPPER_SNAKE, the thing that programs
match on), a public ``message`` for people and machine-readable ``details``. ``STATUS_BY_CODE`` is the one table that
surfaces translate by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from types import MappingProxyType
from typing import ClassVar, Final


@unique
class ErrorCode(Enum):
    """The closed set of error families; a value never changes its meaning."""

    INVALID_REQUEST = "INVALID_REQUEST"
    UNSUPPORTED = "UNSUPPORTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PRECONDITION_FAILED = "PRECONDITION_FAILED"
    CONFLICT = "CONFLICT"
    OVERLOADED = "OVERLOADED"
    DRAINING = "DRAINING"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    REMOTE_PROTOCOL = "REMOTE_PROTOCOL"
    LOCAL_PROTOCOL = "LOCAL_PROTOCOL"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfaceStatus:
    """How one error family shows on each surface.

    ``grpc`` is the gRPC status name, ``http`` the HTTP status, ``engine`` the OpenEngine ``ErrorCode`` name without its
    prefix, ``exit_code`` the command line's (see the list in the CLI reference).
    """

    grpc: str
    http: int
    engine: str
    exit_code: int


STATUS_BY_CODE: Final[Mapping[ErrorCode, SurfaceStatus]] = MappingProxyType(
    {
        ErrorCode.INVALID_REQUEST: SurfaceStatus(
            grpc="INVALID_ARGUMENT", http=400, engine="INVALID_ARGUMENT", exit_code=2
        ),
        ErrorCode.UNSUPPORTED: SurfaceStatus(
            grpc="UNIMPLEMENTED", http=501, engine="UNSUPPORTED_FEATURE", exit_code=3
        ),
        ErrorCode.UNAUTHENTICATED: SurfaceStatus(
            grpc="UNAUTHENTICATED", http=401, engine="INVALID_ARGUMENT", exit_code=3
        ),
        ErrorCode.PERMISSION_DENIED: SurfaceStatus(
            grpc="PERMISSION_DENIED", http=403, engine="INVALID_ARGUMENT", exit_code=3
        ),
        ErrorCode.NOT_FOUND: SurfaceStatus(grpc="NOT_FOUND", http=404, engine="MODEL_NOT_FOUND", exit_code=3),
        ErrorCode.ALREADY_EXISTS: SurfaceStatus(
            grpc="ALREADY_EXISTS", http=409, engine="DUPLICATE_REQUEST", exit_code=3
        ),
        ErrorCode.PRECONDITION_FAILED: SurfaceStatus(
            grpc="FAILED_PRECONDITION", http=400, engine="INVALID_ARGUMENT", exit_code=3
        ),
        ErrorCode.CONFLICT: SurfaceStatus(grpc="ABORTED", http=409, engine="INVALID_ARGUMENT", exit_code=3),
        ErrorCode.OVERLOADED: SurfaceStatus(
            grpc="RESOURCE_EXHAUSTED", http=429, engine="OVERLOADED", exit_code=1
        ),
        ErrorCode.DRAINING: SurfaceStatus(grpc="UNAVAILABLE", http=503, engine="DRAINING", exit_code=1),
        ErrorCode.UNAVAILABLE: SurfaceStatus(grpc="UNAVAILABLE", http=503, engine="INTERNAL", exit_code=1),
        ErrorCode.DEADLINE_EXCEEDED: SurfaceStatus(
            grpc="DEADLINE_EXCEEDED", http=504, engine="INTERNAL", exit_code=1
        ),
        ErrorCode.CANCELLED: SurfaceStatus(grpc="CANCELLED", http=499, engine="CANCELLED", exit_code=1),
        ErrorCode.REMOTE_PROTOCOL: SurfaceStatus(
            grpc="UNAVAILABLE", http=502, engine="INTERNAL", exit_code=1
        ),
        ErrorCode.LOCAL_PROTOCOL: SurfaceStatus(grpc="INTERNAL", http=500, engine="INTERNAL", exit_code=1),
        ErrorCode.INTERNAL: SurfaceStatus(grpc="INTERNAL", http=500, engine="INTERNAL", exit_code=1),
    }
)


class IopError(Exception):
    """Root of all typed errors.

    Args:
        message: for the person who must act: names the field and the fix; no paths, SQL, prompts or class names.
        reason: stable UPPER_SNAKE code for programs; defaults to the family's own name.
        details: string pairs for programs (ids, limits, current values); never secrets.
        retry_after_s: seconds after which a retry may succeed, where that is known.
        retryable: whether the same call may succeed later; defaults to the family's nature.
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    retryable_by_default: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        details: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.code.value
        self.details: Mapping[str, str] = MappingProxyType(dict(details or {}))
        self.retry_after_s = retry_after_s
        self.retryable = self.retryable_by_default if retryable is None else retryable

    @property
    def status(self) -> SurfaceStatus:
        """The row of ``STATUS_BY_CODE`` for this family."""
        return STATUS_BY_CODE[self.code]


class InvalidRequest(IopError):
    """The caller's input is wrong."""

    code = ErrorCode.INVALID_REQUEST


class Unsupported(IopError):
    """A well-formed wish that this server or engine does not offer."""

    code = ErrorCode.UNSUPPORTED


class Unauthenticated(IopError):
    """No credential, or an unknown one."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(IopError):
    """The caller is known and may not do this."""

    code = ErrorCode.PERMISSION_DENIED


class NotFound(IopError):
    """The named thing is absent."""

    code = ErrorCode.NOT_FOUND


class AlreadyExists(IopError):
    """The name is taken by something different."""

    code = ErrorCode.ALREADY_EXISTS


class PreconditionFailed(IopError):
    """The named thing is in the wrong state for this."""

    code = ErrorCode.PRECONDITION_FAILED


class Conflict(IopError):
    """Lost a race or a compare-and-swap; read again, then retry."""

    code = ErrorCode.CONFLICT
    retryable_by_default = True


class Overloaded(IopError):
    """A named limit was hit; retry with backoff."""

    code = ErrorCode.OVERLOADED
    retryable_by_default = True


class Draining(IopError):
    """No new work for now: shutting down or paused."""

    code = ErrorCode.DRAINING
    retryable_by_default = True


class Unavailable(IopError):
    """Cannot serve now."""

    code = ErrorCode.UNAVAILABLE
    retryable_by_default = True


class DeadlineExceeded(IopError):
    """Out of time."""

    code = ErrorCode.DEADLINE_EXCEEDED
    retryable_by_default = True


class Cancelled(IopError):
    """Its caller called it off."""

    code = ErrorCode.CANCELLED


class RemoteProtocolError(IopError):
    """The peer broke the wire contract."""

    code = ErrorCode.REMOTE_PROTOCOL


class LocalProtocolError(IopError):
    """We misused a protocol object; nothing was changed."""

    code = ErrorCode.LOCAL_PROTOCOL


class Internal(IopError):
    """A bug of ours."""

    code = ErrorCode.INTERNAL
