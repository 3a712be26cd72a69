"""Which data-parallel ranks of an OpenEngine server can be asked for (SF-21, SF-22). Pure."""

from __future__ import annotations

from typing import Final

from iop.pb.openengine.v1 import model_pb2, server_pb2
from iop.wire.data_parallel import RANKS_EXTRA_KEY, read_ranks, served_ranks

__all__ = ["ranks_of"]

_SAYS_SO_ITSELF: Final = {"tensorrt_llm": "trtllm_supports_dp_rank_targeting"}
"""Engines of which some releases refuse any rank: the key of ``ServerInfo.extra`` in which others say that they take
one."""


def ranks_of(server: server_pb2.ServerInfo, model: model_pb2.ModelInfo | None) -> frozenset[int]:
    """The ranks for one model: what the server tells for it, as another Edge does, else those of its parallelism."""
    if model is not None and RANKS_EXTRA_KEY in model.extra:
        told = model.extra[RANKS_EXTRA_KEY]
        return read_ranks(told) if isinstance(told, str) else frozenset()
    needed = _SAYS_SO_ITSELF.get(server.engine_name)
    if needed is not None and not (needed in server.extra and server.extra[needed] is True):
        return frozenset()
    shape = server.parallelism
    return served_ranks(
        size=shape.data_parallel_size if shape.HasField("data_parallel_size") else None,
        rank=shape.data_parallel_rank if shape.HasField("data_parallel_rank") else None,
        start_rank=shape.data_parallel_start_rank if shape.HasField("data_parallel_start_rank") else None,
    )
