"""The ops listener: health, metrics, fleet status and request explanations, and whatever is mounted beside
them.

Health answers everybody; all else needs a token whose principal may read (SF-30). Small and rarely asked,
so it runs on Starlette; the public API has a server of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from iop.config import ConfigInvalid
from iop.core.errors import IopError, NotFound, PermissionDenied, Unauthenticated, Unavailable

Endpoint = Callable[[Request], Awaitable[Response]]

STOP_TIMEOUT_S: Final = 3
"""How long open answers may take at the end; all of them are short."""

CONNECTIONS_MAX: Final = 256
"""Operators, a scraper and consoles; more is somebody's mistake."""

AuthorizeViewer = Callable[[str | None], None]
"""Checks a bearer token. Raises Unauthenticated for none or an unknown one, PermissionDenied for one that
may not read.
"""


class OpsSource(Protocol):
    """What the listener shows."""

    def status(self, *, with_leases: bool = False) -> dict[str, Any]:
        """The fleet (``GET /status``)."""
        ...

    def explain(self, request_id: str) -> dict[str, Any]:
        """One request. Raises NotFound."""
        ...

    async def command(self, node: str, what: str, *, adapter: str = "") -> dict[str, Any]:
        """Ask a Node (EN-75)."""
        ...


def ops_app(
    *,
    source: OpsSource,
    render_metrics: Callable[[], bytes],
    metrics_type: str,
    authorize: AuthorizeViewer,
    is_ready: Callable[[], tuple[bool, str]],
    read_artifact: Callable[[str], AsyncIterator[bytes]] | None = None,
    more_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The application.

    Args:
        source: status and explanations.
        render_metrics: the Prometheus text.
        metrics_type: its content type.
        authorize: guards everything but health.
        is_ready: whether the process can do its work, and in words why not.
        read_artifact: fetches a profile artifact by its name (AD-46); ``None`` where there are none.
        more_routes: routes of others, such as the console's; they guard themselves.
    """

    def guarded(endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            try:
                authorize(bearer_token(request))
                return await endpoint(request)
            except IopError as error:
                return refusal(error)

        return checked

    async def healthz(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        ready, reason = is_ready()
        return JSONResponse({"ready": ready, "reason": reason}, status_code=200 if ready else 503)

    async def metrics(_request: Request) -> Response:
        return Response(render_metrics(), media_type=metrics_type)

    async def status(request: Request) -> Response:
        with_leases = request.query_params.get("leases", "").lower() in {"1", "true", "yes"}
        return JSONResponse(source.status(with_leases=with_leases))

    async def explain(request: Request) -> Response:
        return JSONResponse(source.explain(request.path_params["request_id"]))

    async def command(request: Request) -> Response:
        adapter = request.query_params.get("adapter", "")
        node, what = request.path_params["node"], request.path_params["what"]
        return JSONResponse(await source.command(node, what, adapter=adapter))

    async def artifact(request: Request) -> Response:
        if read_artifact is None:
            raise NotFound("there are no artifacts here", reason="unknown_artifact")
        chunks = read_artifact(request.path_params["name"])
        # The first piece before the head: what cannot be fetched is a clear refusal, not a cut answer.
        first = await anext(chunks, b"")
        return StreamingResponse(_after(first, chunks), media_type="application/octet-stream")

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", guarded(metrics)),
            Route("/status", guarded(status)),
            Route("/explain/{request_id:path}", guarded(explain)),
            Route("/nodes/{node}/{what}", guarded(command)),
            Route("/artifacts/{name:path}", guarded(artifact)),
            *more_routes,
        ]
    )


class OpsServer:
    """Serves an application on one socket; ``async with`` it. Leaves signals to the process."""

    def __init__(
        self,
        app: Starlette,
        *,
        host: str,
        port: int,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_client_ca: str | None = None,
    ) -> None:
        self._host, self._port = host, port
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            limit_concurrency=CONNECTIONS_MAX,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
            ssl_ca_certs=tls_client_ca,
            ssl_cert_reqs=ssl.CERT_NONE if tls_client_ca is None else ssl.CERT_REQUIRED,
        )
        self._server = _Server(config)
        self._socket: socket.socket | None = None
        self._tasks = asyncio.TaskGroup()

    @property
    def port(self) -> int:
        """The bound port."""
        return self._port

    async def __aenter__(self) -> Self:
        """Bind and serve. Raises Unavailable when the address cannot be bound."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._port))
            listening.listen(128)
            listening.setblocking(False)
        except OSError as error:
            listening.close()
            raise Unavailable(
                f"port {self._port} of the ops listener cannot be bound; is it taken?", reason="BIND_FAILED"
            ) from error
        self._socket = listening
        self._port = listening.getsockname()[1]
        await self._tasks.__aenter__()
        self._tasks.create_task(self._server.serve(sockets=[listening]), name="ops listener")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        await self._tasks.__aexit__(None, None, None)
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, not to one of its listeners."""
        yield


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for data in rest:
        yield data


def bearer_token(request: Request) -> str | None:
    """The bearer token that a request shows, if any."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def refusal(error: IopError) -> JSONResponse:
    """An error as this listener tells it; a refused config lists every problem."""
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(int(error.retry_after_s))
    shape: dict[str, Any] = {"code": error.reason, "message": error.message}
    if isinstance(error, ConfigInvalid):
        shape["problems"] = [
            {"where": item.where, "key": item.key, "message": item.message, "fix": item.fix}
            for item in error.problems
        ]
    status = 403 if isinstance(error, PermissionDenied) else error.status.http
    return JSONResponse({"error": shape}, status_code=status, headers=headers)
