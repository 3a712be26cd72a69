"""Control of TensorRT-LLM's HTTP server: the Node's gate, and its memory routes where they are on (AD-41 to AD-44).

It has no route to pause, flush or load weights. Its memory routes drain by themselves, take signed requests only, and
tell how they stand; while anything is parked they refuse to park more. Its metrics can be read once only, so this
adapter leaves them to whoever collects them.
"""

from __future__ import annotations

import secrets
from typing import ClassVar, Final

import msgspec

from iop.adapters.base import AdapterServices
from iop.adapters.device_memory import DeviceMemory, device_bytes_used, freed_amounts
from iop.adapters.engine_http import EngineAnswer, ShortText
from iop.adapters.engine_profiles import DIRECTORY_VARIABLE, NEEDS_DIRECTORY
from iop.adapters.gate_control import (
    GATE_MODES,
    GATE_OFFERS,
    GATE_OPERATIONS,
    Offer,
    StepFailed,
    not_verified,
    succeeded,
)
from iop.adapters.native_control import UNHEALTHY, NativeControl, Observed
from iop.adapters.trtllm.profiles import Profiles
from iop.adapters.trtllm.signing import signed
from iop.admin.enums import AdminErrorCode, AdminOperationKind, ProfilerKind, ResourceKind, WeightRetention
from iop.admin.profile import Capabilities
from iop.admin.steps import (
    ParticipantReadBack,
    ReleaseStep,
    RestoreStep,
    StepCall,
    StepResult,
)
from iop.core.errors import PreconditionFailed, Unavailable
from iop.wire.messages import OpenAICompatSettings

Op = AdminOperationKind

KEY_VARIABLE: Final = "TRTLLM_RUNTIME_CONTROL_API_KEY"
"""Of the engine's process, and of the Node's."""

NO_ROUTE: Final = "TensorRT-LLM has no HTTP route for it"
NO_PROFILER: Final = "this TensorRT-LLM has no profile routes; a newer one has"
WRONG_METHOD: Final = 405
"""What its server answers to a GET of a route that it has for POST; 404 where it has none."""

NEEDS_KEY: Final = f"set {KEY_VARIABLE} in the Node's environment as in the engine's"
NEEDS_SLEEP_MODE: Final = "start trtllm-serve with --enable_sleep_mode"
KEY_REFUSED: Final = f"the engine has another {KEY_VARIABLE} than the Node"

TAGS: Final = {ResourceKind.WEIGHTS: "model_weights", ResourceKind.KV_CACHE: "kv_cache"}
_PROFILES: Final = frozenset({Op.START_PROFILE, Op.STOP_PROFILE})
_MEMORY: Final = frozenset({Op.RELEASE_RESOURCES, Op.RESTORE_RESOURCES})


class _Version(msgspec.Struct):
    version: ShortText = ""


class _Memory(msgspec.Struct):
    state: str
    parked_tags: list[str] = []


