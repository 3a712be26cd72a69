"""``GET /v1/models``: what callers may ask for, in a shape that both official clients read (SF-01, SF-02)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from iop.api.http.matrix import SurfaceMatrix
from iop.core.errors import NotFound
from iop.edge.snapshot import EdgeSnapshot, ModelSpec

if TYPE_CHECKING:
    from iop.api.http.ops import OpsSource

__all__ = ["StatusWithSurfaces", "list_models", "model_entry"]

MayUse = Callable[..., bool]
"""Whether a caller may use a model of one of these names."""


def list_models(snapshot: EdgeSnapshot, *, matrix: SurfaceMatrix, may_use: MayUse) -> dict[str, Any]:
    """All models that the caller may use."""
    entries = [
        _entry(snapshot, model, matrix)
        for model in snapshot.models.values()
        if may_use(model.id, *model.aliases)
    ]
    return {
        "object": "list",
        "data": entries,
        "has_more": False,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
    }


def model_entry(
    snapshot: EdgeSnapshot, name: bytes, *, matrix: SurfaceMatrix, may_use: MayUse
) -> dict[str, Any]:
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
    return _entry(snapshot, model, matrix)


def _entry(snapshot: EdgeSnapshot, model: ModelSpec, matrix: SurfaceMatrix) -> dict[str, Any]:
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
            "operations": matrix.tunnelled(snapshot, model),
            **matrix.of(snapshot, model),
            "long_context_tokens": model.long_context_tokens,
        },
    }


class StatusWithSurfaces:
    """A fleet's status whose models tell their surfaces too, for ``iop models``.

    Args:
        source: what else the ops listener shows.
        find_snapshot: the running configuration.
        matrix: judges pools.
    """

    def __init__(
        self, source: OpsSource, *, find_snapshot: Callable[[], EdgeSnapshot], matrix: SurfaceMatrix
    ) -> None:
        self._matrix = matrix
        self._source = source
        self._find_snapshot = find_snapshot
        self.explain = source.explain
        self.command = source.command

    def status(self, *, with_leases: bool = False) -> dict[str, Any]:
        """The fleet; each model with its surfaces (:class:`SurfaceMatrix`)."""
        shown = self._source.status(with_leases=with_leases)
        snapshot = self._find_snapshot()
        for entry in shown["models"]:
            model = snapshot.find_model(entry["id"])
            if model is not None:
                entry.update(self._matrix.of(snapshot, model))
        return shown
