"""Control of llama.cpp's server: slots, and in router mode its models (AD-40 to AD-44).

It has no pause of its own: the gate of the Node is the pause, and the slots tell whether work is left. It
never tells a slot that is not there from one that is (`/slots/99` acts on a slot that exists), so only ids
that `/slots` named are used. Loading and unloading answer before their effect: it is looked for. A router loads
a model for whoever asks about it, a mere question too, so every question forbids that.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final

import msgspec

from iop.adapters.base import AdapterServices
from iop.adapters.engine_http import EngineAnswer, ShortText
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
from iop.core.errors import IopError, PreconditionFailed, RemoteProtocolError, Unavailable
from iop.wire.messages import OpenAICompatSettings

SLOTS_MAX: Final = 4096
"""More slots than any server has; a longer list is refused."""

UNLOAD_TIMEOUT_S: Final = 30.0
"""The server kills a model's process that did not leave after 10 s."""

_REQUESTS: Final = re.compile(rb"^llamacpp:requests_(processing|deferred) (\d{1,9})$", re.MULTILINE)

NEEDS_SLOT_SAVE: Final = "start llama-server with --slot-save-path DIR (and without --no-slots)"
NEEDS_NO_RAM_CACHE: Final = (
    "start llama-server with --cache-ram 0: prompts that it keeps in host RAM cannot be erased"
)
CANARY_TIMEOUT_S: Final = 60.0
CANARY_SLOTS_MAX: Final = 64
"""With more slots the search for a prompt cache in host RAM would take too many requests."""

NO_LOADING: Final = MappingProxyType({"autoload": "false"})
"""Else a router loads the model that a question names, also one that it is just unloading."""

NEEDS_ROUTER: Final = "start llama-server without a model (router mode, --models-dir DIR)"


class _Props(msgspec.Struct):
    role: str = ""
    build_info: ShortText = ""
    model_alias: ShortText = ""
    is_sleeping: bool = False
    max_instances: int = 0


class _Slot(msgspec.Struct):
    id: int
    is_processing: bool = False


class _Erased(msgspec.Struct):
    id_slot: int
    n_erased: int


class _Timings(msgspec.Struct):
    cache_n: int = 0
    prompt_n: int = 0


class _Completion(msgspec.Struct):
    timings: _Timings


class _Status(msgspec.Struct):
    value: str = ""
    failed: bool = False
    args: list[str] = []


