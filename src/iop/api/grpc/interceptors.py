"""What every RPC passes: one place that maps errors, one that lets callers in.

Order, outermost first: `ErrorInterceptor`, `AuthInterceptor`. The second turns a handler into one that takes
the request as bytes: a caller is authenticated and authorised before its message is parsed, which is the order
of AD-17 and keeps a stranger's bytes away from the parser.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from iop.admin.permissions import Permission, Principal, require
from iop.api.grpc.auth import ApiCaller, Credentials, read_credentials
from iop.api.grpc.errors import failure_of
from iop.api.grpc.inference_codec import REQUEST_ID_CHARS_MAX
from iop.api.strangers import Strangers, address_of_peer
from iop.core.errors import Internal, InvalidRequest, IopError, PermissionDenied, Unauthenticated, Unavailable

__all__ = [
    "AuthInterceptor",
    "ErrorInterceptor",
    "authorize_by_table",
    "current_api_caller",
    "current_caller",
    "current_principal",
    "name_request",
]

_log = logging.getLogger(__name__)

ABORT_TIMEOUT_S: Final = 1.0
"""How long a call that is being cancelled may take to tell its status; a dead connection must not hold us."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Continuation: TypeAlias = Callable[
    [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]
]
Behaviour: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
Caller = TypeVar("Caller", bound=Principal | ApiCaller)
Caller_co = TypeVar("Caller_co", bound=Principal | ApiCaller, covariant=True)

_caller: ContextVar[Principal | ApiCaller] = ContextVar("iop_grpc_caller")
_request_id: ContextVar[str] = ContextVar("iop_grpc_request_id", default="")


def current_principal() -> Principal:
    """The authenticated principal of the RPC that this task handles."""
    caller = _caller.get(None)
    if not isinstance(caller, Principal):
        raise Internal("An admin handler ran without a principal.")
    return caller


def name_request(request_id: str) -> None:
    """Say under which id the RPC of this task stands in logs, should it be refused (SF-32)."""
    _request_id.set(request_id[:REQUEST_ID_CHARS_MAX])


def current_api_caller() -> ApiCaller:
    """The caller of the RPC that this task handles, on a public listener."""
    caller = _caller.get(None)
    if not isinstance(caller, ApiCaller):
        raise Internal("A public handler ran without a caller.")
    return caller


def current_caller() -> Principal | ApiCaller:
    """The caller of the RPC that this task handles, for services that both kinds of listeners have."""
    caller = _caller.get(None)
    if caller is None:
        raise Internal("A handler ran without a caller.")
    return caller


# The base class is generic in its stubs only.
class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends every failed call with a mapped status; what is not ours becomes INTERNAL and says no more.

    Args:
        on_ended: told the full method name, the status and the seconds of each call, for metrics.
    """

    def __init__(self, *, on_ended: Callable[[str, str, float], None] | None = None) -> None:
        self._on_ended = on_ended

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Wrap the handler of one call."""
        method: str = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return None

        def guard(behaviour: Behaviour) -> Behaviour:
            async def guarded(request: Any, context: Context) -> Any:
                began = time.monotonic()
                code = "OK"
                try:
                    return await behaviour(request, context)
                except grpc.aio.AbortError:
                    code = "ABORTED_BY_HANDLER"
                    raise
                except asyncio.CancelledError:
                    # The peer left, the server stops, or our own code was cancelled. A handler that just ends
                    # leaves its caller waiting for the deadline; a peer that left does not mind a status.
                    code = "CANCELLED"
                    await _end_cancelled(context)
                    raise
                except IopError as error:
                    code = error.status.grpc
                    _log_failure(method, context, error)
                    return await _abort(context, error)
                except Exception:  # noqa: BLE001 - a supervisor: the log gets the cause, the caller INTERNAL
                    code = "INTERNAL"
                    _log.exception("rpc.failed_internally", extra={"rpc": method})
                    return await _abort(context, Internal("The server failed; its log has the cause."))
                finally:
                    if self._on_ended is not None:
                        self._on_ended(method, code, time.monotonic() - began)

            return guarded

        return _rewrap(handler, guard, takes_bytes=False)


class Authenticator(Protocol[Caller_co]):
    """Turns credentials into a caller, or raises Unauthenticated."""

    def authenticate(self, credentials: Credentials) -> Caller_co:
        """See the directories in `iop.api.grpc.auth`."""
        ...


