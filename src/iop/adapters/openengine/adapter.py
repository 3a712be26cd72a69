"""The adapter for engines that speak OpenEngine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from iop.adapters.base import (
    AdapterCapabilities,
    AdapterServices,
    AdapterSnapshot,
    Category,
    EngineControl,
    Health,
    RunStream,
    TunnelStream,
)
from iop.adapters.controlled import Controlled
from iop.adapters.gate_control import GateControl
from iop.adapters.http_tunnel import refuse_tunnel
from iop.adapters.openengine.channel import bearer, check_authority, connect, error_of, open_channel
from iop.adapters.openengine.model_facts import facts_of_info
from iop.adapters.openengine.ranks import ranks_of
from iop.adapters.openengine.runs import GenerateRun
from iop.core.errors import InvalidRequest, IopError
from iop.pb.openengine.v1 import lifecycle_pb2, model_pb2, openengine_pb2_grpc, server_pb2
from iop.wire.messages import (
    AdapterConfig,
    OpenEngineSettings,
    RunEvent,
    RunEventType,
    StreamError,
    StreamErrorCode,
)

PROBE_TIMEOUT_S: Final = 5.0
"""Each question of a probe is answered from memory."""

TARGETS_MAX: Final = 16
"""Most models that one probe asks about; each costs two small calls."""

INFO_BYTES_MAX: Final = 16 * 1024
"""Largest ModelInfo that is passed on to the Edge; real ones have some hundred bytes."""

NO_ADMIN: Final = "name the `admin` listener of the engine in the adapter's config"
"""What it takes for more than a pause at the gate."""

_NO_SUCH_MODEL: Final = frozenset(
    {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED}
)

_WORST_FIRST: Final = (
    Health.NOT_READY,
    Health.DRAINING,
    Health.UNKNOWN,
    Health.DEGRADED,
    Health.READY,
)

_HEALTH: Final = {
    lifecycle_pb2.HEALTH_STATE_READY: Health.READY,
    lifecycle_pb2.HEALTH_STATE_DEGRADED: Health.DEGRADED,
    lifecycle_pb2.HEALTH_STATE_DRAINING: Health.DRAINING,
    lifecycle_pb2.HEALTH_STATE_STARTING: Health.NOT_READY,
    lifecycle_pb2.HEALTH_STATE_NOT_READY: Health.NOT_READY,
}


class OpenEngineAdapter(Controlled):
    """One OpenEngine engine.

    Args:
        config: its adapter config; settings name the Inference and Control listener.
        services: the Node's change signal.
        control: the engine's OpenEngineAdmin, when the config names one; without it the gate of this adapter is all
            there is.

    Raises:
        InvalidRequest: the config cannot work; names key and fix.
    """

    def __init__(
        self, config: AdapterConfig, services: AdapterServices, *, control: EngineControl | None = None
    ) -> None:
        settings = config.settings
        if not isinstance(settings, OpenEngineSettings) or not settings.target:
            raise InvalidRequest(
                f"adapter {config.name!r}: type openengine needs `openengine: HOST:PORT`", reason="NO_TARGET"
            )
        check_authority(settings.tls_ca_pem)
        self._settings = settings
        if control is None:
            control = GateControl(services, name="an OpenEngine server", why_no_more=NO_ADMIN)
        super().__init__(config, services, control)
        self._runs: set[GenerateRun] = set()
        self._channel: grpc.aio.Channel | None = None
        self._models: tuple[str, ...] = ()
        self._engine_version = ""
        self._in_flight: int | None = None
        self._queued: int | None = None
        self._infos: dict[str, model_pb2.ModelInfo] = {}
        self._ranks: dict[str, frozenset[int]] = {}
        self._seen_version = ""

    @property
    def in_flight(self) -> int:
        """Runs of which something is left at the engine."""
        return len(self._runs)

    def cancel_all(self) -> None:
        """Cancel the calls of all runs; each ends as cancelled."""
        for run in tuple(self._runs):
            run.cancel()

    @property
    def capabilities(self) -> AdapterCapabilities:
        """Runs; admin by the gate, or as the engine's admin listener has it."""
        return AdapterCapabilities(
            kind=self._config.type,
            category=Category.LOCAL_INFERENCE,
            runs=True,
            admin=True,
            admin_refusal=self._refusal,
        )

    def snapshot(self) -> AdapterSnapshot:
        """From the last probe and the runs since."""
        return AdapterSnapshot(
            health=self._health,
            reason=self._reason,
            models=self._models,
            weight_version=self._control.weight_version() if self._own_gate is None else self._seen_version,
            engine_version=self._engine_version,
            engine_in_flight=self._in_flight,
            engine_queued=self._queued,
            model_infos={target: info.SerializeToString() for target, info in self._infos.items()},
            data_parallel_ranks=self._ranks,
            model_facts={target: facts_of_info(info) for target, info in self._infos.items()},
        )

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Open the channels; they connect when first used."""
        self._channel = open_channel(self._settings.target, ca_pem=self._settings.tls_ca_pem)
        await self._control.start(tasks)

    async def aclose(self) -> None:
        """Close the channels; calls under way end as cancelled."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)
        await self._control.aclose()

    async def probe(self) -> None:
        """Ask for identity, models, health and load."""
        try:
            await self._ask()
        except IopError as exc:
            self._observe(Health.OFFLINE, exc.message)
        await self._control.probe()

    def open_tunnel(self, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """Not offered: these engines speak gRPC."""
        refuse_tunnel(
            stream, StreamErrorCode.INVALID_REQUEST, "providers of type openengine serve runs, not tunnels"
        )
        on_done()

    async def run(self, stream: RunStream) -> None:
        """One Generate call (EN-40). Nothing passes a closed gate."""
        if self._is_gated:
            error = StreamError(
                code=StreamErrorCode.BUSY, message="the engine is paused", retryable=True, before_start=True
            )
            stream.emit(RunEvent(type=RunEventType.ERROR, error=error))
            return
        if self._channel is None:
            error = StreamError(
                code=StreamErrorCode.CONNECT_FAILED,
                message="the adapter is closed",
                retryable=True,
                before_start=True,
            )
            stream.emit(RunEvent(type=RunEventType.ERROR, error=error))
            return
        info = self._infos.get(stream.request.target) or self._infos.get("") or model_pb2.ModelInfo()
        run = GenerateRun(
            stream,
            self._channel,
            api_key=self._settings.api_key,
            formats=frozenset(info.tokenizer_modes),
            takes_priority=info.generation.supports_priority,
        )
        self._runs.add(run)
        try:
            await run.drive()
        finally:
            self._runs.discard(run)
        if run.weight_version and run.weight_version != self._seen_version:
            self._seen_version = run.weight_version
            self._services.on_change()
        if run.reached_engine is False:
            self._observe(Health.OFFLINE, "the engine cannot be reached")
        elif run.refusal == "no_capacity":
            # Another Edge, with nobody behind it: the next probe, which this brings near, says when that is over.
            self._observe(Health.NOT_READY, "no provider is available behind it")
        elif run.reached_engine and self._health is Health.OFFLINE:
            self._observe(Health.READY, "")

    async def _ask(self) -> None:
        channel = self._channel
        if channel is None:
            return
        await connect(channel)
        stub: Any = openengine_pb2_grpc.ControlStub(channel)
        metadata = bearer(self._settings.api_key)
        try:
            info = await stub.GetServerInfo(
                server_pb2.GetServerInfoRequest(), metadata=metadata, timeout=PROBE_TIMEOUT_S
            )
            load = await stub.GetLoad(server_pb2.GetLoadRequest(), metadata=metadata, timeout=PROBE_TIMEOUT_S)
            infos = {target: await self._ask_model(stub, metadata, target) for target in self._targets}
            healths = [await self._ask_health(stub, metadata, target) for target in self._targets]
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from exc
        self._models = tuple(name[:256] for name in info.supported_models[:1024])
        self._engine_version = f"{info.engine_name} {info.engine_version}"[:128].strip()
        self._in_flight = load.running_requests if load.HasField("running_requests") else None
        self._queued = load.queued_requests if load.HasField("queued_requests") else None
        known = {target: told for target, told in infos.items() if told is not None}
        ranks = {target: ranks_of(info, told) for target, told in infos.items()}
        for told in known.values():
            told.ClearField("extra")
        if (known, ranks) != (self._infos, self._ranks):
            self._infos, self._ranks = known, ranks
            self._services.on_change()
        self._observe(*_together(healths))

    @property
    def _targets(self) -> tuple[str, ...]:
        """The models that are asked of; for none in particular the engine's only one."""
        return self._config.targets[:TARGETS_MAX] or ("",)

    @staticmethod
    async def _ask_model(
        stub: Any, metadata: tuple[tuple[str, str], ...], target: str
    ) -> model_pb2.ModelInfo | None:
        """What the engine says of a model; None where it says nothing, or too much to be passed on."""
        try:
            info: model_pb2.ModelInfo = await stub.GetModelInfo(
                model_pb2.GetModelInfoRequest(model=target), metadata=metadata, timeout=PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as exc:
            if exc.code() in _NO_SUCH_MODEL:
                return None
            raise
        return info if info.ByteSize() <= INFO_BYTES_MAX else None

    @staticmethod
    async def _ask_health(
        stub: Any, metadata: tuple[tuple[str, str], ...], target: str
    ) -> tuple[Health, str]:
        """How the engine is for a model, in our words."""
        try:
            told = await stub.Health(
                lifecycle_pb2.HealthRequest(model=target), metadata=metadata, timeout=PROBE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as exc:
            if target and exc.code() in _NO_SUCH_MODEL:
                return Health.NOT_READY, f"the engine serves no model {target[:64]!r}"
            raise
        words = next((check.message for check in told.checks if check.message), "")
        return _HEALTH.get(told.state, Health.UNKNOWN), words[:256]


def _together(each: Sequence[tuple[Health, str]]) -> tuple[Health, str]:
    """One health for all models: the worst, or degraded where some are well and some are not."""
    worst = min(each, key=lambda told: _WORST_FIRST.index(told[0]))
    is_some_well = any(health in {Health.READY, Health.DEGRADED} for health, _ in each)
    if is_some_well and worst[0] is not Health.READY:
        return Health.DEGRADED, worst[1]
    return worst