class TrtllmControl(NativeControl):
    """See the module.

    Args:
        device_memory: bytes in use on this machine's accelerators, `None` where nobody can tell.
    """

    NAME: ClassVar[str] = "TensorRT-LLM"
    OFFERS: ClassVar[tuple[Offer, ...]] = (
        *GATE_OFFERS,
        Offer(
            operation=Op.RELEASE_RESOURCES,
            detail="weights (offloaded), KV cache; both at once, or one alone",
            needs=f"`--enable_sleep_mode`, `{KEY_VARIABLE}`",
        ),
        Offer(
            operation=Op.RESTORE_RESOURCES,
            detail="all or some",
            needs=f"`--enable_sleep_mode`, `{KEY_VARIABLE}`",
        ),
        Offer(operation=Op.START_PROFILE, detail="CPU, GPU", needs=f"`{DIRECTORY_VARIABLE}`"),
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
        self._key = services.environment.get(KEY_VARIABLE, "")
        self._parked: frozenset[str] | None = None
        self._profiles: Profiles = Profiles(self._http, services.environment)

    # ---- looking ----

    async def _observe(self) -> Observed:
        health = await self._http.get("/health")
        if not health.is_ok:
            raise Unavailable(f"the engine is not well: {health.words}", reason=UNHEALTHY)
        version = await self._http.get("/version")
        why_not = await self._look_at_memory()
        missing = {Op.FLUSH_CACHES: NO_ROUTE, Op.UPDATE_WEIGHTS: NO_ROUTE}
        if why_not:
            missing |= dict.fromkeys(_MEMORY, why_not)
        recorded = self._profiles.kinds()
        if not recorded:
            missing |= dict.fromkeys(_PROFILES, NEEDS_DIRECTORY)
        elif (await self._http.get("/start_profile")).status != WRONG_METHOD:
            recorded = frozenset()
            missing |= dict.fromkeys(_PROFILES, NO_PROFILER)
        return Observed(
            engine_version=version.read(_Version).version if version.is_ok else "",
            capabilities=_capabilities(has_memory=not why_not, recorded=recorded),
            missing=missing,
        )

    async def _look_at_memory(self) -> str:
        """Learn what is parked; why that cannot be known, empty when it is."""
        self._parked = None
        if not self._key:
            return NEEDS_KEY
        try:
            answer = await self._ask_signed("GET", "/memory_status")
        except Unavailable as exc:
            if exc.reason == "ENGINE_REFUSES_KEY":
                return KEY_REFUSED
            raise
        if answer.status >= 500:  # what is parked is not known, which is not nothing
            raise Unavailable(f"the engine does not tell what it has parked: {answer.words}")
        if not answer.is_ok:
            return NEEDS_SLEEP_MODE
        memory = answer.read(_Memory)
        if memory.state == "failed":
            raise Unavailable("the engine's memory is in a state that only a restart ends", reason=UNHEALTHY)
        self._parked = frozenset(memory.parked_tags)
        return ""

    async def _ask_signed(
        self, method: str, path: str, tags: list[str] | None = None, *, timeout_s: float = 5.0
    ) -> EngineAnswer:
        body = b"" if tags is None else msgspec.json.encode({"tags": tags})
        headers = signed(
            self._key,
            method=method,
            path=path,
            body=body,
            unix_s=self._services.clock.unix_nanos() // 1_000_000_000,
            nonce=secrets.token_hex(16),
        )
        if method == "GET":
            return await self._http.get(path, headers=headers, timeout_s=timeout_s)
        return await self._http.post(path, msgspec.Raw(body), headers=headers, timeout_s=timeout_s)

    async def _read(self) -> ParticipantReadBack:
        return self._told(paused=self._is_gated, released=self._released())

    def _released(self) -> frozenset[ResourceKind]:
        return frozenset(kind for kind, tag in TAGS.items() if tag in (self._parked or ()))

    # ---- memory ----

    async def _release(self, call: StepCall, step: ReleaseStep) -> StepResult:
        if not set(step.kinds) <= set(TAGS) or step.weight_retention is WeightRetention.DISCARD:
            raise PreconditionFailed(
                "TensorRT-LLM parks weights in host memory, and its KV cache", reason="RESOURCE_KIND"
            )
        if not self._is_gated:
            raise PreconditionFailed("only a paused engine releases memory", reason="NOT_PAUSED")
        wanted = frozenset(step.kinds) - self._released()
        if not wanted:
            return succeeded(changed=False)
        if self._parked:
            raise PreconditionFailed(
                "TensorRT-LLM parks no more while anything is parked; restore it first",
                reason="ALREADY_PARKED",
            )
        before = await self._device_memory()
        await self._move("/release_memory", wanted, timeout_s=call.timeout_s)
        if not wanted <= self._released():
            raise not_verified("the engine answered and has not parked what was asked for")
        amounts = await freed_amounts(
            before, self._device_memory, min(wanted), claim="the engine says that it is parked"
        )
        return succeeded(amounts=amounts)

    async def _restore(self, call: StepCall, step: RestoreStep) -> StepResult:
        wanted = frozenset(step.kinds) & self._released()
        if not wanted:
            return succeeded(changed=False)
        await self._move("/resume_memory", wanted, timeout_s=call.timeout_s)
        if wanted & self._released():
            raise not_verified("the engine answered and still has parked what was to come back")
        return succeeded()

    async def _move(self, path: str, kinds: frozenset[ResourceKind], *, timeout_s: float) -> None:
        tags = [tag for kind, tag in TAGS.items() if kind in kinds]
        answer = await self._ask_signed("POST", path, tags, timeout_s=timeout_s)
        if answer.status == 409:
            raise StepFailed(
                f"the engine is in another transition: {answer.words}",
                code=AdminErrorCode.REFUSED_BUSY,
                changed=False,
                retryable=True,
            )
        if not answer.is_ok:
            raise StepFailed(f"the engine refused: {answer.words}")
        await self._look()


def _capabilities(*, has_memory: bool, recorded: frozenset[ProfilerKind]) -> Capabilities:
    operations = GATE_OPERATIONS | (_MEMORY if has_memory else set()) | (_PROFILES if recorded else set())
    return Capabilities(
        operations=operations,
        pause_modes=GATE_MODES,
        resource_kinds=frozenset(TAGS) if has_memory else frozenset(),
        weight_retentions=frozenset({WeightRetention.OFFLOAD_TO_HOST}) if has_memory else frozenset(),
        profiler_kinds=recorded,
    )
