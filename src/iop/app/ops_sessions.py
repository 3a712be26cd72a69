"""The route on the ops listener that ends an agent's session: for ``iop session end``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from iop.admin.permissions import Permission, Principal, require
from iop.api.http.ops import bearer_token, refusal
from iop.core.errors import InvalidRequest, IopError
from iop.core.ids import NodeId

__all__ = ["session_routes"]

_log = logging.getLogger(__name__)

SESSION_BYTES_MAX: Final = 1024
"""A caller's longest session name, with its API key's name before it, is shorter."""

Authenticate = Callable[[str | None], Principal]
TerminateSession = Callable[[str], list[NodeId]]


def session_routes(terminate: TerminateSession, authenticate: Authenticate) -> list[Route]:
    """``DELETE /sessions/{session}``: end its runs and drop its state on every ready Node (EN-70).

    For principals that may abort other people's work (AD-103). The answer names the Nodes that were told; a session
    that nobody knows is no error.
    """

    async def end(request: Request) -> JSONResponse:
        try:
            principal = authenticate(bearer_token(request))
            require(principal, Permission.ABORT)
            session = request.path_params["session"]
            if len(session.encode()) > SESSION_BYTES_MAX:
                raise InvalidRequest(
                    f"a session's id has at most {SESSION_BYTES_MAX} bytes", reason="BAD_SESSION"
                )
            told = terminate(session)
            _log.info("session.terminated_by", extra={"principal": principal.name, "nodes": told})
            return JSONResponse({"session": session, "nodes": told})
        except IopError as error:
            return refusal(error)

    return [Route("/sessions/{session:path}", end, methods=["DELETE"])]
