"""Generate accepts what the model advertises and refuses the rest, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from iop.api.grpc import ports
from iop.api.grpc.capabilities import check_supported
from iop.core.errors import InvalidRequest, IopError, Unsupported

CALL = ports.GenerateCall(request_id="r", model="m", prompt="hello")
LOGPROBS = ports.LogprobCapabilities(
    supported=True, candidate_selection_modes=tuple(ports.CandidateMode), max_top_n=5
)
EVERYTHING = ports.ModelInfo(
    model_id="m",
    served_model_name="m",
    supports_text_input=True,
    supports_token_ids_input=True,
    supports_lora=True,
    supports_multimodal=True,
    generation=ports.GenerationCapabilities(
        prompt_logprobs=LOGPROBS,
        output_logprobs=LOGPROBS,
        guided_decoding=ports.GuidedCapabilities(supported=True, modes=tuple(ports.GuidedMode)),
        max_num_sequences=4,
        supports_priority=True,
        supports_stop_in_output=True,
        supports_cache_salt=True,
        supports_prefix_cache_bypass=True,
    ),
)
NOTHING = ports.ModelInfo(model_id="m", served_model_name="m")
SERVER = ports.ServerInfo(
    engine_name="e",
    engine_version="1",
    instance_id="i",
    supported_models=("m",),
    parallelism=ports.Parallelism(data_parallel_size=2),
)


def wish(candidates: Any = None) -> ports.LogprobWish:
    return ports.LogprobWish(candidates=candidates)


FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": "text"}),
    ("token_ids", {"prompt": (1, 2)}),
    ("media", {"media": (ports.MediaItem(modality="image", source="url", value="http://x"),)}),
    ("lora_name", {"lora_name": "a"}),
    ("kv.cache_salt", {"cache_salt": ""}),
    ("kv.bypass_prefix_cache", {"bypass_prefix_cache": True}),
    ("stopping.include_stop_in_output", {"stopping": ports.Stopping(include_stop_in_output=True)}),
    ("openengine-priority", {"hints": ports.RoutingHints(priority=0)}),
    ("response.return_prompt_logprobs", {"prompt_logprobs": wish()}),
    ("response.return_output_logprobs", {"output_logprobs": wish()}),
    ("guided.json_schema", {"guide": ports.Guide(kind="json_schema", value="{}")}),
    ("guided.choice", {"guide": ports.Guide(kind="choice", value=("a",))}),
]


def asked(**changes: Any) -> ports.GenerateCall:
    return dataclasses.replace(CALL, **changes)


@pytest.mark.clause("SF-22")
@pytest.mark.parametrize(("feature", "changes"), FEATURES)
def test_a_feature_passes_where_advertised_and_is_refused_where_not(
    feature: str, changes: dict[str, Any]
) -> None:
    call = asked(**changes)
    check_supported(call, EVERYTHING, lambda: SERVER)
    base = (
        NOTHING
        if feature in {"prompt", "token_ids"}
        else dataclasses.replace(NOTHING, supports_text_input=True, supports_token_ids_input=True)
    )
    with pytest.raises(Unsupported) as caught:
        check_supported(call, base, lambda: SERVER)
    assert caught.value.details == {"feature": feature}
    assert caught.value.reason == "UNSUPPORTED_FEATURE"


@pytest.mark.clause("SF-22")
@pytest.mark.parametrize(
    "changes",
    [
        {"bypass_prefix_cache": False},
        {"stopping": ports.Stopping(include_stop_in_output=False, ignore_eos=True)},
        {"hints": ports.RoutingHints(routing_key="k", target_dp_rank=0)},
        {"sampling": ports.SamplingParams(num_sequences=1)},
    ],
)
def test_saying_no_to_a_feature_needs_no_support_for_it(changes: dict[str, Any]) -> None:
    check_supported(asked(**changes), dataclasses.replace(NOTHING, supports_text_input=True), lambda: SERVER)


@pytest.mark.clause("SF-22")
@pytest.mark.parametrize(
    "changes",
    [
        {"kv_session": b""},
        {"guide": ports.Guide(kind="regex", value="a", backend="xgrammar")},
        {"extra": {"anything": 1}},
        {"extra": {"prompt_format": "unheard-of"}},
    ],
)
def test_what_nobody_can_advertise_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        check_supported(asked(**changes), EVERYTHING, lambda: SERVER)


@pytest.mark.clause("SF-22")
@pytest.mark.parametrize(
    ("candidates", "mode"),
    [
        (ports.TopCandidates(top_n=1), ports.CandidateMode.TOP_N),
        (ports.TheseCandidates(token_ids=(1,)), ports.CandidateMode.TOKEN_IDS),
        (ports.EveryCandidate(), ports.CandidateMode.ALL),
    ],
)
def test_each_way_to_select_candidates_is_judged_alone(candidates: Any, mode: ports.CandidateMode) -> None:
    def model(*modes: ports.CandidateMode) -> ports.ModelInfo:
        can = dataclasses.replace(LOGPROBS, candidate_selection_modes=modes)
        generation = dataclasses.replace(EVERYTHING.generation, output_logprobs=can)
        return dataclasses.replace(EVERYTHING, generation=generation)

    call = asked(output_logprobs=wish(candidates))
    check_supported(call, model(mode), lambda: SERVER)
    others = [other for other in ports.CandidateMode if other is not mode]
    with pytest.raises(Unsupported, match=mode.name.lower()):
        check_supported(call, model(*others), lambda: SERVER)


@pytest.mark.clause("SF-22")
@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({"output_logprobs": wish(ports.TopCandidates(top_n=5))}, True),
        ({"output_logprobs": wish(ports.TopCandidates(top_n=6))}, False),
        ({"sampling": ports.SamplingParams(num_sequences=4)}, True),
        ({"sampling": ports.SamplingParams(num_sequences=5)}, False),
        ({"sampling": ports.SamplingParams(num_sequences=0)}, False),
        ({"hints": ports.RoutingHints(target_dp_rank=1)}, True),
        ({"hints": ports.RoutingHints(target_dp_rank=2)}, False),
    ],
)
def test_advertised_maxima_are_the_border(changes: dict[str, Any], is_taken: bool) -> None:
    caught: IopError | None = None
    try:
        check_supported(asked(**changes), EVERYTHING, lambda: SERVER)
    except InvalidRequest as error:
        caught = error
    assert (caught is None) is is_taken


@pytest.mark.clause("SF-21", "SF-22")
def test_a_models_own_ranks_go_before_those_of_its_server() -> None:
    wanted = asked(hints=ports.RoutingHints(target_dp_rank=4))
    check_supported(
        wanted, dataclasses.replace(EVERYTHING, data_parallel_ranks=frozenset({4, 5})), lambda: SERVER
    )
    with pytest.raises(InvalidRequest, match="of the model: 0-1,3"):
        check_supported(
            wanted, dataclasses.replace(EVERYTHING, data_parallel_ranks=frozenset({0, 1, 3})), lambda: SERVER
        )
    with pytest.raises(Unsupported) as caught:
        check_supported(
            wanted, dataclasses.replace(EVERYTHING, data_parallel_ranks=frozenset()), lambda: SERVER
        )
    assert caught.value.details == {"feature": "openengine-target-dp-rank"}
