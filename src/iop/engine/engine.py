"""The engine as its surfaces see it: generate, administer, read back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self

from iop.admin.enums import (
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    DrainTimeoutAction,
    PauseMode,
    ProfilerKind,
    ResourceKind,
    WeightRetention,
)
from iop.core.errors import Unavailable
from iop.engine.generation import ChatMessage, ChatPrompt, GenerationEvent, GenerationRequest
from iop.engine.reports import (
    ArtifactFile,
    Counters,
    EngineInfo,
    EngineState,
    FlushReport,
    PauseReport,
    RankState,
    RankWeights,
    ReleaseReport,
    SlotsReport,
)
from iop.engine.settings import EngineSettings
from iop.engine.weights import WeightSource

__all__ = ["Engine", "GenerationStream"]


class GenerationStream:
    """Events of one accepted request: an async iterator that is also an async context manager.

    Ends after the ``Finished`` that carries ``usage``. Raises ``Unavailable`` when the engine fails under it. Closing
    it, leaving its ``async with`` or cancelling the task that waits in it takes the request out of the scheduler at
    once; that is idempotent and does nothing after the end.
    """

    request_id: str
    prompt_tokens: int
    weight_version: str

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def aclose(self) -> None:
        """Cancel what has not finished. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Engine:
    """A small transformer in rank processes, with its scheduler in this one."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self._settings = settings or EngineSettings()

    async def start(self) -> None:
        """Load the checkpoint into the ranks and begin to serve.

        Raises:
            NotFound: the checkpoint or one of its files is absent.
            InvalidRequest: the checkpoint is damaged or does not fit the settings.
            Unavailable: a rank did not come up.
        """
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def aclose(self) -> None:
        """End all requests and all ranks; idempotent. No process is left when it returns."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def info(self) -> EngineInfo:
        """Facts about this engine; valid after ``start``."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        return EngineState.CLOSED

    @property
    def weight_version(self) -> str:
        """Label of the committed weights."""
        return ""

    async def wait_failed(self) -> str:
        """Wait until the engine has failed and return why (for people)."""
        return ""

    def counters(self) -> Counters:
        """Gauges and totals for metrics; never waits."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    def render_chat(self, messages: Sequence[ChatMessage]) -> ChatPrompt:
        """Render a conversation, ready for the assistant's next turn.

        Raises:
            InvalidRequest: no message, or an unknown role.
        """
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    def tokenize(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of ``text``; ``special`` also reads marks such as ``<|end|>`` as the tokens they name."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``; bytes that are not UTF-8 become U+FFFD, marks become their names."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    def count_tokens(self, text: str) -> int:
        """How many tokens ``text`` has."""
        return len(self.tokenize(text))

    def generate(self, request: GenerationRequest) -> GenerationStream:
        """Accept a request; never waits. This call returning is the acceptance boundary.

        Raises:
            InvalidRequest: a field is out of range, or prompt and answer do not fit the context.
            AlreadyExists: a live request has this id.
            Overloaded: the waiting queue is full.
            Draining: paused with admission REJECT (reason PAUSED).
            Unavailable: not started, closed or failed (reason ENGINE_CLOSED or ENGINE_FAILED).
        """
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    def abort(self, request_id: str, *, message: str = "") -> bool:
        """End a live request with reason ABORTED. Returns whether it was there."""
        return False

    async def pause(
        self,
        *,
        mode: PauseMode,
        admission: AdmissionPolicy,
        drain_timeout_s: float | None = None,
        on_drain_timeout: DrainTimeoutAction | None = None,
    ) -> PauseReport:
        """Stop the scheduler and close every rank's gate (AD-41). Idempotent for the same mode and admission.

        DRAIN lets what was accepted finish (waiting requests stay queued, or are ended with Draining under REJECT);
        ABORT ends it with reason ABORTED; KEEP freezes it, to go on at ``resume`` with no token lost.

        Raises:
            DeadlineExceeded: the drain ran out of time and ``on_drain_timeout`` is FAIL; the gate is open again.
            PreconditionFailed: DRAIN over frozen work (reason PAUSE_MODE).
            Unavailable: the engine failed, or a rank does not read back as paused.
        Cancellation: safe; a pause that was not complete is taken back.
        """
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def resume(self) -> tuple[RankState, ...]:
        """Open the ranks' gates, then the scheduler. A no-op when not paused.

        Raises:
            PreconditionFailed: weights or KV are released (reason RESOURCES_RELEASED).
        """
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def flush(
        self, *, kinds: Collection[CacheKind], busy: BusyPolicy, wait_timeout_s: float = 30.0
    ) -> FlushReport:
        """Empty caches (AD-40). Busy means that live sequences share cached blocks.

        FAIL refuses while any does; WAIT waits for it, up to ``wait_timeout_s``; PREEMPT takes their blocks away, they
        are computed again when next scheduled. Kinds other than PREFIX do not exist here: their outcome is UNKNOWN.
        """
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def release(
        self, *, kinds: Collection[ResourceKind], retention: WeightRetention | None = None
    ) -> ReleaseReport:
        """Unmap weights and/or KV in every rank (AD-43). Idempotent.

        Raises:
            PreconditionFailed: not paused (NOT_PAUSED), or DISCARD of weights with no source left (IRREVERSIBLE).
            Unsupported: captured graphs; there are none here.
        """
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def restore(self, *, kinds: Collection[ResourceKind]) -> ReleaseReport:
        """Map again what was released; discarded weights are reloaded and verified by digest (AD-44). Idempotent."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def prepare_weights(
        self, update_id: str, *, source: WeightSource, version: str, ranks: Collection[int] | None = None
    ) -> tuple[RankWeights, ...]:
        """Load and check new weights beside the old ones; nothing is served from them yet (AD-32).

        ``ranks`` None means all. Idempotent by ``update_id``; another id while one is prepared is a Conflict.
        Returns each rank's digest of the prepared shard.

        Raises:
            NotFound: the source is not there.
            InvalidRequest: names, shapes, dtypes or digests do not match (reason SOURCE_MISMATCH).
        """
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def apply_weights(self, update_id: str, *, ranks: Collection[int] | None = None) -> tuple[RankWeights, ...]:
        """Swap the prepared shard in, keeping the old one for ``undo_weights``. Needs a pause (NOT_PAUSED)."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def verify_weights(self, update_id: str, *, ranks: Collection[int] | None = None) -> tuple[RankWeights, ...]:
        """Recompute the digest of the shard in use and compare it with the prepared one.

        Raises:
            PreconditionFailed: they differ (reason VERIFICATION_FAILED).
        """
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def undo_weights(self, update_id: str, *, ranks: Collection[int] | None = None) -> tuple[RankWeights, ...]:
        """Put the old shard back (or drop the prepared one) and verify it. Idempotent; unknown ids are a no-op."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def commit_weights(self, update_id: str, *, ranks: Collection[int] | None = None) -> tuple[RankWeights, ...]:
        """Drop the old shard and publish the version label, after which ``undo_weights`` is a no-op (AD-38)."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def start_profile(
        self,
        profile_id: str,
        *,
        kinds: Collection[ProfilerKind],
        max_steps: int | None = None,
        max_duration_s: float | None = None,
    ) -> None:
        """Begin to record (AD-46). Idempotent by id. GPU is Unsupported; another id while one runs is a Conflict."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def stop_profile(self, profile_id: str) -> tuple[ArtifactFile, ...]:
        """Stop recording and name the files. Stopping a stopped one names them again; unknown ids are NotFound."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def set_slots(self, slots: int) -> SlotsReport:
        """Change how many sequences run side by side (AD-47); those beyond it finish first."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")

    async def read_back(self) -> tuple[RankState, ...]:
        """Ask every rank for its own state, in order of rank (AD-37). Raises Unavailable when one does not answer."""
        raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")
