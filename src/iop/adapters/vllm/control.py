"""Control of vLLM over its development-mode routes, each step read back (AD-37, AD-40 to AD-46).

What is offered is what `/openapi.json` lists and how the process was started; neither is assumed. Things that
its routes do not say by their status, and that this module therefore looks for:

* Options of `/pause` and `/sleep` are query parameters; a body is ignored. `clear_cache` is always given.
* A pause is in force before it is complete, so both the answer and `/is_paused` are needed; a `wait` pause
  blocks without a limit, so the engine is drained first.
* `/reset_prefix_cache` says 200 also when it refused. A sleep says 200 also where it can free nothing.
* Waking everything also ends a pause; so the pause is made again at once, behind the Node's closed gate.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

from iop.adapters.base import AdapterServices
from iop.adapters.device_memory import DeviceMemory, device_bytes_used, freed_amounts
from iop.adapters.engine_facts import MODELS_MAX
from iop.adapters.gate_control import (
    ENGINE,
    Offer,
    StepFailed,
    failed,
    not_verified,
    succeeded,
)
from iop.adapters.native_control import UNHEALTHY, NativeControl, Observed
from iop.adapters.staged_weights import StagedWeights
from iop.adapters.vllm.answers import (
    IsPaused,
    IsSleeping,
    Launch,
    Load,
    Models,
    OpenApi,
    ServerInfo,
    Success,
    Version,
    WeightInfo,
)
from iop.adapters.vllm.elastic import SIZE, ElasticSize
from iop.adapters.vllm.offer import MODES, OFFERS, RESETS, TAGS, lacking_of, offered
from iop.adapters.vllm.profiles import Profiles
from iop.adapters.vllm.weights import WeightSwap
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    ChangeDisposition,
    DrainTimeoutAction,
    PauseMode,
    ProfilerKind,
    ResourceKind,
    WeightFormat,
    WeightRetention,
)
from iop.admin.requests import DiskSource
from iop.admin.results import CacheResult
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    FlushStep,
    JudgeReconfigureStep,
    ParticipantReadBack,
    PauseStep,
    PrepareWeightsStep,
    ReconfigureStep,
    ReleaseStep,
    RestoreStep,
    StepCall,
    StepResult,
    UndoWeightsStep,
    VerifyWeightsStep,
    WorkCounts,
)
from iop.core.errors import DeadlineExceeded, PreconditionFailed, Unavailable
from iop.wire.messages import OpenAICompatSettings

_log = logging.getLogger(__name__)

Op = AdminOperationKind

PAUSE_TIMEOUT_S: Final = 60.0
"""An abort or freeze takes one scheduler step and the caches' clearing."""

INFO_TIMEOUT_S: Final = 30.0
"""The dump of its configuration reads the machine as well and takes seconds."""


LAUNCH_ASKS_MAX: Final = 5
"""Looks at one process that ask for that dump: one that fails is asked again, and one that always does, no more."""

_STATES: Final = ("/is_paused", "/is_sleeping", "/weight_info")


