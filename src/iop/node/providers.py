"""The adapters of the config in force, started and stopped as the config changes, whole or not at all
(EN-80, EN-114).

A **provider** is one adapter instance with its gate. It lives in a task of its own: start, probe from time
to time, and when it is replaced or removed, take no new work, wait until the last work has left and close.
Work that runs keeps the instance it was admitted under.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from iop.adapters.base import Adapter, AdapterServices, Health
from iop.core.errors import IopError
from iop.node.gate import LocalGate
from iop.wire.messages import AdapterConfig, AdapterStatus, NodeConfig

_log = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 15.0
"""How often a healthy engine is asked how it is. Requests tell sooner when it is not."""

PROBE_RETRY_S: Final = 2.0
"""How often an engine that is not well is asked, so that it is used again soon after it came back."""

FIRST_PROBE_S: Final = 3.0
"""How long ready waits for the first probes, so that it can tell models and participants; an engine that
hangs must not keep the whole Node from being ready."""

AdapterMaker = Callable[[AdapterConfig, AdapterServices], Adapter]


class Provider:
    """One adapter instance and its gate.

    Attributes:
        failure: why it is broken; empty while it is not.
        is_frozen: a KEEP pause holds its engine: cancels wait for the safe point (SF-07).
    """

    def __init__(self, config: AdapterConfig, adapter: Adapter) -> None:
        self.config = config
        self.adapter = adapter
        self.gate = LocalGate(capacity=config.capacity, long_capacity=config.long_context_capacity)
        self.failure = ""
        self.is_retiring = False
        self.is_frozen = False
        self.first_probe_done = asyncio.Event()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def name(self) -> str:
        """Stable identity on this Node (EN-85)."""
        return provider_name(self.config)

    def enter(self, *, is_long: bool, is_side: bool = False) -> bool:
        """Take a place at the gate; False: full, or going."""
        if self.is_retiring:
            return False
        if not (self.gate.enter_side() if is_side else self.gate.enter(is_long=is_long)):
            return False
        self._idle.clear()
        return True

    def leave(self, *, is_long: bool, is_side: bool = False) -> None:
        """Give a place back."""
        if is_side:
            self.gate.leave_side()
        else:
            self.gate.leave(is_long=is_long)
        if self.gate.is_empty:
            self._idle.set()

    def reconfigure(self, config: AdapterConfig) -> None:
        """Take new capacities; nothing else differs."""
        self.config = config
        self.gate.resize(capacity=config.capacity, long_capacity=config.long_context_capacity)

    def retire(self) -> None:
        """Take no new work; close when the last has left."""
        self.is_retiring = True
        self._stop.set()

    async def wait_started(self) -> None:
        """Wait for the adapter's start. Raises what it raised."""
        await asyncio.shield(self._started)

    async def run(self) -> None:
        """Start, probe, and after :meth:`retire` drain and close. Raises nothing but CancelledError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._serve(tasks)
        except* IopError as group:
            self._fail(group.exceptions[0])
        except* Exception as group:  # noqa: BLE001 - a broken adapter must not take the others with it
            _log.exception("adapter.failed adapter=%s", self.name)
            self._fail(group.exceptions[0])

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        try:
            await self.adapter.start(tasks)
            if not self._started.done():
                self._started.set_result(None)
            probing = tasks.create_task(self._probe(), name=f"adapter.{self.name}.probe")
            await self._stop.wait()
            await self._idle.wait()
            probing.cancel()
        finally:
            await self.adapter.aclose()

    def look_again(self) -> None:
        """Something about the engine changed: probe it sooner."""
        self._changed.set()

    async def _probe(self) -> None:
        while True:
            await self.adapter.probe()
            self._changed.clear()
            self.first_probe_done.set()
            is_well = self.adapter.snapshot().health is Health.READY
            try:
                async with asyncio.timeout(PROBE_INTERVAL_S if is_well else PROBE_RETRY_S):
                    await self._changed.wait()
                # Requests that fail by the hundred are still one reason to look.
                await asyncio.sleep(PROBE_RETRY_S)
            except TimeoutError:
                pass

    def _fail(self, error: BaseException) -> None:
        self.failure = error.message if isinstance(error, IopError) else "internal error"
        self.is_retiring = True
        self.first_probe_done.set()
        if not self._started.done():
            self._started.set_exception(error)
            # Whoever waits reads it; when nobody does, the status tells it.
            self._started.exception()


class ConfigRefusedError(Exception):
    """A config that was not applied; the one before is in force.

    Attributes:
        statuses: what became of each adapter of the refused config.
    """

    def __init__(self, statuses: tuple[AdapterStatus, ...]) -> None:
        super().__init__("; ".join(status.reason for status in statuses if status.reason))
        self.statuses = statuses


class ProviderSet:
    """All providers of the config in force.

    Args:
        make: makes an adapter from its config.
        services: given to every adapter.
        tasks: owns the providers' tasks; outlives connections.
    """

    def __init__(self, make: AdapterMaker, services: AdapterServices, tasks: asyncio.TaskGroup) -> None:
        self._make = make
        self._services = services
        self._tasks = tasks
        self._providers: dict[str, Provider] = {}
        self._retiring: set[Provider] = set()
        self._provider_tasks: dict[Provider, asyncio.Task[None]] = {}
        self._statuses: tuple[AdapterStatus, ...] = ()
        self._config = NodeConfig(config_revision=0)
        self._lock = asyncio.Lock()

    @property
    def config(self) -> NodeConfig:
        """The config in force."""
        return self._config

    @property
    def statuses(self) -> tuple[AdapterStatus, ...]:
        """What became of each of its adapters."""
        return self._statuses

    @property
    def providers(self) -> Mapping[str, Provider]:
        """By name; those that started."""
        return self._providers

    def get(self, name: str) -> Provider | None:
        """The provider that takes work under this name."""
        provider = self._providers.get(name)
        return provider if provider is not None and not provider.failure else None

    async def apply(self, config: NodeConfig, *, is_whole: bool) -> tuple[AdapterStatus, ...]:
        """Make ``config`` the one in force. Calls are carried out one after the other.

        Unchanged adapters go on untouched; a changed capacity only moves the gate; everything else is a new
        instance, and the old one ends when its last work has left.

        Args:
            config: the new snapshot.
            is_whole: refuse it if any adapter cannot start (a refresh, EN-80); otherwise run what starts
                (EN-12).

        Raises:
            ConfigRefusedError: nothing was changed.
        Cancellation: safe; nothing is changed then.
        """
        async with self._lock:
            kept, fresh, statuses = await self._start_fresh(config)
            failed = [status for status in statuses if not status.started and status.reason != _DISABLED]
            if is_whole and failed:
                for provider in fresh.values():
                    self._retire(provider)
                raise ConfigRefusedError(tuple(statuses))
            by_name = {provider_name(adapter): adapter for adapter in config.adapters}
            before = self._providers
            for name, provider in kept.items():
                provider.reconfigure(by_name[name])
            self._providers = {**kept, **fresh}
            for name, provider in before.items():
                if self._providers.get(name) is not provider:
                    self._retire(provider)
            self._config = config
            self._statuses = tuple(statuses)
            return self._statuses

    async def aclose(self, *, within_s: float) -> None:
        """Close every adapter, at the latest after ``within_s``, whatever still runs. Idempotent."""
        for provider in tuple(self._providers.values()):
            self._retire(provider)
        self._providers = {}
        running = [task for task in self._provider_tasks.values() if not task.done()]
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=within_s)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=within_s + 1.0)

    async def _start_fresh(
        self, config: NodeConfig
    ) -> tuple[dict[str, Provider], dict[str, Provider], list[AdapterStatus]]:
        """Find what can stay, start what is new. Changes nothing that serves."""
        kept: dict[str, Provider] = {}
        fresh: dict[str, Provider] = {}
        reasons: dict[str, str] = {}
        try:
            for adapter_config in config.adapters:
                name = provider_name(adapter_config)
                current = self._providers.get(name)
                if name in kept or name in fresh or name in reasons:
                    reasons[name] = f"adapter {name!r} is named twice"
                elif not adapter_config.enabled:
                    reasons[name] = _DISABLED
                elif (
                    current is not None
                    and not current.failure
                    and _same_engine(current.config, adapter_config)
                ):
                    kept[name] = current
                else:
                    try:
                        fresh[name] = self._launch(adapter_config)
                    except IopError as exc:
                        reasons[name] = exc.message
            for name, provider in tuple(fresh.items()):
                try:
                    await provider.wait_started()
                except Exception:  # noqa: BLE001 - logged by the provider; the status tells it
                    reasons[name] = provider.failure
                    del fresh[name]
            await self._first_probes(fresh)
        except asyncio.CancelledError:
            for provider in fresh.values():
                self._retire(provider)
            raise
        return (
            kept,
            fresh,
            [
                AdapterStatus(name=name, started=name not in reasons, reason=reasons.get(name, ""))
                for name in dict.fromkeys(map(provider_name, config.adapters))
            ],
        )

    @staticmethod
    async def _first_probes(fresh: Mapping[str, Provider]) -> None:
        try:
            async with asyncio.timeout(FIRST_PROBE_S):
                for provider in fresh.values():
                    await provider.first_probe_done.wait()
        except TimeoutError:
            _log.warning("adapter.probe_slow after_s=%s", FIRST_PROBE_S)

    def _launch(self, config: AdapterConfig) -> Provider:
        # The adapter is made before its provider exists; what it tells until then is found by the first
        # probe.
        holder: list[Provider] = []

        def on_change() -> None:
            for each in holder:
                each.look_again()
            self._services.on_change()

        provider = Provider(config, self._make(config, replace(self._services, on_change=on_change)))
        holder.append(provider)
        task = self._tasks.create_task(provider.run(), name=f"adapter.{provider.name}")
        self._provider_tasks[provider] = task
        task.add_done_callback(lambda _: self._forget(provider))
        return provider

    def _retire(self, provider: Provider) -> None:
        provider.retire()
        if provider in self._provider_tasks:
            self._retiring.add(provider)

    def _forget(self, provider: Provider) -> None:
        self._provider_tasks.pop(provider, None)
        self._retiring.discard(provider)
        self._services.on_change()


_DISABLED: Final = "disabled"


def provider_name(config: AdapterConfig) -> str:
    """The instance's name; empty means the single legacy instance named by its type (EN-85)."""
    return config.name or config.type


def _same_engine(old: AdapterConfig, new: AdapterConfig) -> bool:
    """Whether only figures differ that the gate or the Edge enforce."""
    return old == replace(
        new,
        capacity=old.capacity,
        long_context_capacity=old.long_context_capacity,
    )