class _Model(msgspec.Struct):
    id: ShortText
    status: _Status | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class LlamaCppControl(NativeControl):
    """See the module."""

    NAME: ClassVar[str] = "llama.cpp"
    OFFERS: ClassVar[tuple[Offer, ...]] = (
        *NativeControl.OFFERS,
        Offer(
            operation=AdminOperationKind.FLUSH_CACHES,
            detail="prefix (slots erased); busy: fail, wait",
            needs="`--slot-save-path`, `--cache-ram 0`",
        ),
        Offer(
            operation=AdminOperationKind.RELEASE_RESOURCES,
            detail="weights, discarded (model unloaded, its KV with it)",
            needs="router mode",
        ),
        Offer(
            operation=AdminOperationKind.RESTORE_RESOURCES,
            detail="weights (model loaded from its file)",
            needs="router mode",
        ),
    )

    def __init__(
        self, settings: OpenAICompatSettings, services: AdapterServices, *, targets: tuple[str, ...] = ()
    ) -> None:
        super().__init__(settings, services, targets=targets)
        self._is_router = False
        self._statuses: dict[str, str] = {}
        self._ram_caches: dict[str, bool] = {}
        self._instances_max = 0
        self._released: tuple[str, ...] | None = None
        self._files: dict[str, str] = {}
        self._label = ""

    # ---- looking ----

    async def _observe(self) -> Observed:
        answer = await self._http.get("/props")
        if answer.status == 503:
            raise Unavailable("the engine is loading its model", reason="ENGINE_LOADING")
        if not answer.is_ok:
            raise RemoteProtocolError("the engine has no /props: is it llama.cpp?", reason="NOT_LLAMACPP")
        props = answer.read(_Props)
        self._is_router = props.role == "router"
        if self._is_router:
            return await self._observe_router(props)
        if props.is_sleeping:
            # Asking for slots or metrics would load the model again.
            return self._seen or Observed(engine_version=props.build_info)
        slots = await self._slots("")
        missing: dict[AdminOperationKind, str] = {}
        metrics = await self._http.get("/metrics")
        instance = metrics.headers.get("process-start-time-unix", "")
        at_work, deferred = _requests(metrics.body if metrics.is_ok else b"")
        can_erase = slots is not None and await self._can_erase("", slots)
        if not can_erase:
            missing[AdminOperationKind.FLUSH_CACHES] = NEEDS_SLOT_SAVE
        elif self._ram_caches.get(f"{instance}/"):
            can_erase = False
            missing[AdminOperationKind.FLUSH_CACHES] = NEEDS_NO_RAM_CACHE
        missing[AdminOperationKind.RELEASE_RESOURCES] = NEEDS_ROUTER
        missing[AdminOperationKind.RESTORE_RESOURCES] = NEEDS_ROUTER
        return Observed(
            instance=instance,
            engine_version=props.build_info,
            capabilities=_capabilities(can_erase=can_erase, is_router=False),
            models=(props.model_alias,) if props.model_alias else (),
            in_flight=at_work if slots is None else _busy(slots),
            queued=deferred,
            missing=missing,
        )

    async def _observe_router(self, props: _Props) -> Observed:
        listing = (await self._http.get("/v1/models")).read(_Models)
        self._statuses = {
            model.id: model.status.value for model in listing.data[:SLOTS_MAX] if model.status is not None
        }
        self._files = {
            model.id: _file_of(model.status.args) for model in listing.data[:SLOTS_MAX] if model.status
        }
        self._instances_max = props.max_instances
        mine = self._mine()
        files = [file for model in mine if (file := self._files.get(model))]
        self._label = await asyncio.to_thread(_label_of, mine, files)
        busy = 0
        missing: dict[AdminOperationKind, str] = {}
        can_erase = False
        for model in mine:
            if self._statuses.get(model) == "loaded":
                slots = await self._slots(model)
                busy += _busy(slots) or 0
                can_erase = slots is not None and await self._can_erase(model, slots)
        if mine and not can_erase:
            missing[AdminOperationKind.FLUSH_CACHES] = NEEDS_SLOT_SAVE + "; and a model must be loaded"
        return Observed(
            engine_version=props.build_info,
            capabilities=_capabilities(can_erase=can_erase, is_router=True),
            models=mine,
            in_flight=busy,
            missing=missing,
            startup_source=_source_of(files) if len(files) == len(mine) else None,
        )

    def weight_version(self) -> str:
        """A name for what a router loads; one model alone has none."""
        return self._label if self._is_router else ""

    def _mine(self) -> tuple[str, ...]:
        """The models that this adapter serves; all of the router when its config names none."""
        if self._targets:
            return tuple(model for model in self._targets if model in self._statuses)
        return tuple(self._statuses)

    async def _slots(self, model: str) -> list[_Slot] | None:
        """As the engine tells them; `None` when it was told not to, none when the model has just gone."""
        answer = await self._http.get("/slots", {"model": model, **NO_LOADING} if model else {})
        if answer.status == 501:
            return None
        if model and _is_not_loaded(answer):
            return []
        if not answer.is_ok:
            raise Unavailable(f"the engine does not tell its slots: {answer.words}", reason="NO_SLOTS")
        slots = answer.read(list[_Slot])
        if len(slots) > SLOTS_MAX:
            raise RemoteProtocolError("the engine tells too many slots", reason="TOO_MANY_SLOTS")
        return slots

    async def _can_erase(self, model: str, slots: list[_Slot]) -> bool:
        """Ask for an action that does not exist: 501 is told before the action is looked at."""
        if not slots:
            return False
        answer = await self._slot_action(model, slots[0].id, "none")
        return answer.status == 400 and not _is_not_loaded(answer)

    async def _slot_action(
        self, model: str, slot_id: int, action: str, *, timeout_s: float = 5.0
    ) -> EngineAnswer:
        body = {"model": model} if model else {}
        query = {"action": action, **NO_LOADING} if model else {"action": action}
        return await self._http.post(f"/slots/{slot_id}", body, query=query, timeout_s=timeout_s)

    async def _read(self) -> ParticipantReadBack:
        released: frozenset[ResourceKind] = frozenset()
        if self._is_router:
            mine = self._mine()
            is_out = bool(mine) and all(self._statuses.get(model) in {"unloaded", "failed"} for model in mine)
            # A router loads with the first request and evicts by itself; only what we let go is released.
            if is_out and self._released is not None:
                released = frozenset({ResourceKind.WEIGHTS})
        label = self._label if self._is_router else None
        return self._told(paused=self._is_gated, released=released, weight_version=label)

    # ---- steps ----

    async def _flush(self, call: StepCall, step: FlushStep) -> StepResult:
        if set(step.kinds) != {CacheKind.PREFIX}:
            raise self._not_offered(AdminOperationKind.FLUSH_CACHES)
        if step.busy_policy is BusyPolicy.PREEMPT:
            raise PreconditionFailed("llama.cpp cannot preempt requests", reason="BUSY_POLICY")
        if step.busy_policy is BusyPolicy.WAIT:
            try:
                async with asyncio.timeout(call.timeout_s):
                    await self._until(self._is_idle)
            except TimeoutError:
                pass
        models = [model for model in self._mine() if self._statuses.get(model) == "loaded"]
        erased = 0
        keeps_in_ram = False
        for model in models if self._is_router else [""]:
            known = await self._slots(model) or []
            if any(slot.is_processing for slot in known):
                return failed(
                    StepFailed(
                        "a slot is at work", code=AdminErrorCode.REFUSED_BUSY, changed=False, retryable=True
                    ),
                    caches=(_cache(CacheOutcome.REFUSED, "a slot is at work"),),
                )
            for slot in known:
                erased += await self._erase(model, slot.id)
            keeps_in_ram = keeps_in_ram or await self._keeps_in_ram(model, known)
        if keeps_in_ram:
            return failed(
                not_verified(NEEDS_NO_RAM_CACHE),
                caches=(_cache(CacheOutcome.UNKNOWN, "slots erased; " + NEEDS_NO_RAM_CACHE),),
            )
        return succeeded(caches=(_cache(CacheOutcome.CLEARED, f"{erased} tokens erased from the slots"),))

    async def _erase(self, model: str, slot_id: int) -> int:
        """Erase one slot and once more: the second finds nothing left."""
        first = await self._slot_action(model, slot_id, "erase")
        if not first.is_ok:
            raise StepFailed(f"a slot could not be erased: {first.words}")
        told = first.read(_Erased)
        again = await self._slot_action(model, slot_id, "erase")
        if told.id_slot != slot_id or not again.is_ok or again.read(_Erased).n_erased:
            raise not_verified("a slot still holds tokens after it was erased")
        return told.n_erased

    async def _keeps_in_ram(self, model: str, slots: list[_Slot]) -> bool:
        """Whether prompts survive outside the slots: found out with prompts of our own, once per process.

        One more prompt than there are slots pushes the first out; what is then still known of it came from RAM.
        """
        process = f"{self._seen.instance if self._seen is not None else ''}/{model}"
        if process not in self._ram_caches:
            if len(slots) > CANARY_SLOTS_MAX:
                raise not_verified("with so many slots it cannot be told whether prompts stay in host RAM")
            for number in range(len(slots) + 1):
                await self._canary(model, number)
            again = await self._canary(model, 0)
            for slot in slots:
                await self._erase(model, slot.id)
            self._ram_caches[process] = again.cache_n > again.prompt_n
        return self._ram_caches[process]

    async def _canary(self, model: str, number: int) -> _Timings:
        """A prompt that shares no beginning with the others, and one token of an answer."""
        word = f"{chr(ord('a') + number % 26)}{number} "
        body: dict[str, object] = {"prompt": word * 40, "n_predict": 1, "cache_prompt": True}
        if model:
            body["model"] = model
        answer = await self._http.post(
            "/completion", body, query=NO_LOADING if model else None, timeout_s=CANARY_TIMEOUT_S
        )
        if not answer.is_ok:
            raise not_verified(f"a repeated prompt could not be tried: {answer.words}")
        return answer.read(_Completion).timings

    async def _release(self, call: StepCall, step: ReleaseStep) -> StepResult:
        if set(step.kinds) != {ResourceKind.WEIGHTS} or step.weight_retention is not WeightRetention.DISCARD:
            raise PreconditionFailed(
                "llama.cpp releases weights by unloading the model: kinds=weights, retention=discard",
                reason="RESOURCE_KIND",
            )
        if not self._is_gated:
            # Any request would load the model again.
            raise PreconditionFailed("only a paused engine releases memory", reason="NOT_PAUSED")
        mine = self._mine()
        loaded = tuple(model for model in mine if self._statuses.get(model) not in {"unloaded", "failed"})
        for model in loaded:
            answer = await self._http.post("/models/unload", {"model": model})
            if not answer.is_ok and "not running" not in answer.words:
                raise StepFailed(f"the model could not be unloaded: {answer.words}")
        await self._wait_for(mine, {"unloaded", "failed"}, min(call.timeout_s, UNLOAD_TIMEOUT_S))
        if self._released is None:
            # Of more models than the server keeps at once, loading one would drop another.
            self._released = loaded or mine[: self._instances_max or None]
        return succeeded(changed=bool(loaded))

    async def _restore(self, call: StepCall, step: RestoreStep) -> StepResult:
        if ResourceKind.WEIGHTS not in step.kinds:
            return succeeded(changed=False)
        wanted = self._released or ()
        for model in wanted:
            if self._statuses.get(model) == "loaded":
                continue
            answer = await self._http.post("/models/load", {"model": model})
            if not answer.is_ok and "already running" not in answer.words:
                raise StepFailed(f"the model could not be loaded: {answer.words}")
        await self._wait_for(wanted, {"loaded"}, call.timeout_s)
        self._released = None
        return succeeded(changed=bool(wanted), weight_version=self._label)

    async def _wait_for(self, models: tuple[str, ...], goal: AbstractSet[str], timeout_s: float) -> None:

        async def is_there() -> bool:
            try:
                await self._look()
            except IopError:
                # Asked about a model that is just leaving, the router has nobody to ask.
                return False
            told = [self._statuses.get(model) for model in models]
            if "failed" in told and "failed" not in goal:
                raise StepFailed("the engine says that a model failed to load")
            return all(status in goal for status in told)

        try:
            async with asyncio.timeout(timeout_s):
                await self._until(is_there)
        except TimeoutError:
            raise not_verified(f"the engine does not say {' or '.join(sorted(goal))}") from None