class VllmControl(NativeControl):
    """See the module.

    Args:
        device_memory: bytes in use on this machine's accelerators, `None` where nobody can tell.
    """

    NAME: ClassVar[str] = "vLLM"
    OFFERS: ClassVar[tuple[Offer, ...]] = OFFERS

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
        self._staged = StagedWeights(services.environment, settings.endpoint)
        self._swap = WeightSwap(self._http, self._staged)
        self._profiles: Profiles = Profiles(self._http)
        self._elastic = ElasticSize(self._http)
        self._paths: frozenset[str] = frozenset()
        self._is_told = False  # a server that cannot tell its routes now is asked again
        self._launch = Launch()
        self._launch_asks = 0  # how often it is still asked how it was started
        self._version = ""
        self._models: tuple[str, ...] = ()
        self._instance: str | None = None
        self._sleep = ""
        self._label = ""
        self._discarded = b""  # digest of the weights that were thrown away, as far as it was told
        self._mode: PauseMode | None = None
        self._frozen = 0
        self._released: frozenset[ResourceKind] | None = None

    # ---- looking ----

    async def _observe(self) -> Observed:
        health, metrics = await self._http.get_all("/health", "/metrics")
        if not health.is_ok:
            raise Unavailable(f"the engine is not well: {health.words}", reason=UNHEALTHY)
        if metrics.status >= 500:
            # One that changes its size answers so to everything but its health: it is no other process.
            raise Unavailable(f"the engine takes nothing now: {metrics.words}")
        load = Load.read(metrics.body)
        if load.start_time != self._instance or not (self._is_told or self.is_gated):
            await self._get_to_know()
            self._instance = load.start_time
        if self._launch_asks:
            await self._ask_launch()
        await self._read_states(load)
        kinds = self._profiles.kinds() if "/start_profile" in self._paths else frozenset[ProfilerKind]()
        capabilities, missing = offered(self._paths, self._launch, kinds)
        self._swap.sources = capabilities.weight_sources
        if self._swap.startup_path:
            capabilities = self._staged.offered(capabilities)
        if Op.RECONFIGURE_SERVING in capabilities.operations:
            await self._elastic.look()
        return Observed(
            instance=load.start_time,
            engine_version=self._version,
            capabilities=capabilities,
            models=self._models,
            in_flight=load.running,
            queued=load.waiting,
            missing=missing,
            lacking=lacking_of(self._paths, capabilities),
            startup_source=self._startup_source(),
        )

    async def _read_states(self, load: Load) -> None:
        asked = [path for path in _STATES if path in self._paths]
        told = dict(zip(asked, await self._http.get_all(*asked), strict=True))
        if not load.start_time and any(answer.status == 404 for answer in told.values()):
            self._instance = None  # it does not tell its start, and is another than before
            raise Unavailable("the engine has other routes than before", reason="ENGINE_CHANGED")
        if "/is_paused" in told:
            self._is_paused = told["/is_paused"].read(IsPaused).is_paused
        if "/weight_info" in told:
            self._label = told["/weight_info"].read(WeightInfo).weight_version
        self._sleep = load.sleep
        if not self._sleep and "/is_sleeping" in told:
            is_asleep = told["/is_sleeping"].read(IsSleeping).is_sleeping
            self._sleep = "weights_offloaded" if is_asleep and self._released else "awake"

    async def _get_to_know(self) -> None:
        """Once per process of the engine: what it can, and how it was started."""
        self._mode, self._frozen, self._released = None, 0, None
        self._is_gated = self._is_paused = False
        # Made when it is first asked for, which takes it a while.
        api = await self._http.get("/openapi.json", timeout_s=INFO_TIMEOUT_S)
        self._is_told = api.status < 500
        self._paths = frozenset(api.read(OpenApi).paths) if api.is_ok else frozenset()
        version = await self._http.get("/version")
        self._version = version.read(Version).version if version.is_ok else ""
        models = (await self._http.get("/v1/models")).read(Models).data
        own = [model for model in models if model.parent is None]
        self._models = tuple(model.id for model in own[:MODELS_MAX])
        root = own[0].root or "" if own else ""
        self._swap.begin(model=self._models[0] if own else "", path=root if _is_here(root) else "")
        self._launch_asks = LAUNCH_ASKS_MAX if "/server_info" in self._paths else 0
        self._take_launch(Launch())

    async def _ask_launch(self) -> None:
        self._launch_asks -= 1
        info = await self._http.get("/server_info", {"config_format": "json"}, timeout_s=INFO_TIMEOUT_S)
        if info.is_ok:
            self._take_launch(Launch.read(info.read(ServerInfo)))
        if info.status < 500:
            self._launch_asks = 0

    def _take_launch(self, launch: Launch) -> None:
        self._launch = launch
        self._profiles.begin(launch)
        self._elastic.size, self._elastic.size_max = None, launch.data_parallel_max

    def _startup_source(self) -> DiskSource | None:
        path = self._swap.startup_path
        return DiskSource(path=path, format=WeightFormat.SAFETENSORS) if path else None

    def weight_version(self) -> str:
        """As `/weight_info` last said."""
        return self._label

    async def _read(self) -> ParticipantReadBack:
        is_dev = "/is_paused" in self._paths
        return self._told(
            paused=self._is_paused if is_dev else self._is_gated,
            frozen=self._frozen if self._is_paused else 0,
            released=self._released_now(),
            weight_version=self._label if "/weight_info" in self._paths else None,
            serving=((SIZE, self._elastic.size),) if self._elastic.size is not None else (),
        )

    def _released_now(self) -> frozenset[ResourceKind]:
        """By the engine's own state; which of several only we know, and after our restart: all that may be."""
        if not self._launch.sleep_mode or self._sleep == "awake":
            return frozenset()
        return frozenset(TAGS) if self._released is None else self._released

    # ---- pause ----

    async def _pause(self, call: StepCall, step: PauseStep) -> StepResult:
        mode = step.pause.mode
        if "/pause" not in self._paths:
            return await self._gate_pause(call, step)
        if self._is_paused and self._mode is mode:
            return succeeded(changed=False, work=WorkCounts(kept=self._frozen))
        native = MODES[mode]
        work = WorkCounts()
        if mode is PauseMode.DRAIN:
            native, work = await self._drain(call, step)
        else:
            self._is_gated = True
            load = self._load()
            work = WorkCounts(kept=load) if mode is PauseMode.KEEP else WorkCounts(aborted=load)
        await self._call_pause(native, timeout_s=min(call.timeout_s, PAUSE_TIMEOUT_S))
        self._mode = mode
        self._frozen = work.kept
        return succeeded(work=work)

    async def _drain(self, call: StepCall, step: PauseStep) -> tuple[str, WorkCounts]:
        """Wait at the closed gate until the engine is idle: its own `wait` knows no limit."""
        may_abort = step.pause.on_drain_timeout is DrainTimeoutAction.ABORT
        spec = replace(step.pause, on_drain_timeout=DrainTimeoutAction.FAIL) if may_abort else step.pause
        try:
            drained = await self._gate_pause(call, replace(step, pause=spec))
        except StepFailed as exc:
            if exc.code is not AdminErrorCode.DRAIN_TIMEOUT or not may_abort:
                raise
            self._is_gated = True
            return "abort", WorkCounts(aborted=self._load())
        return "wait", drained.work

    async def _call_pause(self, native: str, *, timeout_s: float) -> None:
        try:
            answer = await self._http.post(
                "/pause", query={"mode": native, "clear_cache": "false"}, timeout_s=timeout_s
            )
        except DeadlineExceeded:
            # Its own wait has no limit and goes on rejecting work after we left.
            await self._http.post("/resume")
            self._is_gated = False
            raise StepFailed(
                "the engine did not stop in time", code=AdminErrorCode.DRAIN_TIMEOUT, retryable=True
            ) from None
        if not answer.is_ok:
            raise StepFailed(f"the engine refused to pause: {answer.words}")
        if not await self._is_paused_now():
            raise not_verified("the engine answered `paused` and says that it is not")

    async def _is_paused_now(self) -> bool:
        await self._look_patiently(PAUSE_TIMEOUT_S)
        return self._is_paused

    async def _resume(self, call: StepCall) -> StepResult:
        if "/resume" not in self._paths:
            return await super()._resume(call)
        if self._released_now():
            raise PreconditionFailed("memory is released; restore it first", reason="RESOURCES_RELEASED")
        if not self._is_paused:
            changed, self._is_gated = self._is_gated, False
            return succeeded(changed=changed)
        answer = await self._http.post("/resume", timeout_s=PAUSE_TIMEOUT_S)
        if not answer.is_ok:
            raise StepFailed(f"the engine refused to resume: {answer.words}", retryable=True)
        if await self._is_paused_now():
            raise not_verified("the engine answered `resumed` and says that it is paused")
        resumed, self._frozen, self._mode = self._frozen, 0, None
        self._is_gated = False
        return succeeded(work=WorkCounts(resumed=resumed))

    # ---- caches ----

    async def _flush(self, call: StepCall, step: FlushStep) -> StepResult:
        results: list[CacheResult] = []
        for kind in step.kinds:
            refusal = await self._flush_one(kind, step.busy_policy, call.timeout_s)
            outcome = CacheOutcome.REFUSED if refusal else CacheOutcome.CLEARED
            results.append(CacheResult(participant_id=ENGINE, kind=kind, outcome=outcome, detail=refusal))
        told = next((each.detail for each in results if each.detail), "")
        if told:
            return failed(
                StepFailed(told, code=AdminErrorCode.REFUSED_BUSY, changed=False, retryable=True),
                caches=tuple(results),
            )
        return succeeded(caches=tuple(results))

    async def _flush_one(self, kind: CacheKind, policy: BusyPolicy, timeout_s: float) -> str:
        """Why it was refused; empty when it was cleared."""
        refusal = ""

        async def is_cleared() -> bool:
            nonlocal refusal
            refusal = await (
                self._reset_prefix(policy) if kind is CacheKind.PREFIX else self._reset_unchecked(kind)
            )
            return not refusal or policy is not BusyPolicy.WAIT

        try:
            async with asyncio.timeout(timeout_s):
                await self._until(is_cleared)
        except TimeoutError:
            pass
        return refusal

    async def _reset_prefix(self, policy: BusyPolicy) -> str:
        query = {"reset_running_requests": "true" if policy is BusyPolicy.PREEMPT else "false"}
        answer = await self._http.post("/reset_prefix_cache", query=query, timeout_s=PAUSE_TIMEOUT_S)
        if not answer.is_ok:
            return f"the engine could not clear its prefix cache: {answer.words}"
        # Older ones answered nothing, and checked nothing.
        if answer.body and not answer.read(Success).success:
            return "requests hold blocks of the prefix cache"
        return ""

    async def _reset_unchecked(self, kind: CacheKind) -> str:
        """These routes always succeed, and disturb requests that run: so only at rest."""
        seen = await self._look()
        if not self._is_paused and (seen.in_flight or seen.queued):
            return f"the {kind.name.lower()} cache can be cleared only while the engine is idle or paused"
        answer = await self._http.post(RESETS[kind], timeout_s=PAUSE_TIMEOUT_S)
        return "" if answer.is_ok else f"the engine could not clear its cache: {answer.words}"

    # ---- memory ----

    async def _release(self, call: StepCall, step: ReleaseStep) -> StepResult:
        if not set(step.kinds) <= set(TAGS):
            raise PreconditionFailed("vLLM releases weights and KV cache only", reason="RESOURCE_KIND")
        if not self._is_paused:
            raise PreconditionFailed("only a paused engine releases memory", reason="NOT_PAUSED")
        self._is_gated = True  # whoever paused it
        held = self._released_now()
        wanted = frozenset(step.kinds) - held
        if not wanted:
            return succeeded(changed=False)
        if held and ResourceKind.WEIGHTS in wanted:
            raise PreconditionFailed(
                "an engine asleep cannot sleep deeper; restore the KV cache first", reason="ALREADY_ASLEEP"
            )
        before = await self._device_memory()
        if ResourceKind.WEIGHTS in wanted:
            discards = step.weight_retention is WeightRetention.DISCARD
            has_checksums = discards and "/weight_checker" in self._paths
            self._discarded = await self._swap.digest() if has_checksums else b""
            level = "2" if discards else "1"
            mode = "keep" if self._mode is PauseMode.KEEP else "abort"
            await self._tell("/sleep", query={"level": level, "mode": mode}, timeout_s=call.timeout_s)
            if ResourceKind.KV_CACHE not in step.kinds:
                await self._tell("/wake_up", query={"tags": "kv_cache"}, timeout_s=call.timeout_s)
        else:
            await self._tell("/release_kv_cache_memory", query={}, timeout_s=call.timeout_s)
        self._released = held | wanted
        await self._look()
        if self._sleep == "awake":
            self._released = held
            raise not_verified("the engine answered and says that it is awake")
        amounts = await freed_amounts(
            before, self._device_memory, min(wanted), claim="the engine says that it sleeps"
        )
        return succeeded(amounts=amounts)

    async def _restore(self, call: StepCall, step: RestoreStep) -> StepResult:
        held = self._released_now()
        wanted = held & frozenset(step.kinds)
        if not wanted:
            return succeeded(changed=False)
        self._is_gated = True  # waking may let it run for a moment
        was_discarded = self._sleep == "discard_all"
        if ResourceKind.WEIGHTS in wanted:
            if was_discarded and not isinstance(step.weight_source, DiskSource):
                raise PreconditionFailed("discarded weights have no source on disk", reason="IRREVERSIBLE")
            await self._tell("/wake_up", query={"tags": "weights"}, timeout_s=call.timeout_s)
            if was_discarded and isinstance(step.weight_source, DiskSource):
                await self._swap.reload(step.weight_source.path, timeout_s=call.timeout_s)
                if self._discarded and await self._swap.digest() != self._discarded:
                    raise not_verified("the weights were loaded again, but their checksum is another one")
        if ResourceKind.KV_CACHE in wanted:
            await self._tell("/wake_up", query={"tags": "kv_cache"}, timeout_s=call.timeout_s)
        left = held - wanted
        self._released = left
        if not left:
            await self._tell("/wake_up", query={}, timeout_s=call.timeout_s)
            await self._call_pause(
                "keep" if self._mode is PauseMode.KEEP else "abort", timeout_s=PAUSE_TIMEOUT_S
            )
        await self._look()
        if bool(left) is (self._sleep == "awake"):
            raise not_verified("the engine's sleep state is not what was asked for")
        return succeeded(weight_version=self._label)

    # ---- size ----

    async def _reconfigure(self, call: StepCall, step: JudgeReconfigureStep | ReconfigureStep) -> StepResult:
        if isinstance(step, JudgeReconfigureStep):
            return succeeded(changed=False, changes=self._elastic.judge(step.changes))
        if self._released_now():
            # Ranks that join take their weights from those that are there.
            raise PreconditionFailed("memory is released; restore it first", reason="RESOURCES_RELEASED")
        changes = await self._elastic.change(step.changes, timeout_s=call.timeout_s)
        return succeeded(
            changes=changes, changed=any(each.disposition is ChangeDisposition.APPLIED for each in changes)
        )

    # ---- weights and profiles ----

    async def _weights(
        self,
        call: StepCall,
        step: PrepareWeightsStep | ApplyWeightsStep | VerifyWeightsStep | CommitWeightsStep | UndoWeightsStep,
    ) -> StepResult:
        can_probe = self._is_paused and self._mode is not PauseMode.KEEP and not self._released_now()
        self._is_gated |= can_probe
        try:
            result = await self._swap.execute(
                call, step, has_checksums="/weight_checker" in self._paths, can_probe=can_probe
            )
        finally:
            if self._swap.has_resumed:
                # Probed behind the closed gate; a failure here must not leave the engine running.
                self._swap.has_resumed = False
                await self._call_pause("abort", timeout_s=PAUSE_TIMEOUT_S)
        if isinstance(step, CommitWeightsStep):
            await self._look()
            if self._label != step.weight_version:
                raise not_verified("the engine reports another weight version than was published")
        return result


def _is_here(path: str) -> bool:
    """Whether a model's root names a directory that this machine sees too."""
    return path.startswith("/") and Path(path).is_dir()
