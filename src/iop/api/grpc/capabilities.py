"""What a model advertises decides what Generate accepts (SF-22). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from iop.api.grpc.metadata import TARGET_DP_RANK
from iop.api.grpc.ports import (
    CandidateMode,
    EveryCandidate,
    GenerateCall,
    GuidedMode,
    LogprobCapabilities,
    LogprobWish,
    ModelInfo,
    Parallelism,
    ServerInfo,
    TheseCandidates,
    TopCandidates,
)
from iop.core.errors import InvalidRequest, IopError, Unsupported
from iop.wire.data_parallel import served_ranks, write_ranks

__all__ = ["check_supported"]

PROMPT_FORMAT_KEY: Final = "prompt_format"
"""`GenerateRequest.extra` key: how `prompt` is to be read."""


def check_supported(call: GenerateCall, model: ModelInfo, server_info: Callable[[], ServerInfo]) -> None:
    """Refuse what was asked for and is not advertised: only a plain yes counts.

    ``server_info`` is asked where the model itself does not tell.

    Raises:
        Unsupported: UNSUPPORTED_FEATURE, naming the feature.
        InvalidRequest: a number beyond an advertised maximum.
    """
    for refusal in _refusals(call, model, server_info):
        raise refusal


def _refusals(
    call: GenerateCall, model: ModelInfo, server_info: Callable[[], ServerInfo]
) -> Iterator[IopError]:
    can = model.generation
    asked = (
        ("prompt", isinstance(call.prompt, str), model.supports_text_input),
        ("token_ids", not isinstance(call.prompt, str), model.supports_token_ids_input),
        ("media", bool(call.media), model.supports_multimodal),
        ("lora_name", bool(call.lora_name), model.supports_lora),
        ("kv.session", call.kv_session is not None, False),
        ("kv.cache_salt", call.cache_salt is not None, can.supports_cache_salt),
        ("kv.bypass_prefix_cache", call.bypass_prefix_cache, can.supports_prefix_cache_bypass),
        (
            "stopping.include_stop_in_output",
            bool(call.stopping.include_stop_in_output),
            can.supports_stop_in_output,
        ),
        ("openengine-priority", call.hints.priority is not None, can.supports_priority),
        ("guided.backend", call.guide is not None and bool(call.guide.backend), False),
        *((f"extra.{key}", True, _knows_extra(key, value, model)) for key, value in call.extra.items()),
    )
    yield from (_unsupported(feature) for feature, is_asked, is_there in asked if is_asked and not is_there)
    if call.guide is not None:
        guided = can.guided_decoding
        if not guided.supported or GuidedMode[call.guide.kind.upper()] not in guided.modes:
            yield _unsupported(f"guided.{call.guide.kind}")
    yield from _logprob_refusals("prompt", call.prompt_logprobs, can.prompt_logprobs)
    yield from _logprob_refusals("output", call.output_logprobs, can.output_logprobs)
    sequences_max = 1 if can.max_num_sequences is None else can.max_num_sequences
    if call.sampling.num_sequences is not None and not 1 <= call.sampling.num_sequences <= sequences_max:
        yield _beyond("sampling.num_sequences", f"must be from 1 to {sequences_max}")
    if (wanted := call.hints.target_dp_rank) is not None:
        ranks = model.data_parallel_ranks
        if ranks is None:
            ranks = parallel_ranks(server_info().parallelism)
        if not ranks:
            yield Unsupported(
                f"`{TARGET_DP_RANK}` is not offered for this model: none of its engines tells of data-parallel ranks. "
                "Ask without it; GetModelInfo tells when there are some.",
                reason="UNSUPPORTED_FEATURE",
                details={"feature": TARGET_DP_RANK},
            )
        elif wanted not in ranks:
            yield _beyond(TARGET_DP_RANK, f"must be a data-parallel rank of the model: {write_ranks(ranks)}")


def parallel_ranks(parallelism: Parallelism) -> frozenset[int]:
    """The ranks that a server of this shape serves."""
    return served_ranks(
        size=parallelism.data_parallel_size,
        rank=parallelism.data_parallel_rank,
        start_rank=parallelism.data_parallel_start_rank,
    )


def _knows_extra(key: str, value: object, model: ModelInfo) -> bool:
    """`prompt_format` says how to read the prompt; a model lists the ways it can as its tokenizer modes."""
    return key == PROMPT_FORMAT_KEY and value in model.tokenizer_modes


def _logprob_refusals(where: str, wish: LogprobWish | None, can: LogprobCapabilities) -> Iterator[IopError]:
    if wish is None:
        return
    if not can.supported:
        yield _unsupported(f"response.return_{where}_logprobs")
        return
    match wish.candidates:
        case None:
            return
        case TopCandidates():
            mode = CandidateMode.TOP_N
        case TheseCandidates():
            mode = CandidateMode.TOKEN_IDS
        case EveryCandidate():
            mode = CandidateMode.ALL
    if mode not in can.candidate_selection_modes:
        yield _unsupported(f"response.{where}_candidates.{mode.name.lower()}")
    elif (
        isinstance(wish.candidates, TopCandidates)
        and can.max_top_n is not None
        and wish.candidates.top_n > can.max_top_n
    ):
        yield _beyond(f"response.{where}_candidates.top_n", f"must be at most {can.max_top_n}")


def _unsupported(feature: str) -> Unsupported:
    return Unsupported(
        f"`{feature}` is not offered for this model.",
        reason="UNSUPPORTED_FEATURE",
        details={"feature": feature},
    )


def _beyond(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"`{field}` {rule}.", reason="INVALID_FIELD", details={"field": field})