def _capabilities(*, can_erase: bool, is_router: bool) -> Capabilities:
    operations = set(GATE_OPERATIONS)
    if can_erase:
        operations.add(AdminOperationKind.FLUSH_CACHES)
    if is_router:
        operations |= {AdminOperationKind.RELEASE_RESOURCES, AdminOperationKind.RESTORE_RESOURCES}
    return Capabilities(
        operations=frozenset(operations),
        pause_modes=GATE_MODES,
        cache_kinds=frozenset({CacheKind.PREFIX}) if can_erase else frozenset(),
        busy_policies=frozenset({BusyPolicy.FAIL, BusyPolicy.WAIT}) if can_erase else frozenset(),
        resource_kinds=frozenset({ResourceKind.WEIGHTS}) if is_router else frozenset(),
        weight_retentions=frozenset({WeightRetention.DISCARD}) if is_router else frozenset(),
    )


def _file_of(arguments: list[str]) -> str:
    """Of a child's command line."""
    for flag, value in pairwise(arguments):
        if flag in {"--model", "-m"}:
            return value
    return ""


def _source_of(files: list[str]) -> DiskSource | None:
    """Where the router itself reads them again."""
    if not files:
        return None
    try:
        path = files[0] if len(files) == 1 else os.path.commonpath(files)
    except ValueError:  # relative ones among absolute ones
        return None
    return DiskSource(path=path, format=WeightFormat.GGUF)


