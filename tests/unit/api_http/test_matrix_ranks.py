"""Data-parallel ranks in what a model can do (SF-21, SF-22)."""

from __future__ import annotations

import pytest

from iop.api.http.matrix import SurfaceMatrix
from iop.core.ids import ModelId, ProviderId
from iop.testing.edge_fleet import adapter_spec, snapshot_of
from iop.wire.data_parallel import RANKS_CAPABILITY
from iop.wire.messages import ProviderSnapshot

RANKS = {"chats": "0-1", "vectors": "2-3", "odd": "0-999999"}


@pytest.mark.clause("SF-21", "SF-22", "SF-01")
def test_ranks_of_those_are_named_that_a_call_can_go_to_and_only_if_they_can_be_read() -> None:
    specs = {
        "n1/chats": adapter_spec("chats"),
        "n1/vectors": adapter_spec("vectors", operations=frozenset({"embeddings"})),
        "n1/odd": adapter_spec("odd"),
    }
    snapshot = snapshot_of(specs, {"fast": list(specs)})

    def report(_node: object, provider: ProviderId) -> ProviderSnapshot:
        told = {f"{RANKS_CAPABILITY}target-of-n1/{provider}": RANKS[provider]}
        return ProviderSnapshot(id=provider, capabilities=told)

    told = SurfaceMatrix(report).of(snapshot, snapshot.models[ModelId("fast")])
    assert told["data_parallel_ranks"] == "0-1"
