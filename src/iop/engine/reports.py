"""What the engine tells about itself: facts, counters, and what each rank read back after an administrative step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique

from iop.admin.enums import AdmissionPolicy, CacheKind, CacheOutcome, PauseMode, ProfilerKind, WeightRetention

__all__ = [
    "ArtifactFile",
    "Counters",
    "EngineInfo",
    "EngineState",
    "FlushReport",
    "PauseReport",
    "RankFlush",
    "RankRelease",
    "RankState",
    "RankWeights",
    "ReleaseReport",
    "SlotsReport",
]


@unique
class EngineState(Enum):
    """The engine's lifecycle. FAILED: a rank died or stopped answering; nothing is served until a new engine starts."""

    STARTING = "STARTING"
    SERVING = "SERVING"
    PAUSED = "PAUSED"
    FAILED = "FAILED"
    CLOSED = "CLOSED"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts that do not change while the engine lives (but ``slots``, which ``set_slots`` moves)."""

    name: str
    version: str
    instance_id: str
    model_id: str
    context_tokens: int
    vocabulary_size: int
    ranks: int
    slots: int
    waiting_max: int
    kv_block_tokens: int
    kv_blocks_total: int
    eos_token_id: int
    bos_token_id: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Gauges (running, waiting, kept, blocks) and totals since the start.

    ``prefill_positions_computed`` counts prompt positions that really went through the model; with
    ``prefix_tokens_hit`` it proves what the cache saved. Query and hit are counted in tokens.
    """

    running: int
    waiting: int
    kept: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefix_entries: int
    prefix_tokens_queried: int
    prefix_tokens_hit: int
    prefill_positions_computed: int
    tokens_generated: int
    requests_accepted: int
    requests_finished: int
    requests_cancelled: int
    requests_aborted: int
    requests_overloaded: int
    preemptions: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank's own answer to "what are you?" (AD-37).

    ``paused`` is the rank's gate: a paused rank refuses to compute. ``in_flight`` counts running sequences, ``kept``
    frozen requests, ``waiting`` sequences without a slot, all of the one scheduler; ``kv_blocks_filled`` counts
    blocks with content in this rank's own arena. Bytes are resident memory of the rank's arenas as the kernel tells.
    ``weight_digest`` is the SHA-256 of this rank's shard, "" when not resident.
    """

    rank: int
    pid: int
    paused: bool
    mode: PauseMode | None
    admission: AdmissionPolicy | None
    in_flight: int
    kept: int
    waiting: int
    kv_resident: bool
    kv_blocks_used: int
    kv_blocks_filled: int
    prefix_entries: int
    weights_resident: bool
    weight_retention: WeightRetention | None
    weight_bytes_resident: int
    kv_bytes_resident: int
    weight_digest: str
    weight_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseReport:
    """How a pause went, engine-wide, and what each rank reads back afterwards (AD-41)."""

    mode: PauseMode
    admission: AdmissionPolicy
    drained: int
    aborted: int
    kept: int
    ranks: tuple[RankState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFlush:
    """One rank's outcome for one cache kind (AD-40)."""

    rank: int
    kind: CacheKind
    outcome: CacheOutcome
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReport:
    """Outcome per rank and kind, how many prefix entries went, and how many sequences were preempted for it."""

    outcomes: tuple[RankFlush, ...]
    entries_dropped: int
    preempted: int
    ranks: tuple[RankState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRelease:
    """Bytes that this rank's release gave back (or its restore took), measured from the kernel's map (AD-43)."""

    rank: int
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport:
    """What a release or restore moved per rank, and what each rank reads back afterwards."""

    moved: tuple[RankRelease, ...]
    ranks: tuple[RankState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """One rank's answer to a weight step: the shard's SHA-256 and the version label it has now.

    Attributes:
        loaded_bytes: of the shard that a preparation loaded; 0 for other steps.
    """

    rank: int
    digest: str
    version: str
    loaded_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactFile:
    """One file that a profile left behind. ``rank`` -1 is the engine's own process."""

    rank: int
    kind: ProfilerKind
    path: str
    media_type: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsReport:
    """Effective running slots after a change, and the value before it (to put it back)."""

    slots: int
    slots_before: int
    details: Mapping[str, str]