class AuthInterceptor(grpc.aio.ServerInterceptor, Generic[Caller]):
    """Authenticates and authorises each call before its message is parsed (AD-03, AD-17).

    Args:
        authenticator: knows the callers.
        authorize: raises PermissionDenied unless the caller may call this full method name. Called for every
            method that is not public, so an unknown one is its to refuse.
        public: full method names, or service prefixes ending in `/`, that need no credential.
        on_refused: told of known callers who were not authorised or sent no message, for the audit (AD-101).
        strangers: how often an address may come without a credential that is known; None: as often as it likes.
    """

    def __init__(
        self,
        *,
        authenticator: Authenticator[Caller],
        authorize: Callable[[Caller, str], None],
        public: frozenset[str],
        on_refused: Callable[[Caller, str, IopError], Awaitable[None]] | None = None,
        strangers: Strangers | None = None,
    ) -> None:
        self._strangers = strangers
        self._on_refused = on_refused
        self._authenticator = authenticator
        self._authorize = authorize
        self._public = public

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Wrap the handler of one call."""
        method: str = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or self._is_public(method):
            return handler
        parse = None if handler.request_streaming else handler.request_deserializer

        def guard(behaviour: Behaviour) -> Behaviour:
            async def guarded(request: Any, context: Context) -> Any:
                caller = self._identify(context)
                _caller.set(caller)
                try:
                    self._authorize(caller, method)
                    message = _parse(request, parse)
                except IopError as error:
                    if self._on_refused is not None:
                        await self._on_refused(caller, method, error)
                    raise
                return await behaviour(message, context)

            return guarded

        return _rewrap(handler, guard, takes_bytes=parse is not None)

    def _identify(self, context: Context) -> Caller:
        try:
            credentials = read_credentials(
                context.invocation_metadata() or (), context.auth_context(), peer=context.peer()
            )
            return self._authenticator.authenticate(credentials)
        except Unauthenticated as error:
            if self._strangers is None:
                raise
            raise self._strangers.judge(address_of_peer(context.peer()), error) from None

    def _is_public(self, method: str) -> bool:
        return method in self._public or method[: method.rfind("/") + 1] in self._public


def authorize_by_table(table: Mapping[str, Permission | None]) -> Callable[[Principal, str], None]:
    """An authorisation that looks the method up; None there means any principal, absence means nobody."""

    def authorize(principal: Principal, method: str) -> None:
        try:
            permission = table[method]
        except KeyError:
            raise PermissionDenied(
                f"The method {method} is not granted to anybody here.", details={"rpc": method}
            ) from None
        if permission is not None:
            require(principal, permission)

    return authorize


def _parse(request: Any, parse: Callable[[bytes], Any] | None) -> Any:
    if parse is None:
        return request
    try:
        return parse(request)
    except DecodeError:
        raise InvalidRequest(
            "The request is not a message of the expected type.", reason="MALFORMED_MESSAGE"
        ) from None


def _rewrap(
    handler: grpc.RpcMethodHandler[Any, Any], guard: Callable[[Behaviour], Behaviour], *, takes_bytes: bool
) -> Any:
    """The same handler around a guarded behaviour, which writes its stream instead of yielding it."""
    parse = None if takes_bytes else handler.request_deserializer
    serialize = handler.response_serializer
    name = (
        ("stream" if handler.request_streaming else "unary")
        + "_"
        + ("stream" if handler.response_streaming else "unary")
    )
    inner: Any = getattr(handler, name)
    make: Any = getattr(grpc, f"{name}_rpc_method_handler")
    behaviour = guard(_as_writer(inner) if handler.response_streaming else inner)
    return make(behaviour, request_deserializer=parse, response_serializer=serialize)


def _as_writer(behaviour: Callable[[Any, Any], Any]) -> Behaviour:
    """One form for both kinds of streaming handlers: those that return responses and those that write them."""

    async def write_all(request: Any, context: Context) -> None:
        outcome = behaviour(request, context)
        if not inspect.isasyncgen(outcome):
            await outcome
            return
        async with contextlib.aclosing(outcome) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


async def _abort(context: Context, error: IopError) -> Any:
    failure = failure_of(error)
    kept = tuple(context.trailing_metadata() or ())
    await context.abort(failure.code, failure.message, (*kept, *failure.trailing_metadata))


async def _end_cancelled(context: Context) -> None:
    error = Unavailable("The server ended this call before it was done.", reason="CALL_ENDED")
    with contextlib.suppress(grpc.aio.BaseError, TimeoutError):
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            await _abort(context, error)


def _log_failure(method: str, context: Context, error: IopError) -> None:
    caller = _caller.get(None)
    level = logging.DEBUG if isinstance(error, Unauthenticated) else logging.INFO
    _log.log(
        level,
        "rpc.refused",
        extra={
            "rpc": method,
            "peer": context.peer(),
            "principal": caller.name if caller is not None else "",
            "code": error.status.grpc,
            "reason": error.reason,
            **({"request_id": request_id} if (request_id := _request_id.get()) else {}),
        },
    )
