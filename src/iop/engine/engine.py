"""The engine as its surfaces see it: generate, administer, read back."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import tempfile
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from iop import __version__
from iop.admin.enums import (
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CachePolicy,
    DrainTimeoutAction,
    PauseMode,
    ProfilerKind,
    ResourceKind,
    WeightRetention,
)
from iop.core.errors import InvalidRequest, IopError, Unavailable
from iop.engine import chat
from iop.engine.blocks import BlockPool
from iop.engine.checkpoint import ModelConfig, TensorFile, load_config, tensor_shapes, weights_file
from iop.engine.exact import LANES
from iop.engine.generation import ChatMessage, ChatPrompt, FinishReason, GenerationRequest
from iop.engine.operations import SLOTS_MAX, Operations
from iop.engine.profiler import Profiler
from iop.engine.ranks import RankGroup
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
from iop.engine.runner import GenerationStream, Runner
from iop.engine.scheduler import Hold, Scheduler
from iop.engine.settings import EngineSettings, builtin_checkpoint
from iop.engine.tokenizer import Tokenizer
from iop.engine.updates import Updates, identity_root
from iop.engine.weights import WeightSource

__all__ = ["Engine", "GenerationStream"]

_log = logging.getLogger(__name__)

NAME: Final = "iop-reference"


@dataclass(slots=True, kw_only=True)
class _Parts:
    """What exists between ``start`` and ``aclose``."""

    config: ModelConfig
    tokenizer: Tokenizer
    ranks: RankGroup
    runner: Runner
    operations: Operations
    updates: Updates
    profiler: Profiler


class Engine:
    """A small transformer in rank processes, with its scheduler in this one."""

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self._settings = settings or EngineSettings()
        self._state = EngineState.CLOSED
        self._stack = AsyncExitStack()
        self._parts: _Parts | None = None
        self._instance_id = secrets.token_hex(8)
        self._failed = asyncio.Event()
        self._why_failed = ""

    async def start(self) -> None:
        """Load the checkpoint into the ranks and begin to serve.

        Raises:
            NotFound: the checkpoint or one of its files is absent.
            InvalidRequest: the checkpoint is damaged or does not fit the settings.
            Unavailable: a rank did not come up.
        """
        if self._state is not EngineState.CLOSED or self._parts is not None:
            raise Unavailable("The engine was started before.", reason="ENGINE_STARTED")
        self._state = EngineState.STARTING
        self._check_settings()
        try:
            await self._start()
        except BaseException:
            self._state = EngineState.CLOSED
            await self._stack.aclose()
            raise
        self._state = EngineState.SERVING
        _log.info("engine.started instance=%s ranks=%d", self._instance_id, self._settings.ranks)

    def _check_settings(self) -> None:
        settings = self._settings
        if settings.ranks < 1 or LANES % settings.ranks:
            raise InvalidRequest("`ranks` must be 1, 2 or 4.", details={"field": "ranks"})
        if not 1 <= settings.slots <= SLOTS_MAX:
            raise InvalidRequest(f"`slots` must be from 1 to {SLOTS_MAX}.", details={"field": "slots"})
        for name in ("kv_blocks", "kv_block_tokens", "prefill_chunk_tokens"):
            if not 1 <= getattr(settings, name) <= 2**17:
                raise InvalidRequest(f"`{name}` must be from 1 to 131072.", details={"field": name})
        if settings.waiting_max < 0 or settings.pad_weights_to_bytes < 0:
            raise InvalidRequest("`waiting_max` and `pad_weights_to_bytes` must not be negative.")

    async def _start(self) -> None:
        settings = self._settings
        folder = settings.checkpoint or builtin_checkpoint("first")
        config = load_config(folder)
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
        if tokenizer.size != config.vocabulary or not {chat.BOS, chat.END} <= tokenizer.specials.keys():
            raise InvalidRequest(
                "The checkpoint's tokenizer does not belong to its model; copy the checkpoint again."
            )
        if settings.kv_blocks * settings.kv_block_tokens < config.context_tokens + settings.kv_block_tokens:
            raise InvalidRequest(
                f"`kv_blocks` times `kv_block_tokens` must exceed the context of {config.context_tokens} tokens.",
                details={"field": "kv_blocks"},
            )
        weights = weights_file(folder).absolute()
        with TensorFile(weights) as file:
            file.check(tensor_shapes(config))
        ranks = RankGroup(ranks=settings.ranks, on_lost=self._fail)
        self._stack.callback(ranks.close)
        setup = {
            "checkpoint": str(folder.absolute()),
            "weights": str(weights),
            "version": config.weight_version,
            "blocks": settings.kv_blocks,
            "block_tokens": settings.kv_block_tokens,
            "pad_to_bytes": settings.pad_weights_to_bytes,
        }
        rows = SLOTS_MAX + settings.prefill_chunk_tokens
        await ranks.start(setup, config=config, rows=rows, timeout_s=settings.start_timeout_s)
        pool = BlockPool(blocks=settings.kv_blocks, block_tokens=settings.kv_block_tokens)
        scheduler = Scheduler(
            pool=pool, slots=settings.slots, prefill_chunk_tokens=settings.prefill_chunk_tokens
        )
        runner = Runner(
            settings=settings,
            config=config,
            tokenizer=tokenizer,
            scheduler=scheduler,
            ranks=ranks,
            weight_version=config.weight_version,
        )
        operations = Operations(runner=runner, ranks=ranks)
        scheduler.root = identity_root([state.weight_digest for state in await operations.read_back()])
        artifacts = settings.artifacts
        if artifacts is None:
            artifacts = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="iop-engine-")))
        self._parts = _Parts(
            config=config,
            tokenizer=tokenizer,
            ranks=ranks,
            runner=runner,
            operations=operations,
            updates=Updates(
                runner=runner,
                ranks=ranks,
                operations=operations,
                config=config,
                source=weights,
                spool=artifacts,
                inline_bytes_max=settings.inline_bytes_max,
            ),
            profiler=Profiler(runner=runner, ranks=ranks, artifacts=artifacts),
        )
        group = await self._stack.enter_async_context(asyncio.TaskGroup())
        task = group.create_task(self._run(runner), name="engine-steps")
        self._stack.callback(task.cancel)

    async def _run(self, runner: Runner) -> None:
        """Supervise the step loop: whatever goes wrong in it ends the engine's service, not the process."""
        try:
            await runner.run()
        except IopError as exc:
            self._fail(exc.message)
        except Exception:  # noqa: BLE001  # the supervisor: a failed step ends the service, its cause is logged
            _log.exception("engine.step_failed")
            self._fail("The step loop failed.")

    def _fail(self, why: str) -> None:
        if self._state in (EngineState.FAILED, EngineState.CLOSED):
            return
        self._state = EngineState.FAILED
        self._why_failed = why
        _log.error("engine.failed instance=%s why=%s", self._instance_id, why)
        if self._parts is not None:
            self._parts.runner.fail(
                Unavailable("The engine has failed and must be restarted.", reason="ENGINE_FAILED")
            )
            self._parts.ranks.close()
        self._failed.set()

    async def aclose(self) -> None:
        """End all requests and all ranks; idempotent. No process is left when it returns."""
        self._state = EngineState.CLOSED
        if self._parts is not None:
            self._parts.runner.fail(Unavailable("The engine is shutting down.", reason="ENGINE_CLOSED"))
        await self._stack.aclose()

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
        settings, parts = self._settings, self._running()
        return EngineInfo(
            name=NAME,
            version=__version__,
            instance_id=self._instance_id,
            model_id=settings.model_id,
            context_tokens=parts.config.context_tokens,
            vocabulary_size=parts.config.vocabulary,
            ranks=settings.ranks,
            slots=parts.runner.scheduler.slots,
            waiting_max=settings.waiting_max,
            kv_block_tokens=settings.kv_block_tokens,
            kv_blocks_total=settings.kv_blocks,
            eos_token_id=parts.tokenizer.specials[chat.END],
            bos_token_id=parts.tokenizer.specials[chat.BOS],
            parameters=sum(math.prod(shape) for shape in tensor_shapes(parts.config).values()),
        )

    @property
    def state(self) -> EngineState:
        """Where the engine is in its life."""
        if self._state is EngineState.SERVING and self._running().operations.pause_in_force is not None:
            return EngineState.PAUSED
        return self._state

    @property
    def weight_version(self) -> str:
        """Label of the committed weights."""
        return self._running().runner.weight_version

    async def wait_failed(self) -> str:
        """Wait until the engine has failed and return why (for people)."""
        await self._failed.wait()
        return self._why_failed

    def silent_ranks(self, seconds: float) -> frozenset[int]:
        """Ranks that have owed an answer for so long and said nothing meanwhile; never waits."""
        return self._running().ranks.silent_for(seconds)

    def counters(self) -> Counters:
        """Gauges and totals for metrics; never waits."""
        runner = self._running().runner
        scheduler, totals = runner.scheduler, runner.totals
        return Counters(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kept=self._running().operations.kept(),
            kv_blocks_used=scheduler.pool.used,
            kv_blocks_total=scheduler.pool.total,
            prefix_entries=scheduler.pool.entries,
            prefix_tokens_queried=scheduler.tokens_queried,
            prefix_tokens_hit=scheduler.tokens_hit,
            prefill_positions_computed=scheduler.prefill_positions,
            tokens_generated=totals.tokens,
            requests_accepted=totals.accepted,
            requests_finished=totals.finished,
            requests_cancelled=totals.cancelled,
            requests_aborted=totals.aborted,
            requests_overloaded=totals.overloaded,
            preemptions=scheduler.preemptions,
            steps=totals.steps,
        )

    def render_chat(self, messages: Sequence[ChatMessage]) -> ChatPrompt:
        """Render a conversation, ready for the assistant's next turn.

        Raises:
            InvalidRequest: no message, or an unknown role.
        """
        return chat.render_chat(messages, self._running().tokenizer)

    def tokenize(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of ``text``; ``special`` also reads marks such as ``<|end|>`` as the tokens they name."""
        return tuple(self._running().tokenizer.encode(text, special=special))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``; bytes that are not UTF-8 become U+FFFD, marks become their names."""
        tokenizer = self._running().tokenizer
        if any(not 0 <= token < tokenizer.size for token in token_ids):
            raise InvalidRequest(
                f"`token_ids` must be from 0 to {tokenizer.size - 1}.", details={"field": "token_ids"}
            )
        return tokenizer.decode(token_ids, special=True)

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
        return self._running().runner.submit(request)

    def abort(
        self, request_id: str, *, reason: FinishReason = FinishReason.ABORTED, message: str = ""
    ) -> bool:
        """End a live request from outside, with ``reason`` in its terminal events. Returns whether it was there."""
        runner = self._running().runner
        live = runner.live.get(request_id)
        if live is None:
            return False
        runner.end(live, reason=reason, message=message)
        return True

    def set_gate(self, *, is_open: bool, admission: AdmissionPolicy = AdmissionPolicy.QUEUE) -> None:
        """Open or close admission from outside, beside any pause; never waits. What runs goes on.

        While closed, new requests wait (QUEUE) or get ``Draining`` (REJECT). A new engine's gate is open.
        """
        self._running().runner.hold(Hold.GATE, admission=None if is_open else admission)

    async def pause(
        self,
        *,
        mode: PauseMode,
        admission: AdmissionPolicy,
        drain_timeout_s: float | None = None,
        on_drain_timeout: DrainTimeoutAction | None = None,
    ) -> PauseReport:
        """Stop the scheduler and close every rank's gate (AD-41). Idempotent for the same mode and admission.

        DRAIN lets work in flight finish; ABORT ends it with reason ABORTED; KEEP freezes it, to go on at ``resume``
        with no token lost. In flight is what has started; with admission REJECT also what waits for a slot (with
        QUEUE that waits on). A new request meanwhile waits (QUEUE) or gets ``Draining`` (REJECT). A caller who leaves
        a frozen request has it taken out at once.

        Raises:
            DeadlineExceeded: the drain ran out of time and ``on_drain_timeout`` is FAIL; the gate is open again.
            PreconditionFailed: DRAIN over frozen work (reason PAUSE_MODE).
            Unavailable: the engine failed, or a rank does not read back as paused.
        Cancellation: safe; a pause that was not complete is taken back.
        """
        return await self._running().operations.pause(
            mode=mode, admission=admission, drain_timeout_s=drain_timeout_s, on_drain_timeout=on_drain_timeout
        )

    async def resume(self) -> tuple[RankState, ...]:
        """Open the ranks' gates, then the scheduler. A no-op when not paused.

        Raises:
            PreconditionFailed: weights or KV are released (reason RESOURCES_RELEASED).
        """
        return await self._running().operations.resume()

    async def flush(
        self, *, kinds: Collection[CacheKind], busy: BusyPolicy, wait_timeout_s: float = 30.0
    ) -> FlushReport:
        """Empty caches (AD-40) in the scheduler and in every rank's arena.

        FAIL refuses while any sequence runs; WAIT waits for it, up to ``wait_timeout_s``; PREEMPT takes their blocks
        away, they are computed again when next scheduled. Kinds other than PREFIX do not exist here: their outcome is
        UNKNOWN.
        """
        return await self._running().operations.flush(kinds=kinds, busy=busy, wait_timeout_s=wait_timeout_s)

    async def release(
        self, *, kinds: Collection[ResourceKind], retention: WeightRetention | None = None
    ) -> ReleaseReport:
        """Unmap weights and/or KV in every rank (AD-43). Idempotent.

        Raises:
            PreconditionFailed: not paused (NOT_PAUSED), or DISCARD of weights with no source left (IRREVERSIBLE).
            Unsupported: captured graphs; there are none here.
        """
        return await self._running().operations.release(kinds=kinds, retention=retention)

    async def restore(self, *, kinds: Collection[ResourceKind]) -> ReleaseReport:
        """Map again what was released; discarded weights are reloaded and verified by digest (AD-44). Idempotent."""
        return await self._running().operations.restore(kinds=kinds)

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
        return await self._running().updates.prepare(update_id, source=source, version=version, ranks=ranks)

    async def apply_weights(
        self, update_id: str, *, ranks: Collection[int] | None = None
    ) -> tuple[RankWeights, ...]:
        """Swap the prepared shard in, keeping the old one for ``undo_weights``. Needs a pause (NOT_PAUSED)."""
        return await self._running().updates.apply(update_id, ranks=ranks)

    async def verify_weights(
        self, update_id: str, *, ranks: Collection[int] | None = None
    ) -> tuple[RankWeights, ...]:
        """Recompute the digest of the shard in use and compare it with the prepared one.

        Raises:
            PreconditionFailed: they differ (reason VERIFICATION_FAILED).
        """
        return await self._running().updates.verify(update_id, ranks=ranks)

    async def undo_weights(
        self, update_id: str, *, ranks: Collection[int] | None = None
    ) -> tuple[RankWeights, ...]:
        """Put the old shard back (or drop the prepared one) and verify it. Idempotent; unknown ids are a no-op."""
        return await self._running().updates.undo(update_id, ranks=ranks)

    async def commit_weights(
        self,
        update_id: str,
        *,
        cache_policy: CachePolicy = CachePolicy.FLUSH,
        ranks: Collection[int] | None = None,
    ) -> tuple[RankWeights, ...]:
        """Drop the old shard, after which ``undo_weights`` is a no-op.

        When the last rank commits, the version label is published (AD-38) and, unless ``cache_policy`` is KEEP, every
        cached prefix of the old weights is dropped (AD-34); frozen sequences keep their own keys and values.

        Raises:
            PreconditionFailed: not applied on a chosen rank (NOT_APPLIED), or undone on some (UPDATE_UNDONE).
        """
        return await self._running().updates.commit(update_id, cache_policy=cache_policy, ranks=ranks)

    async def start_profile(
        self,
        profile_id: str,
        *,
        kinds: Collection[ProfilerKind],
        max_steps: int | None = None,
        max_duration_s: float | None = None,
    ) -> None:
        """Begin to record (AD-46). Idempotent by id. GPU is Unsupported; another id while one runs is a Conflict."""
        await self._running().profiler.start(
            profile_id, kinds=kinds, max_steps=max_steps, max_duration_s=max_duration_s
        )

    async def stop_profile(self, profile_id: str) -> tuple[ArtifactFile, ...]:
        """Stop recording and name the files. Stopping a stopped one names them again; unknown ids are NotFound."""
        return await self._running().profiler.stop(profile_id)

    @property
    def running_profile(self) -> str:
        """Id of the profile that is recording now; "" when none is."""
        return self._running().profiler.running

    async def set_slots(self, slots: int) -> SlotsReport:
        """Change how many sequences run side by side (AD-47); those beyond it finish first."""
        return await self._running().operations.set_slots(slots)

    async def read_back(self) -> tuple[RankState, ...]:
        """Ask every rank for its own state, in order of rank (AD-37). Raises Unavailable when one does not answer."""
        return await self._running().operations.read_back()

    def _running(self) -> _Parts:
        if self._parts is None or self._state is EngineState.CLOSED:
            raise Unavailable("The engine is not running.", reason="ENGINE_CLOSED")
        return self._parts
