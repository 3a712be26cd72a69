"""``GET /v1/models``: what callers may ask for, in a shape that both official clients read (SF-01, SF-02)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from iop.api.http.convert.plan import RUN_OPERATIONS, conversion_for
from iop.core.errors import NotFound
from iop.edge.calls import Route
from iop.edge.snapshot import EdgeSnapshot, ModelSpec

if TYPE_CHECKING:
    from iop.api.http.ops import OpsSource

__all__ = ["StatusWithSurfaces", "list_models", "model_entry"]

MayUse = Callable[..., bool]
"""Whether a caller may use a model of one of these names."""

_TUNNEL_OPERATIONS = (
    "chat_completions",
    "completions",
    "embeddings",
    "responses",
    "messages",
    "count_tokens",
)


def list_models(snapshot: EdgeSnapshot, *, may_use: MayUse) -> dict[str, Any]:
    """All models that the caller may use."""
    entries = [
        _entry(snapshot, model) for model in snapshot.models.values() if may_use(model.id, *model.aliases)
    ]
    return {
        "object": "list",
        "data": entries,
        "has_more": False,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
    }


def model_entry(snapshot: EdgeSnapshot, name: bytes, *, may_use: MayUse) -> dict[str, Any]:
    """One model by its id or alias, as it stands in the path.

    Raises:
        NotFound: no such model, or one that the caller may not know of.
    """
    wanted = unquote(name.decode("ascii", "replace"))
    model = snapshot.find_model(wanted)
    if model is None or not may_use(model.id, *model.aliases):
        raise NotFound(
            f"The model `{wanted[:200]}` is not served here; `GET /v1/models` lists what is.",
            reason="model_not_found",
            details={"field": "model"},
        )
    return _entry(snapshot, model)


def _entry(snapshot: EdgeSnapshot, model: ModelSpec) -> dict[str, Any]:
    created = model.created_unix_s
    return {
        "id": model.id,
        "object": "model",
        "created": created,
        "owned_by": "iop",
        "type": "model",
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "iop": {
            "aliases": list(model.aliases),
            "operations": _operations(snapshot, model),
            **_surfaces(snapshot, model),
            "long_context_tokens": model.long_context_tokens,
        },
    }


def _operations(snapshot: EdgeSnapshot, model: ModelSpec) -> list[str]:
    """What at least one member of the pool is configured to serve by tunnel."""
    offered: set[str] = set()
    for member in model.members:
        adapter = snapshot.find_adapter(member.key)
        if adapter is None or not adapter.enabled or adapter.route is not Route.TUNNEL:
            continue
        offered.update(_TUNNEL_OPERATIONS if adapter.operations is None else adapter.operations)
    return sorted(offered.intersection(_TUNNEL_OPERATIONS))


class StatusWithSurfaces:
    """A fleet's status whose models tell their surfaces too, for ``iop models``.

    Args:
        source: what else the ops listener shows.
        find_snapshot: the running configuration.
    """

    def __init__(self, source: OpsSource, *, find_snapshot: Callable[[], EdgeSnapshot]) -> None:
        self._source = source
        self._find_snapshot = find_snapshot
        self.explain = source.explain
        self.command = source.command

    def status(self, *, with_leases: bool = False) -> dict[str, Any]:
        """The fleet; each model with ``endpoints`` and ``conversions``."""
        shown = self._source.status(with_leases=with_leases)
        snapshot = self._find_snapshot()
        for entry in shown["models"]:
            model = snapshot.find_model(entry["id"])
            if model is not None:
                entry.update(_surfaces(snapshot, model))
        return shown


_PATHS = {
    "chat_completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
}


def _surfaces(snapshot: EdgeSnapshot, model: ModelSpec) -> dict[str, Any]:
    """How each route of the model is served, by whichever members of its pool (SF-01).

    ``tunnel``: untouched; ``run``: as a normalised run; ``converted``: in another dialect, which
    ``conversions`` names by its operation; ``estimate``: by the Edge, marked (SF-14). What is missing is refused.
    """
    ways: dict[str, set[str]] = {}
    conversions: dict[str, set[str]] = {}
    for member in model.members:
        adapter = snapshot.find_adapter(member.key)
        if adapter is None or not adapter.enabled:
            continue
        is_run = adapter.route is Route.RUN
        offered = RUN_OPERATIONS if is_run else adapter.operations or frozenset(_TUNNEL_OPERATIONS)
        for operation in _PATHS:
            if operation in offered:
                ways.setdefault(operation, set()).add("run" if is_run else "tunnel")
            elif (other := conversion_for(operation, offered)) is not None:
                ways.setdefault(operation, set()).add("converted")
                conversions.setdefault(operation, set()).add(other)
    if "messages" in ways and "count_tokens" not in ways:
        ways["count_tokens"] = {"estimate"}
    return {
        "endpoints": {path: sorted(ways[name]) for name, path in _PATHS.items() if name in ways},
        "conversions": {
            path: sorted(conversions[name]) for name, path in _PATHS.items() if name in conversions
        },
    }
