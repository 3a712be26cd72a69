"""Which ranks of an OpenEngine server can be asked for, from what servers say of themselves (SF-21, SF-22)."""

from __future__ import annotations

from typing import Any

import pytest

from iop.adapters.openengine.ranks import ranks_of
from iop.pb.openengine.v1 import model_pb2, server_pb2

pytestmark = pytest.mark.clause("SF-22")


def server(name: str = "engine", extra: dict[str, Any] | None = None, **shape: int) -> server_pb2.ServerInfo:
    info = server_pb2.ServerInfo(engine_name=name, parallelism=server_pb2.ParallelismInfo(**shape))
    info.extra.update(extra or {})
    return info


def model(**extra: Any) -> model_pb2.ModelInfo:
    info = model_pb2.ModelInfo(model_id="m")
    info.extra.update({f"iop.{key}": value for key, value in extra.items()})
    return info


def test_an_engine_has_the_ranks_of_its_parallelism() -> None:
    assert ranks_of(server(data_parallel_size=2, data_parallel_start_rank=4), None) == {4, 5}


def test_a_size_that_is_absent_is_unknown_and_one_of_nought_is_none() -> None:
    assert ranks_of(server(), model()) == ranks_of(server(data_parallel_size=0), model()) == frozenset()


def test_an_edge_tells_ranks_by_model() -> None:
    assert ranks_of(server(data_parallel_size=8), model(data_parallel_ranks="0-1,4")) == {0, 1, 4}
    assert ranks_of(server(data_parallel_size=8), model(data_parallel_ranks="")) == frozenset()


@pytest.mark.parametrize("value", [3, None, [0, 1], "zero"])
def test_ranks_that_cannot_be_read_are_none(value: Any) -> None:
    assert ranks_of(server(data_parallel_size=8), model(data_parallel_ranks=value)) == frozenset()


@pytest.mark.parametrize(
    ("extra", "ranks"), [({}, set()), ({"supports": False}, set()), ({"supports": True}, {0, 1})]
)
def test_tensorrt_llm_takes_a_rank_where_it_says_so(extra: dict[str, bool], ranks: set[int]) -> None:
    told = {f"trtllm_{key}_dp_rank_targeting": value for key, value in extra.items()}
    assert ranks_of(server("tensorrt_llm", told, data_parallel_size=2), None) == ranks
