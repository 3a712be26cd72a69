"""Control of SGLang over its own routes (AD-40 to AD-45). Written from the server's documentation and code, and
proven against a stand-in of it only: it does not install without GPUs.

Some of its routes end the server when they are called at the wrong time, which decides the shape of this:

* Memory is released only with nothing running or waiting, looked up right before; a tag is restored only if it
  was released here and not restored since. After a restart of the Node under a paused engine nobody knows, and
  it is said so.
* Another mode is never asked for over a pause: aborting frozen requests would wait for ever, with the lock that
  resuming needs. It is resumed first.
* `/health` generates a token, which waits at a pause and then marks the server as ill: it is not used here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from iop.adapters.base import AdapterServices
from iop.adapters.device_memory import DeviceMemory, device_bytes_used, freed_amounts
from iop.adapters.engine_http import Count, EngineAnswer, ShortText
from iop.adapters.engine_profiles import DIRECTORY_VARIABLE, NEEDS_DIRECTORY
from iop.adapters.gate_control import (
    ENGINE,
    GATE_MODES,
    GATE_OPERATIONS,
    Offer,
    StepFailed,
    failed,
    not_verified,
    succeeded,
)
from iop.adapters.native_control import NativeControl, Observed
from iop.adapters.sglang.profiles import Profiles
from iop.adapters.sglang.weights import NEEDS_RANK, WeightSwap
from iop.adapters.staged_weights import NEEDS_WEIGHTS_DIRECTORY, StagedWeights
from iop.adapters.trainer_group import BACKENDS
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    CachePolicy,
    PauseMode,
    ProfilerKind,
    ResourceKind,
    WeightFormat,
    WeightRetention,
    WeightSourceKind,
)
from iop.admin.profile import Capabilities
from iop.admin.requests import DiskSource
from iop.admin.results import CacheResult
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    FlushStep,
    ParticipantReadBack,
    PauseStep,
    PrepareWeightsStep,
    ReleaseStep,
    RestoreStep,
    StepCall,
    StepResult,
    UndoWeightsStep,
    VerifyWeightsStep,
    WorkCounts,
)
from iop.core.errors import PreconditionFailed, Unavailable
from iop.wire.messages import OpenAICompatSettings

Op = AdminOperationKind

PAUSE_TIMEOUT_S: Final = 60.0
EFFECT_TIMEOUT_S: Final = 10.0
"""Freezing answers before it is in force."""

INFO_TIMEOUT_S: Final = 30.0

NEEDS_SAVER: Final = "start SGLang with --enable-memory-saver"
NEEDS_ONE_RANK: Final = "with data parallelism SGLang answers for its first rank only"
GROUP_ROUTES: Final = frozenset({"/init_weights_update_group", "/update_weights_from_distributed"})
TENSOR_ROUTE: Final = "/update_weights_from_tensor"
NEEDS_DOCS: Final = "start SGLang without DISABLE_OPENAPI_DOC, so that its routes can be seen"
NOT_TOLD: Final = "this SGLang does not tell its routes or its settings now, and is asked again"
NO_ROUTE: Final = "this SGLang has no route for it, or none to prove it with; a newer one has"

PAUSE_ROUTES: Final = frozenset({"/pause_generation", "/continue_generation"})
MEMORY_ROUTES: Final = frozenset({"/release_memory_occupation", "/resume_memory_occupation"})
DISK_ROUTES: Final = frozenset({"/update_weights_from_disk", "/update_weight_version", "/weights_checker"})
PROFILE_ROUTES: Final = frozenset({"/start_profile", "/stop_profile"})

_TAGS: Final = {
    ResourceKind.WEIGHTS: "weights",
    ResourceKind.KV_CACHE: "kv_cache",
    ResourceKind.GRAPHS: "cuda_graph",
}
_ORDER: Final = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE, ResourceKind.GRAPHS)


class _ModelInfo(msgspec.Struct):
    model_path: ShortText = ""
    served_model_name: ShortText | None = None
    weight_version: ShortText | None = None


class _ServerInfo(msgspec.Struct):
    version: ShortText = ""
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    dp_size: Count = 1
    tp_size: Count = 1
    pp_size: Count = 1
    device: str | None = None


class _RankLoad(msgspec.Struct):
    num_running_reqs: Count = 0
    num_waiting_reqs: Count = 0


class _Loads(msgspec.Struct):
    loads: list[_RankLoad]


class _OpenApi(msgspec.Struct):
    paths: dict[str, msgspec.Raw] = {}


class SglangControl(NativeControl):
    """See the module.

    Args:
        device_memory: bytes in use on this machine's accelerators, `None` where nobody can tell.
    """

    NAME: ClassVar[str] = "SGLang"
    OFFERS: ClassVar[tuple[Offer, ...]] = (
        Offer(operation=Op.PAUSE, detail="drain, abort, keep"),
        Offer(operation=Op.RESUME, detail="frozen requests go on"),
        Offer(
            operation=Op.FLUSH_CACHES, detail="prefix; busy: fail, wait, preempt", needs="no data parallelism"
        ),
        Offer(
            operation=Op.RELEASE_RESOURCES,
            detail="weights (offloaded with `--enable-weights-cpu-backup`, else discarded), KV cache, graphs",
            needs="`--enable-memory-saver`",
        ),
        Offer(operation=Op.RESTORE_RESOURCES, detail="all or some", needs="`--enable-memory-saver`"),
        Offer(
            operation=Op.UPDATE_WEIGHTS,
            detail="disk (safetensors), tensors sent along, a trainer's broadcast (NCCL), a trainer's device handles; "
            "verified by checksum",
            needs="`/weights_checker`; the same files on Node and engine; for tensors `IOP_WEIGHTS_DIR`; for "
            "broadcasts no data parallelism and one engine a model, for handles a single rank",
        ),
        Offer(operation=Op.START_PROFILE, detail="CPU, GPU, memory", needs=f"`{DIRECTORY_VARIABLE}`"),
        Offer(
            operation=Op.STOP_PROFILE,
            detail="artifacts fetched through the Node",
            needs=f"`{DIRECTORY_VARIABLE}`",
        ),
    )

    def __init__(
        self,
        settings: OpenAICompatSettings,
        services: AdapterServices,
        *,
        targets: tuple[str, ...] = (),
        device_memory: DeviceMemory = device_bytes_used,
    ) -> None:
        super().__init__(settings, services, targets=targets)
        self._device_memory = device_memory
        self._info = _ServerInfo()
        self._model = _ModelInfo()
        self._paths: frozenset[str] | None = None  # None: not told yet, or not since it was away
        self._is_known = False
        self._mode: PauseMode | None = None
        self._frozen = 0
        self._released: frozenset[ResourceKind] | None = None
        self._discarded = ""  # checksum of the weights that were thrown away, as far as it was told
        self._retention: WeightRetention | None = None
        self._staged = StagedWeights(services.environment, settings.endpoint)
        self._swap = WeightSwap(self._http, self._staged)
        self._profiles: Profiles = Profiles(self._http, services.environment)
        self._startup_source: DiskSource | None = None

    # ---- looking ----

    async def _observe(self) -> Observed:
        model = await self._http.get("/model_info")
        if not model.is_ok:
            raise Unavailable(f"the engine does not tell its model: {model.words}", reason="NOT_SGLANG")
        self._model = model.read(_ModelInfo)
        if self._paths is None or self.failure:
            # Its process tells no start: one that was away may be another, started otherwise.
            await self._get_to_know()
        path = self._model.model_path
        if not self._is_known:
            self._is_known = True
            if path.startswith("/") and await asyncio.to_thread(Path(path).is_dir):
                self._startup_source = DiskSource(path=path, format=WeightFormat.SAFETENSORS)
        self._swap.path = self._model.model_path
        self._swap.ranks = self._info.tp_size * self._info.pp_size
        self._swap.sources = self._sources()
        ready = await self._http.get("/ready")
        self._is_paused = ready.status == 503 and (await self._http.get("/ping")).is_ok
        if not self._is_paused:
            # An engine that serves has everything: a restarted one too. Of one found paused nobody knows.
            self._released, self._mode, self._frozen = frozenset(), None, 0
        loads = (await self._http.get("/v1/loads", {"include": "core"})).read(_Loads).loads
        capabilities, missing = self._offered()
        if self._startup_source is not None:
            capabilities = self._staged.offered(capabilities)
        name = self._model.served_model_name or self._model.model_path
        return Observed(
            engine_version=self._info.version,
            capabilities=capabilities,
            models=(name,) if name else (),
            in_flight=sum(each.num_running_reqs for each in loads),
            queued=sum(each.num_waiting_reqs for each in loads),
            missing=missing,
            lacking=self._parts_missing(capabilities),
            startup_source=self._startup_source,
        )

    async def _get_to_know(self) -> None:
        api = await self._http.get("/openapi.json", timeout_s=INFO_TIMEOUT_S)
        info = await self._http.get("/server_info", timeout_s=INFO_TIMEOUT_S)
        if api.status >= 500 or info.status >= 500:
            self._paths = None  # it is asked again, and offers the gate until then
            return
        self._info = info.read(_ServerInfo) if info.is_ok else _ServerInfo()
        self._paths = frozenset(api.read(_OpenApi).paths) if api.is_ok else frozenset()

    def _offered(self) -> tuple[Capabilities, dict[Op, str]]:
        missing: dict[Op, str] = {}
        operations = set(GATE_OPERATIONS)
        paths = self._paths or frozenset()
        can_pause = self._can_pause()
        can_flush = self._info.dp_size <= 1 and "/flush_cache" in paths
        can_release = self._info.enable_memory_saver and can_pause and paths >= MEMORY_ROUTES
        can_swap = paths >= DISK_ROUTES
        sources = self._swap.sources
        recorded = self._profiles.kinds() if paths >= PROFILE_ROUTES else frozenset[ProfilerKind]()
        for op, is_there, routes, why in (
            (Op.FLUSH_CACHES, can_flush, {"/flush_cache"}, NEEDS_ONE_RANK),
            (Op.RELEASE_RESOURCES, can_release, PAUSE_ROUTES | MEMORY_ROUTES, NEEDS_SAVER),
            (Op.RESTORE_RESOURCES, can_release, PAUSE_ROUTES | MEMORY_ROUTES, NEEDS_SAVER),
            (Op.UPDATE_WEIGHTS, can_swap, DISK_ROUTES, NO_ROUTE),
            (Op.START_PROFILE, bool(recorded), PROFILE_ROUTES, NEEDS_DIRECTORY),
            (Op.STOP_PROFILE, bool(recorded), PROFILE_ROUTES, NEEDS_DIRECTORY),
        ):
            if is_there:
                operations.add(op)
            elif not paths:
                missing[op] = self._why_unseen()
            else:
                missing[op] = why if paths >= routes else NO_ROUTE
        keeps = self._info.enable_weights_cpu_backup
        retention = WeightRetention.OFFLOAD_TO_HOST if keeps else WeightRetention.DISCARD
        modes = GATE_MODES | {PauseMode.KEEP} if can_pause else GATE_MODES
        policies = frozenset(BusyPolicy) if can_pause else frozenset({BusyPolicy.FAIL, BusyPolicy.WAIT})
        return Capabilities(
            operations=frozenset(operations),
            pause_modes=modes,
            quiesce_modes=modes if can_swap else frozenset(),
            cache_kinds=frozenset({CacheKind.PREFIX}) if can_flush else frozenset(),
            busy_policies=policies if can_flush else frozenset(),
            resource_kinds=frozenset(_TAGS) if can_release else frozenset(),
            weight_retentions=frozenset({retention}) if can_release else frozenset(),
            weight_sources=sources if can_swap else frozenset(),
            distributed_backends=BACKENDS
            if can_swap and WeightSourceKind.DISTRIBUTED in sources
            else frozenset(),
            profiler_kinds=recorded,
            weight_formats=frozenset({WeightFormat.SAFETENSORS}) if can_swap else frozenset(),
            cache_policies=frozenset(CachePolicy) if can_swap else frozenset(),
        ), missing

    def _can_pause(self) -> bool:
        return (self._paths or frozenset()) >= PAUSE_ROUTES

    def _sources(self) -> frozenset[WeightSourceKind]:
        """From where weights can come. Whose rank is on which device nobody knows, so handles go to one only."""
        paths, sources = self._paths or frozenset(), {WeightSourceKind.DISK}
        if self._info.dp_size <= 1 and paths >= GROUP_ROUTES:
            sources.add(WeightSourceKind.DISTRIBUTED)
        if (
            self._info.dp_size * self._swap.ranks == 1
            and TENSOR_ROUTE in paths
            and self._info.device != "cpu"
        ):
            sources.add(WeightSourceKind.IPC)
        return frozenset(sources)

    def _parts_missing(self, capabilities: Capabilities) -> dict[Op, str]:
        missing: dict[Op, str] = {}
        sources = capabilities.weight_sources
        ways = [] if WeightSourceKind.INLINE_TENSORS in sources else [NEEDS_WEIGHTS_DIRECTORY]
        if not sources >= {WeightSourceKind.DISTRIBUTED, WeightSourceKind.IPC}:
            ways.append(NEEDS_RANK)
        if ways:
            missing[Op.UPDATE_WEIGHTS] = "; ".join(ways)
        if PauseMode.KEEP not in capabilities.pause_modes:
            missing[Op.PAUSE] = NO_ROUTE if self._paths else self._why_unseen()
        return missing

    def _why_unseen(self) -> str:
        return NEEDS_DOCS if self._paths is not None else NOT_TOLD

    def weight_version(self) -> str:
        """As `/model_info` last said."""
        return self._model.weight_version or ""

    async def _read(self) -> ParticipantReadBack:
        return self._told(
            paused=self._is_paused if self._can_pause() else self._is_gated,
            frozen=self._frozen if self._is_paused else 0,
            released=self._released if self._info.enable_memory_saver else frozenset(),
            weight_version=self._model.weight_version,
        )

    async def _is_paused_now(self) -> bool:
        await self._look()
        return self._is_paused

    # ---- pause ----

    async def _pause(self, call: StepCall, step: PauseStep) -> StepResult:
        mode = step.pause.mode
        if not self._can_pause():
            return await self._gate_pause(call, step)
        if self._is_paused and self._mode is mode:
            return succeeded(changed=False, work=WorkCounts(kept=self._frozen))
        if self._is_paused:
            if self._released or self._released is None:
                raise PreconditionFailed("memory is released under the pause", reason="RESOURCES_RELEASED")
            self._is_gated = True
            await self._tell("/continue_generation", {}, timeout_s=PAUSE_TIMEOUT_S)
        work = WorkCounts()
        if mode is PauseMode.DRAIN:
            work = (await self._gate_pause(call, step)).work
        else:
            self._is_gated = True
            load = self._load()
            work = WorkCounts(kept=load) if mode is PauseMode.KEEP else WorkCounts(aborted=load)
        native = "in_place" if mode is PauseMode.KEEP else "abort"
        await self._tell(
            "/pause_generation", {"mode": native}, timeout_s=min(call.timeout_s, PAUSE_TIMEOUT_S)
        )
        await self._until_paused()
        self._mode, self._frozen = mode, work.kept
        return succeeded(work=work)

    async def _until_paused(self) -> None:
        try:
            async with asyncio.timeout(EFFECT_TIMEOUT_S):
                await self._until(self._is_paused_now)
        except TimeoutError:
            raise not_verified("the engine answered and is ready for requests as ever") from None

    async def _resume(self, call: StepCall) -> StepResult:  # noqa: ARG002 - the base's
        if self._is_paused and (self._released or self._released is None):
            raise PreconditionFailed("memory may be released; restore it first", reason="RESOURCES_RELEASED")
        if not self._is_paused:
            changed, self._is_gated = self._is_gated, False
            return succeeded(changed=changed)
        await self._tell("/continue_generation", {}, timeout_s=PAUSE_TIMEOUT_S)
        if await self._is_paused_now():
            raise not_verified("the engine answered and is still paused")
        resumed, self._frozen, self._mode = self._frozen, 0, None
        self._is_gated = False
        return succeeded(work=WorkCounts(resumed=resumed))

    # ---- caches ----

    async def _flush(self, call: StepCall, step: FlushStep) -> StepResult:
        if set(step.kinds) != {CacheKind.PREFIX}:
            raise self._not_offered(Op.FLUSH_CACHES)
        wait_s = max(0, int(call.timeout_s) - 1) if step.busy_policy is BusyPolicy.WAIT else 0
        # A pause that stands is somebody's: what it froze is not taken back for this.
        if step.busy_policy is BusyPolicy.PREEMPT and not self._is_paused:
            async with self._taken_back():
                answer = await self._ask_flush(0)
        else:
            answer = await self._ask_flush(wait_s)
        outcome = CacheOutcome.CLEARED if answer.is_ok else CacheOutcome.REFUSED
        detail = "" if answer.is_ok else answer.words
        caches = (CacheResult(participant_id=ENGINE, kind=CacheKind.PREFIX, outcome=outcome, detail=detail),)
        if detail:
            busy = StepFailed(detail, code=AdminErrorCode.REFUSED_BUSY, changed=False, retryable=True)
            return failed(busy, caches=caches)
        return succeeded(caches=caches)

    async def _ask_flush(self, wait_s: int) -> EngineAnswer:
        return await self._http.post(
            "/flush_cache", query={"timeout": str(wait_s)}, timeout_s=wait_s + PAUSE_TIMEOUT_S
        )

    @contextlib.asynccontextmanager
    async def _taken_back(self) -> AsyncIterator[None]:
        """What runs is back in the queue, without its cache, while the block runs; then it is computed anew."""
        await self._tell("/pause_generation", {"mode": "retract"}, timeout_s=PAUSE_TIMEOUT_S)
        try:
            await self._until_paused()
            yield
        finally:
            await self._tell("/continue_generation", {}, timeout_s=PAUSE_TIMEOUT_S)
            is_paused = await self._is_paused_now()
        if is_paused:
            raise not_verified("the engine answered and is still paused")

    # ---- memory ----

    async def _release(self, call: StepCall, step: ReleaseStep) -> StepResult:
        if self._released is None:
            raise PreconditionFailed(
                "what this engine has released is not known; restart it", reason="UNKNOWN_RESOURCES"
            )
        wanted = frozenset(step.kinds) - self._released
        if not wanted:
            return succeeded(changed=False)
        seen = await self._look()
        if not self._is_paused or seen.in_flight or seen.queued:
            # Asked now, this server would end.
            raise PreconditionFailed(
                "only a paused engine without requests releases memory", reason="NOT_IDLE"
            )
        if ResourceKind.WEIGHTS in wanted and step.weight_retention is WeightRetention.DISCARD:
            self._discarded = await self._swap.checksum()
        before = await self._device_memory()
        await self._tell("/release_memory_occupation", {"tags": _tags(wanted)}, timeout_s=call.timeout_s)
        self._released |= wanted
        self._retention = step.weight_retention or self._retention
        # It tells nothing of what it holds: the device does.
        amounts = await freed_amounts(
            before, self._device_memory, min(wanted), claim="the engine answered that it released"
        )
        return succeeded(amounts=amounts)

    async def _restore(self, call: StepCall, step: RestoreStep) -> StepResult:
        held = self._released
        if held is None:
            raise PreconditionFailed(
                "what this engine has released is not known; restart it", reason="UNKNOWN_RESOURCES"
            )
        wanted = held & frozenset(step.kinds)
        must_load = ResourceKind.WEIGHTS in wanted and self._retention is WeightRetention.DISCARD
        if must_load and not isinstance(step.weight_source, DiskSource):
            raise PreconditionFailed("discarded weights have no source on disk", reason="IRREVERSIBLE")
        for kind in _ORDER:
            if kind not in wanted:
                continue
            # Off the list before it is asked for: asking twice would end the server.
            self._released = (self._released or frozenset()) - {kind}
            await self._tell("/resume_memory_occupation", {"tags": _tags({kind})}, timeout_s=call.timeout_s)
            if kind is ResourceKind.WEIGHTS and must_load and isinstance(step.weight_source, DiskSource):
                await self._swap.load_from(step.weight_source.path, timeout_s=call.timeout_s)
                if self._discarded and await self._swap.checksum() != self._discarded:
                    raise not_verified("the weights were loaded again, but their checksum is another one")
        return succeeded(changed=bool(wanted), weight_version=self.weight_version())

    # ---- weights and profiles ----

    async def _weights(
        self,
        call: StepCall,
        step: PrepareWeightsStep | ApplyWeightsStep | VerifyWeightsStep | CommitWeightsStep | UndoWeightsStep,
    ) -> StepResult:
        result = await self._swap.execute(call, step)
        if isinstance(step, CommitWeightsStep):
            await self._look()
            if self._model.weight_version != step.weight_version:
                raise not_verified("the engine reports another weight version than was published")
        return result


def _tags(kinds: frozenset[ResourceKind] | set[ResourceKind]) -> list[str]:
    return [_TAGS[kind] for kind in _ORDER if kind in kinds]