def _label_of(models: Sequence[str], files: Sequence[str]) -> str:
    """Names the models, and their files as they are now where this machine sees them: blocking.

    A file that was replaced makes another label, so that it is never restored as what was released.
    """
    if not models:
        return ""
    marks = []
    for file in files:
        try:
            seen = Path(file).stat()
        except (OSError, ValueError):  # the latter for what is no path
            continue
        marks.append(f"{file}:{seen.st_size}:{seen.st_mtime_ns}")
    name = models[0] if len(models) == 1 else f"{models[0]}+{len(models) - 1}"
    mark = hashlib.sha256("\n".join(marks).encode()).hexdigest()[:12]
    return f"{name[:100]}@{mark}" if marks else name[:100]


def _is_not_loaded(answer: EngineAnswer) -> bool:
    return answer.status == 400 and "not loaded" in answer.words


def _busy(slots: list[_Slot] | None) -> int | None:
    return None if slots is None else sum(slot.is_processing for slot in slots)


def _requests(metrics: bytes) -> tuple[int | None, int | None]:
    """How many have a slot, and how many wait for one, without a limit; `None` where it does not tell."""
    told = {match[1]: int(match[2]) for match in _REQUESTS.finditer(metrics)}
    return told.get(b"processing"), told.get(b"deferred")


def _cache(result: CacheOutcome, detail: str) -> CacheResult:
    return CacheResult(participant_id=ENGINE, kind=CacheKind.PREFIX, outcome=result, detail=detail)
