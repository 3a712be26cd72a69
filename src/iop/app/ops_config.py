"""Routes on the ops listener that plan and apply a config: for ``iop config plan`` and ``iop config apply``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from iop.admin.permissions import Permission, Principal, require
from iop.api.http.ops import bearer_token, refusal
from iop.app.edge_reload import ConfigKeeper, ConfigPlan
from iop.core.errors import InvalidRequest, IopError

__all__ = ["config_routes"]

_log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
"""Twice the largest config, for JSON's escapes."""

Authenticate = Callable[[str | None], Principal]


def config_routes(keeper: ConfigKeeper, authenticate: Authenticate) -> list[Route]:
    """``POST /config/plan`` and ``POST /config/apply``, for principals that may reconfigure.

    The body is ``{"text": YAML}``. Relative paths and references in it are the Edge's own, as in its file.
    """

    async def plan(request: Request) -> JSONResponse:
        return await _guarded(request, _plan)

    async def apply(request: Request) -> JSONResponse:
        return await _guarded(request, _apply)

    async def _guarded(request: Request, act: Callable[[str, Principal], dict[str, Any]]) -> JSONResponse:
        try:
            principal = authenticate(bearer_token(request))
            require(principal, Permission.RECONFIGURE)
            return JSONResponse(act(await _text(request), principal))
        except IopError as error:
            return refusal(error)

    def _plan(text: str, _principal: Principal) -> dict[str, Any]:
        return {"revision": keeper.revision, **_shown(keeper.plan(text))}

    def _apply(text: str, principal: Principal) -> dict[str, Any]:
        planned = keeper.plan(text)
        revision = keeper.take(planned)
        _log.info("config.applied_by", extra={"principal": principal.name, "config_revision": revision})
        return {"revision": revision, **_shown(planned), "not_persisted": keeper.persist(text)}

    return [
        Route("/config/plan", plan, methods=["POST"]),
        Route("/config/apply", apply, methods=["POST"]),
    ]


def _shown(plan: ConfigPlan) -> dict[str, Any]:
    return {
        "changes": [
            {"key": change.key, "before": change.before, "after": change.after} for change in plan.changes
        ],
        "needs_restart": list(plan.needs_restart),
        "warnings": list(plan.loaded.warnings),
    }


async def _text(request: Request) -> str:
    """The config in the body. Raises InvalidRequest."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise InvalidRequest("The config is too large.", reason="CONFIG_TOO_LARGE")
    try:
        shape = orjson.loads(bytes(body))
    except orjson.JSONDecodeError:
        raise InvalidRequest('Send {"text": YAML}.', reason="BAD_BODY") from None
    if not isinstance(shape, dict) or not isinstance(shape.get("text"), str):
        raise InvalidRequest('Send {"text": YAML}.', reason="BAD_BODY")
    return str(shape["text"])
