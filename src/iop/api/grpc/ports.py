"""What the Inference and Control services need of whoever generates: an engine in this process, or a fleet.

Field names are the wire's. `None` means "not said" in a request and "unknown" in an answer; zero and false are values
(SF-22).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias

from iop.admin.enums import EngineRole

__all__ = [
    "AbortOutcome",
    "Candidate",
    "CandidateMode",
    "ControlPort",
    "Deployment",
    "EveryCandidate",
    "GenerateCall",
    "GenerationCapabilities",
    "GenerationEvent",
    "GenerationStream",
    "Guide",
    "GuidedCapabilities",
    "GuidedMode",
    "HealthPart",
    "HealthReport",
    "HealthState",
    "InferencePort",
    "LoadInfo",
    "LogprobCapabilities",
    "LogprobWish",
    "MayUse",
    "MediaItem",
    "ModelInfo",
    "OutputFinish",
    "OutputFinished",
    "OutputTokens",
    "Parallelism",
    "PromptScored",
    "RankLoad",
    "RequestFailed",
    "RoutingHints",
    "SamplingParams",
    "ScoredToken",
    "ServerInfo",
    "StopMatch",
    "Stopping",
    "TheseCandidates",
    "TopCandidates",
    "Usage",
    "any_model",
]

# ---------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingHints:
    """What a call's metadata said (SF-21).

    Attributes:
        routing_key: calls with equal keys prefer the same provider; empty: none.
        target_dp_rank: data-parallel rank wanted.
        priority: higher values first, as the protocol has it.
        traceparent: W3C trace context, as it came; empty: none.
        tracestate: the same.
    """

    routing_key: str = ""
    target_dp_rank: int | None = None
    priority: int | None = None
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; absent: the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    num_sequences: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When a sequence ends."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    include_stop_in_output: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopCandidates:
    """The `top_n` likeliest candidates."""

    top_n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TheseCandidates:
    """Exactly these."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryCandidate:
    """The whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobWish:
    """Log probabilities wanted: of the chosen tokens, and of these candidates beside them.

    `start` is the first position to report; prompts only.
    """

    candidates: TopCandidates | TheseCandidates | EveryCandidate | None = None
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A grammar for the output. `kind` is the wire's member name; `value` its text, choices or nothing."""

    kind: str
    value: str | tuple[str, ...] = ""
    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """One picture, clip or sound; `source` is url, data_uri or raw_bytes, and `value` its content."""

    modality: str
    source: str
    value: str | bytes
    mime_type: str = ""
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One generation, checked against what the model advertises.

    Attributes:
        request_id: never empty here.
        model: as the caller named it; empty: the only model.
        caller: name of the API key; empty on an open listener. Requests of equal callers are one's own (SF-23).
        kv_session: the hand-over reference, undecoded.
        message: the request as it came, for a server that is spoken to in the same words; None where it came otherwise.
        come_through: names of the Edges that the call came through, newest last; empty: it came from a client.
        known_as: the request id of the first of them; empty: `request_id` is the only one.
    """

    request_id: str
    model: str
    prompt: str | tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    stopping: Stopping = Stopping()
    prompt_logprobs: LogprobWish | None = None
    output_logprobs: LogprobWish | None = None
    guide: Guide | None = None
    media: tuple[MediaItem, ...] = ()
    lora_name: str = ""
    cache_salt: str | None = None
    bypass_prefix_cache: bool = False
    kv_session: bytes | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    hints: RoutingHints = RoutingHints()
    caller: str = ""
    message: Any = field(default=None, repr=False, compare=False)
    come_through: str = ""
    known_as: str = ""


# ---------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Another token that was possible at a position."""

    token_id: int
    logprob: float
    token: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """One token; `logprob` and `rank` only where asked for."""

    token_id: int
    token: str = ""
    logprob: float | None = None
    rank: int | None = None
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Scores of the prompt, once, before any output."""

    tokens: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTokens:
    """New tokens and final text of one output."""

    output_index: int
    tokens: tuple[ScoredToken, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """What stopped an output: at most one of the three is set."""

    stop_token_id: int | None = None
    stop_text: str | None = None
    eos_token_id: int | None = None


class OutputFinish(enum.IntEnum):
    """Why an output ended; numbers of the schema."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFinished:
    """One output is complete; nothing of it follows."""

    output_index: int
    reason: OutputFinish
    message: str = ""
    stop_match: StopMatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The request ended with an error after it was accepted; terminal. `code` is the schema's, without prefix."""

    code: str
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens counted over all outputs."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int | None = None
    reasoning_tokens: int | None = None


GenerationEvent: TypeAlias = PromptScored | OutputTokens | OutputFinished | RequestFailed


class GenerationStream(Protocol):
    """Events of an accepted request, each with the usage if it is the last. Closing it ends the request at once."""

    @property
    def weight_version(self) -> str:
        """Version of the weights that produce the answer, as far as known now (AD-33); empty: unknown."""
        ...

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What else the caller is told with the acceptance: how long it waited, its request id."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> tuple[GenerationEvent, Usage | None]: ...

    async def aclose(self) -> None:
        """End what has not finished. Idempotent."""
        ...


