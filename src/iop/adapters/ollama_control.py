"""Control of an Ollama server: models unloaded and loaded again, looked for in its list of what runs (AD-40 to AD-44).

It has no pause: the gate of the Node is the pause. Things that its answers do not say:

* An unload is answered at once. A runner with requests ends after them, a request that comes meanwhile keeps it, and
  any request loads it again: so a model is unloaded only behind the closed gate and with nothing of ours in flight,
  and is out when `/api/ps` no longer has it.
* A tag may have been pulled anew since: what is loaded again must have the digest of what was unloaded.
* Models that run elsewhere are listed as well; nothing of them is here to be unloaded.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

import msgspec

from iop.adapters.base import AdapterServices
from iop.adapters.device_memory import DeviceMemory, device_bytes_used, freed_amounts
from iop.adapters.engine_http import Count, ShortText
from iop.adapters.gate_control import (
    ENGINE,
    GATE_MODES,
    GATE_OFFERS,
    GATE_OPERATIONS,
    Offer,
    StepFailed,
    failed,
    not_verified,
    succeeded,
)
from iop.adapters.native_control import UNHEALTHY, NativeControl, Observed
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    ResourceKind,
    WeightFormat,
    WeightRetention,
)
from iop.admin.profile import Capabilities
from iop.admin.requests import DiskSource
from iop.admin.results import CacheResult
from iop.admin.steps import FlushStep, ParticipantReadBack, ReleaseStep, RestoreStep, StepCall, StepResult
from iop.core.errors import PreconditionFailed, Unavailable
from iop.wire.messages import OllamaSettings, OpenAICompatSettings

Op = AdminOperationKind

UNLOAD_TIMEOUT_S: Final = 30.0
"""A runner without requests leaves within seconds, when its memory shows as free."""

RUNS_ELSEWHERE: Final = "a model that Ollama runs elsewhere (a `:cloud` model) cannot be unloaded here"
NO_MODEL: Final = "no model of this configuration is installed at the server: pull it first"

_CACHES: Final = frozenset(CacheKind)
_LIFECYCLE: Final = frozenset({Op.FLUSH_CACHES, Op.RELEASE_RESOURCES, Op.RESTORE_RESOURCES})


class _Version(msgspec.Struct):
    version: ShortText = ""


class _Tag(msgspec.Struct):
    name: str
    digest: ShortText = ""
    remote_host: str = ""


class _Tags(msgspec.Struct):
    models: list[_Tag] = []


class _Running(msgspec.Struct):
    name: str
    digest: ShortText = ""
    size_vram: Count = 0


class _Ps(msgspec.Struct):
    models: list[_Running] = []


class _Generated(msgspec.Struct):
    done_reason: str = ""


class OllamaControl(NativeControl):
    """See the module.

    Args:
        device_memory: bytes in use on this machine's accelerators, `None` where nobody can tell.
    """

    NAME: ClassVar[str] = "Ollama"
    OFFERS: ClassVar[tuple[Offer, ...]] = (
        *GATE_OFFERS,
        Offer(
            operation=Op.FLUSH_CACHES,
            detail="prefix, multimodal, encoder (model unloaded and loaded again); busy: fail, wait",
            needs="an installed model",
        ),
        Offer(
            operation=Op.RELEASE_RESOURCES,
            detail="weights, discarded (model unloaded, its KV with it)",
            needs="an installed model",
        ),
        Offer(
            operation=Op.RESTORE_RESOURCES,
            detail="weights (model loaded, the same digest)",
            needs="an installed model",
        ),
    )

    def __init__(
        self,
        settings: OllamaSettings,
        services: AdapterServices,
        *,
        targets: tuple[str, ...] = (),
        device_memory: DeviceMemory = device_bytes_used,
    ) -> None:
        super().__init__(OpenAICompatSettings(endpoint=settings.endpoint), services, targets=targets)
        self._keep_alive = settings.keep_alive
        self._device_memory = device_memory
        self._running: dict[str, _Running] = {}
        self._installed: tuple[str, ...] = ()
        self._released: dict[str, str] = {}
        self._label = ""

    # ---- looking ----

    async def _observe(self) -> Observed:
        version, tags, running = await self._http.get_all("/api/version", "/api/tags", "/api/ps")
        if not version.is_ok or not tags.is_ok:
            raise Unavailable(f"the engine is not well: {version.words}", reason=UNHEALTHY)
        listed = {tag.name: tag for tag in tags.read(_Tags).models}
        mine = tuple(name for target in self._targets if (name := full_name(target)) in listed)
        missing = ""
        if any(_is_elsewhere(listed[name]) for name in mine):
            missing = RUNS_ELSEWHERE
        elif not mine:
            missing = NO_MODEL
        elif not running.is_ok:
            missing = "the server does not tell what is loaded (`/api/ps`)"
        else:
            self._running = {each.name: each for each in running.read(_Ps).models if each.name in mine}
        self._installed = mine
        self._label = _label_of([listed[name] for name in mine])
        return Observed(
            engine_version=version.read(_Version).version,
            capabilities=_capabilities(can_unload=not missing),
            models=mine,
            missing=dict.fromkeys(_LIFECYCLE, missing) if missing else {},
            startup_source=None
            if missing
            else DiskSource(path=self._label, format=WeightFormat.ENGINE_NATIVE),
        )

    def weight_version(self) -> str:
        """What the tags of its models name now: content, not a label."""
        return self._label

    async def _read(self) -> ParticipantReadBack:
        # Its own timer unloads models as well; only what we let go is released.
        is_out = bool(self._released) and not self._running
        return self._told(
            paused=self._is_gated,
            released=frozenset({ResourceKind.WEIGHTS}) if is_out else frozenset(),
            weight_version=self._label or None,
        )

    # ---- steps ----

    async def _flush(self, call: StepCall, step: FlushStep) -> StepResult:
        if step.busy_policy is BusyPolicy.PREEMPT:
            raise PreconditionFailed("Ollama cannot preempt requests", reason="BUSY_POLICY")
        was_gated, self._is_gated = self._is_gated, True
        try:
            if step.busy_policy is BusyPolicy.WAIT:
                try:
                    async with asyncio.timeout(call.timeout_s / 2):
                        await self._until(self._is_idle)
                except TimeoutError:
                    pass
            if self._load_of_ours():
                busy = "requests run at the engine"
                return failed(
                    StepFailed(busy, code=AdminErrorCode.REFUSED_BUSY, changed=False, retryable=True),
                    caches=_caches(step, CacheOutcome.REFUSED, busy),
                )
            loaded = tuple(self._running.values())
            await self._unload(loaded, timeout_s=call.timeout_s)
            for each in loaded:
                await self._load_model(each.name, each.digest, timeout_s=call.timeout_s)
        finally:
            self._is_gated = was_gated
        detail = "unloaded and loaded again" if loaded else "nothing was loaded"
        return succeeded(caches=_caches(step, CacheOutcome.CLEARED, detail))

    async def _release(self, call: StepCall, step: ReleaseStep) -> StepResult:
        if set(step.kinds) != {ResourceKind.WEIGHTS} or step.weight_retention is not WeightRetention.DISCARD:
            raise PreconditionFailed(
                "Ollama releases weights by unloading the model: kinds=weights, retention=discard",
                reason="RESOURCE_KIND",
            )
        if not self._is_gated or self._load_of_ours():
            # Any request would keep the model, or load it again.
            raise PreconditionFailed("only a paused engine without requests unloads", reason="NOT_PAUSED")
        if self._released and not self._running:
            return succeeded(changed=False)
        loaded = tuple(self._running.values())
        before = await self._device_memory() if any(each.size_vram for each in loaded) else None
        await self._unload(loaded, timeout_s=call.timeout_s)
        self._released = dict.fromkeys(self._installed, "") | {each.name: each.digest for each in loaded}
        amounts = await freed_amounts(
            before, self._device_memory, ResourceKind.WEIGHTS, claim="the model is no longer listed"
        )
        return succeeded(amounts=amounts)

    async def _restore(self, call: StepCall, step: RestoreStep) -> StepResult:
        if ResourceKind.WEIGHTS not in step.kinds or not self._released:
            return succeeded(changed=False)
        for name, digest in self._released.items():
            # What was not loaded when the rest was released comes with its first request, as ever.
            if digest:
                await self._load_model(name, digest, timeout_s=call.timeout_s)
        self._released = {}
        return succeeded(weight_version=self._label)

    async def _unload(self, models: tuple[_Running, ...], *, timeout_s: float) -> None:
        for each in models:
            answer = await self._http.post(
                "/api/generate", {"model": each.name, "keep_alive": 0, "stream": False}, timeout_s=timeout_s
            )
            if not answer.is_ok:
                raise StepFailed(f"the model could not be unloaded: {answer.words}")
        names = {each.name for each in models}

        async def is_out() -> bool:
            await self._look()
            return not names & self._running.keys()

        try:
            async with asyncio.timeout(min(timeout_s, UNLOAD_TIMEOUT_S)):
                await self._until(is_out)
        except TimeoutError:
            raise not_verified("the engine answered and still lists the model as loaded") from None

    async def _load_model(self, name: str, digest: str, *, timeout_s: float) -> None:
        body: dict[str, object] = {"model": name, "stream": False}
        if self._keep_alive:
            body["keep_alive"] = self._keep_alive
        answer = await self._http.post("/api/generate", body, timeout_s=timeout_s)
        if not answer.is_ok or answer.read(_Generated).done_reason != "load":
            raise StepFailed(f"the model could not be loaded: {answer.words}")
        await self._look()
        there = self._running.get(name)
        if there is None:
            raise not_verified("the engine answered and does not list the model as loaded")
        if there.digest != digest:
            raise not_verified("the tag names other weights than those that were unloaded")

    def _load_of_ours(self) -> int:
        return self._traffic.in_flight if self._traffic is not None else 0


def full_name(target: str) -> str:
    """As the server lists it: a name without a tag means the latest."""
    return target if ":" in target.rpartition("/")[2] else f"{target}:latest"


def _label_of(tags: list[_Tag]) -> str:
    """Names and digests of what the tags name."""
    return "+".join(f"{tag.name}@{tag.digest.removeprefix('sha256:')[:12]}" for tag in tags)[:200]


def _is_elsewhere(tag: _Tag) -> bool:
    return bool(tag.remote_host) or tag.name.endswith((":cloud", "-cloud"))


def _capabilities(*, can_unload: bool) -> Capabilities:
    if not can_unload:
        return Capabilities(operations=GATE_OPERATIONS, pause_modes=GATE_MODES)
    return Capabilities(
        operations=GATE_OPERATIONS | _LIFECYCLE,
        pause_modes=GATE_MODES,
        cache_kinds=_CACHES,
        busy_policies=frozenset({BusyPolicy.FAIL, BusyPolicy.WAIT}),
        resource_kinds=frozenset({ResourceKind.WEIGHTS}),
        weight_retentions=frozenset({WeightRetention.DISCARD}),
    )


def _caches(step: FlushStep, result: CacheOutcome, detail: str) -> tuple[CacheResult, ...]:
    return tuple(
        CacheResult(participant_id=ENGINE, kind=kind, outcome=result, detail=detail) for kind in step.kinds
    )
