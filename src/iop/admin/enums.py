"""Closed sets of the administration contract.

Names and numbers are those of `openengine.v1.OpenEngineAdmin`, without the wire's prefix. The wire's `*_UNSPECIFIED`
(zero) has no member here: the codec refuses it before a request becomes ours (AD-10), so the middle never sees it.
"""

from __future__ import annotations

import enum

__all__ = [
    "AdminErrorCode",
    "AdminOperationKind",
    "AdminOperationState",
    "AdmissionPolicy",
    "BusyPolicy",
    "CacheKind",
    "CacheOutcome",
    "CachePolicy",
    "CancelDisposition",
    "ChangeDisposition",
    "DistributedBackend",
    "DrainTimeoutAction",
    "EngineRole",
    "ParticipantPhase",
    "ParticipantState",
    "PauseMode",
    "ProfilerKind",
    "ReconfigurableField",
    "ResourceKind",
    "TensorDtype",
    "VerificationMethod",
    "WeightFormat",
    "WeightRetention",
    "WeightSourceKind",
]


class AdminOperationKind(enum.IntEnum):
    """What an operation does; one per mutating RPC (AD-01)."""

    FLUSH_CACHES = 1
    PAUSE = 2
    RESUME = 3
    RELEASE_RESOURCES = 4
    RESTORE_RESOURCES = 5
    UPDATE_WEIGHTS = 6
    START_PROFILE = 7
    STOP_PROFILE = 8
    RECONFIGURE_SERVING = 9


class CacheKind(enum.IntEnum):
    """A cache that can be emptied (AD-40)."""

    PREFIX = 1
    MULTIMODAL = 2
    ENCODER = 3


class BusyPolicy(enum.IntEnum):
    """What a flush does when the engine is busy (AD-40)."""

    FAIL = 1
    WAIT = 2
    PREEMPT = 3


class PauseMode(enum.IntEnum):
    """What happens to work in flight at a pause (AD-41)."""

    DRAIN = 1
    ABORT = 2
    KEEP = 3


class AdmissionPolicy(enum.IntEnum):
    """What happens to new requests while paused (AD-41)."""

    QUEUE = 1
    REJECT = 2


class DrainTimeoutAction(enum.IntEnum):
    """What a drain that ran out of time does (AD-41)."""

    FAIL = 1
    ABORT = 2


class ResourceKind(enum.IntEnum):
    """Memory that can be given back (AD-43)."""

    WEIGHTS = 1
    KV_CACHE = 2
    GRAPHS = 3


class WeightRetention(enum.IntEnum):
    """Where released weights go (AD-43)."""

    OFFLOAD_TO_HOST = 1
    DISCARD = 2


class WeightSourceKind(enum.IntEnum):
    """Where new weights come from (AD-45)."""

    DISK = 1
    INLINE_TENSORS = 2
    DISTRIBUTED = 3
    IPC = 4


class WeightFormat(enum.IntEnum):
    """File format of weights on disk."""

    SAFETENSORS = 1
    PYTORCH = 2
    GGUF = 3
    ENGINE_NATIVE = 4


class TensorDtype(enum.IntEnum):
    """Element type of a tensor."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT8_E4M3 = 4
    FLOAT8_E5M2 = 5
    INT8 = 6
    UINT8 = 7
    INT32 = 8
    INT64 = 9


class DistributedBackend(enum.IntEnum):
    """Transport of a distributed weight group."""

    NCCL = 1
    GLOO = 2
    NIXL = 3
    RAY = 4


class VerificationMethod(enum.IntEnum):
    """What a weight read-back rested on (AD-37)."""

    LABEL = 1
    CHECKSUM = 2
    DIGEST = 3
    PROBE = 4


class CachePolicy(enum.IntEnum):
    """What a weight update does to caches (AD-34, AD-45)."""

    FLUSH = 1
    KEEP = 2


class ProfilerKind(enum.IntEnum):
    """What a profile records (AD-46)."""

    CPU = 1
    GPU = 2
    MEMORY = 3
    SCHEDULER = 4


class ReconfigurableField(enum.IntEnum):
    """A serving value that can change at run time (AD-47)."""

    CAPACITY = 1
    LONG_CONTEXT_CAPACITY = 2
    ROLE = 3
    DATA_PARALLEL_SIZE = 4
    ENABLED = 5
    SERVED_ALIASES = 6


class EngineRole(enum.IntEnum):
    """Serving role of an engine; numbers of the core schema."""

    AGGREGATED = 1
    PREFILL = 2
    DECODE = 3


class ChangeDisposition(enum.IntEnum):
    """Judgement on one reconfigured field (AD-47)."""

    APPLIED = 1
    UNCHANGED = 2
    NEEDS_RESTART = 3
    REJECTED = 4


class CacheOutcome(enum.IntEnum):
    """What became of one cache; anything but CLEARED is not success (AD-40)."""

    CLEARED = 1
    REFUSED = 2
    UNKNOWN = 3


class AdminOperationState(enum.IntEnum):
    """Lifecycle of an operation; the last three are terminal (AD-21)."""

    PENDING = 1
    RUNNING = 2
    CANCELLING = 3
    ROLLING_BACK = 4
    SUCCEEDED = 5
    FAILED = 6
    CANCELLED = 7

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more will happen to the operation."""
        return self >= AdminOperationState.SUCCEEDED


class ParticipantPhase(enum.IntEnum):
    """How far one participant has come in one operation (AD-23)."""

    PENDING = 1
    PREPARING = 2
    PREPARED = 3
    QUIESCING = 4
    QUIESCED = 5
    APPLYING = 6
    APPLIED = 7
    VERIFYING = 8
    VERIFIED = 9
    COMMITTED = 10
    ROLLING_BACK = 11
    ROLLED_BACK = 12
    FAILED = 13
    QUARANTINED = 14


class ParticipantState(enum.IntEnum):
    """The most restrictive thing that holds of a participant: OFFLINE, QUARANTINED, RELEASED, PAUSED, ACTIVE."""

    ACTIVE = 1
    PAUSED = 2
    RELEASED = 3
    QUARANTINED = 4
    OFFLINE = 5


class AdminErrorCode(enum.IntEnum):
    """Why an accepted operation, or one participant in it, failed."""

    PARTICIPANT_FAILED = 1
    PARTICIPANT_LOST = 2
    VERIFICATION_FAILED = 3
    DRAIN_TIMEOUT = 4
    REFUSED_BUSY = 5
    DEADLINE_EXCEEDED = 6
    ROLLBACK_FAILED = 7
    INTERRUPTED = 8
    SOURCE_UNAVAILABLE = 9
    SOURCE_MISMATCH = 10
    INTERNAL = 11


class CancelDisposition(enum.IntEnum):
    """Answer to CancelOperation (AD-24)."""

    CANCELLING = 1
    TOO_LATE = 2
    ALREADY_TERMINAL = 3
