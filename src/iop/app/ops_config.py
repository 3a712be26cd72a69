"""Routes on the ops listener that show, plan and apply a config: for ``iop config show``, ``plan`` and ``apply``."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from iop.admin.desired import OverrideRecord
from iop.admin.permissions import Permission, Principal, require
from iop.api.http.ops import bearer_token, refusal
from iop.app.edge_reload import ConfigKeeper, ConfigPlan
from iop.app.overrides import shown_overrides, with_overrides
from iop.config import EdgeConfig, effective_values
from iop.core.errors import InvalidRequest, IopError

__all__ = ["config_routes"]

_log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
"""Twice the largest config, for JSON's escapes."""

NAME_CHARS_MAX: Final = 400

Authenticate = Callable[[str | None], Principal]
FindOverrides = Callable[[], Awaitable[Sequence[OverrideRecord]]]


def config_routes(
    keeper: ConfigKeeper, authenticate: Authenticate, *, find_overrides: FindOverrides
) -> list[Route]:
    """``GET /config``, ``POST /config/plan`` and ``POST /config/apply``, for principals that may reconfigure.

    The body of the latter two is ``{"text": YAML, "name": FILE}``; the name is optional, and for messages. Relative
    paths and references in the text are the Edge's own, as in its file. ``find_overrides`` tells the reconfigured
    values that hold over the running config's (AD-47).
    """

    async def show(request: Request) -> JSONResponse:
        return await _guarded(request, _show)

    async def plan(request: Request) -> JSONResponse:
        return await _guarded(request, _plan)

    async def apply(request: Request) -> JSONResponse:
        return await _guarded(request, _apply)

    async def _guarded(
        request: Request, act: Callable[[Request, Principal], Awaitable[dict[str, Any]]]
    ) -> JSONResponse:
        try:
            principal = authenticate(bearer_token(request))
            require(principal, Permission.RECONFIGURE)
            return JSONResponse(await act(request, principal))
        except IopError as error:
            return refusal(error)

    async def _show(_request: Request, _principal: Principal) -> dict[str, Any]:
        shown = shown_overrides(await find_overrides(), keeper.loaded.config)
        rows = with_overrides(effective_values(keeper.loaded), shown)
        return {
            "revision": keeper.revision,
            "values": [{"key": row.key, "value": row.value, "origin": row.origin} for row in rows],
            "overrides": [one.to_json() for one in shown],
        }

    async def _plan(request: Request, _principal: Principal) -> dict[str, Any]:
        text, name = await _proposed(request)
        planned = keeper.plan(text, name=name)
        return {"revision": keeper.revision, **_shown(planned), **await _over(planned.loaded.config)}

    async def _apply(request: Request, principal: Principal) -> dict[str, Any]:
        text, name = await _proposed(request)
        # Told as they are before: afterwards those that this config ends are gone.
        over = await _over(keeper.plan(text, name=name).loaded.config)
        planned = keeper.plan(text)
        revision = keeper.take(planned)
        _log.info("config.applied_by", extra={"principal": principal.name, "config_revision": revision})
        return {"revision": revision, **_shown(planned), **over, "not_persisted": keeper.persist(text)}

    async def _over(config: EdgeConfig) -> dict[str, Any]:
        return {"overrides": [one.to_json() for one in shown_overrides(await find_overrides(), config)]}

    return [
        Route("/config", show, methods=["GET"]),
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


async def _proposed(request: Request) -> tuple[str, str]:
    """The config in the body, and how its sender calls it. Raises InvalidRequest."""
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
    name = shape.get("name", "")
    return str(shape["text"]), "".join(filter(str.isprintable, name[:NAME_CHARS_MAX])) if isinstance(
        name, str
    ) else ""