class InferencePort(Protocol):
    """Who generates."""

    @property
    def is_serving(self) -> bool:
        """Whether some model can admit now (AD-06)."""
        ...

    def model_info(self, model: str) -> ModelInfo:
        """What a model can do; an empty name means the only one.

        Raises:
            NotFound: MODEL_NOT_FOUND.
            InvalidRequest: no name, and several models.
        """
        ...

    async def generate(self, call: GenerateCall) -> GenerationStream:
        """Accept a request. Returning is the acceptance boundary (SF-20).

        Raises:
            IopError: the request was not accepted.
        """
        ...


# ---------------------------------------------------------------------------------------------------- discovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How a deployment is spread."""

    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    data_parallel_rank: int | None = None
    data_parallel_start_rank: int | None = None
    decode_context_parallel_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Sizes fixed at start."""

    kv_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_running_requests: int | None = None
    max_batched_tokens: int | None = None
    max_loras: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server is."""

    engine_name: str
    engine_version: str
    instance_id: str
    supported_models: tuple[str, ...]
    engine_role: EngineRole = EngineRole.AGGREGATED
    parallelism: Parallelism = Parallelism()
    capacity: Deployment = Deployment()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """How busy one data-parallel rank is."""

    data_parallel_rank: int
    running_requests: int | None = None
    queued_requests: int | None = None
    used_kv_blocks: int | None = None
    total_kv_blocks: int | None = None
    prefill_batch_size: int | None = None
    decode_batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadInfo:
    """How busy a server is."""

    instance_id: str
    timestamp_unix_nanos: int | None = None
    running_requests: int | None = None
    queued_requests: int | None = None
    active_kv_sessions: int | None = None
    used_kv_blocks: int | None = None
    total_kv_blocks: int | None = None
    running_tokens: int | None = None
    waiting_tokens: int | None = None
    prefill_batch_size: int | None = None
    decode_batch_size: int | None = None
    ranks: tuple[RankLoad, ...] = ()


class CandidateMode(enum.IntEnum):
    """Ways to select candidates; numbers of the schema."""

    TOP_N = 1
    TOKEN_IDS = 2
    ALL = 3


class GuidedMode(enum.IntEnum):
    """Kinds of guides; numbers of the schema."""

    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3
    STRUCTURAL_TAG = 4
    CHOICE = 5
    JSON_OBJECT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobCapabilities:
    """What log probabilities can be asked for."""

    supported: bool | None = None
    candidate_selection_modes: tuple[CandidateMode, ...] = ()
    max_top_n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedCapabilities:
    """What guides can be asked for."""

    supported: bool | None = None
    modes: tuple[GuidedMode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCapabilities:
    """What a generation may ask for."""

    prompt_logprobs: LogprobCapabilities = LogprobCapabilities()
    output_logprobs: LogprobCapabilities = LogprobCapabilities()
    guided_decoding: GuidedCapabilities = GuidedCapabilities()
    max_num_sequences: int | None = None
    supports_priority: bool | None = None
    supports_stop_in_output: bool | None = None
    supports_cache_salt: bool | None = None
    supports_prefix_cache_bypass: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a model can do here.

    Attributes:
        data_parallel_ranks: those that a call can ask for; ``None``: those of the server, as its parallelism has them.
            The schema has no field for it; it travels in ``extra``.
    """

    model_id: str
    served_model_name: str
    served_model_aliases: tuple[str, ...] = ()
    max_context_length: int | None = None
    max_output_tokens: int | None = None
    tokenizer_modes: tuple[str, ...] = ()
    supports_text_input: bool | None = None
    supports_token_ids_input: bool | None = None
    generation: GenerationCapabilities = GenerationCapabilities()
    supports_lora: bool | None = None
    supports_multimodal: bool | None = None
    reasoning_parser: str = ""
    tool_call_parser: str = ""
    data_parallel_ranks: frozenset[int] | None = None


class HealthState(enum.IntEnum):
    """How a server or a part of it is; numbers of the schema."""

    STARTING = 1
    READY = 2
    DEGRADED = 3
    DRAINING = 4
    NOT_READY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPart:
    """One thing that health rests on."""

    name: str
    state: HealthState
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The sum, and what it rests on."""

    state: HealthState
    checks: tuple[HealthPart, ...] = ()


class AbortOutcome(enum.IntEnum):
    """What became of an abort; numbers of the schema."""

    ABORTED = 1
    ALREADY_FINISHED = 2


class MayUse(Protocol):
    """Whether the caller may use the model with these names."""

    def __call__(self, *names: str) -> bool:
        """One name is enough."""
        ...


def any_model(*_names: str) -> bool:
    """Everybody may use everything."""
    return True


class ControlPort(Protocol):
    """Who tells about the server, and ends requests."""

    def server_info(self) -> ServerInfo:
        """What the server is."""
        ...

    def model_info(self, model: str) -> ModelInfo:
        """As in :class:`InferencePort`."""
        ...

    async def load(self, *, include_per_rank: bool) -> LoadInfo:
        """How busy it is."""
        ...

    async def health(
        self, *, model: str, role: EngineRole | None, include_probe: bool, may_use: MayUse = any_model
    ) -> HealthReport:
        """How it is; a probe runs a tiny generation. Models that `may_use` denies by all their names are left out.

        Raises:
            NotFound: no such model here.
        """
        ...

    async def abort(self, request_id: str, *, caller: str | None) -> AbortOutcome:
        """End one request of this caller; None: of anybody, for an operator.

        Raises:
            NotFound: unknown, or somebody else's.
        """
        ...

    async def abort_all(self) -> int:
        """End everything; returns how many requests that was. Only reached where the config allows it (AD-103)."""
        ...
