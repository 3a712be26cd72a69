"""The composition root of the Edge.

Start: the operation core brings pauses, releases and quarantines into force from the journal (AD-26), then
Nodes may come, then the public listeners open. Stop: the other way about, with the surfaces up until
running requests have ended (EN-109). SIGHUP reads the config again and takes it whole or not at all
(EN-114).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from iop.admin.core import AdminCore, CoreTiming
from iop.admin.permissions import Principal
from iop.api.grpc.auth import ApiKeyDirectory, Credentials, PrincipalDirectory
from iop.api.grpc.edge_port import EdgePort
from iop.api.grpc.rpc_metrics import RpcMetrics
from iop.api.http.keys import ApiKeys
from iop.api.http.matrix import SurfaceMatrix
from iop.api.http.metrics import HttpCollector
from iop.api.http.models import StatusWithSurfaces
from iop.api.http.openai import EdgeHttp
from iop.api.http.ops import OpsServer, ops_app
from iop.api.http.server import HttpServer
from iop.api.http.tls import RenewedTls
from iop.api.strangers import Strangers
from iop.app.addresses import binding
from iop.app.edge_reload import ConfigKeeper
from iop.app.edge_snapshot import snapshot_of
from iop.app.home import open_home
from iop.app.listening import id_maker, operation_ids, process_owner, running_core, store_url, viewer_check
from iop.app.ops_config import config_routes
from iop.app.ops_sessions import session_routes
from iop.app.process import Process, ProcessClock, Role
from iop.app.tracing import tracer_of
from iop.app.translate import api_keys, file_tls, http_keys, http_limits, principal_directory
from iop.config import EdgeConfig
from iop.config.values import Address
from iop.core.ids import RunId
from iop.edge.artifacts import SCHEME
from iop.edge.edge import Edge
from iop.edge.metrics import EdgeCollector
from iop.net.admin_steps import AdminStepCodec
from iop.net.listener import Listener
from iop.obs.metrics import Metrics
from iop.obs.tracing import Tracer
from iop.store.journal import SqlJournal
from iop.wire.session import SessionSettings

__all__ = ["edge_role"]

_log = logging.getLogger(__name__)


def edge_role(file: Path, *, flags: Mapping[str, tuple[str, str]], warn: Callable[[str], None]) -> Role:
    """Read edge.yaml and make the role.

    Raises:
        ConfigInvalid: with every problem.
    """
    keeper = ConfigKeeper(file, flags=flags)
    for warning in keeper.loaded.warnings:
        warn(warning)

    async def role(process: Process) -> int:
        async with AsyncExitStack() as stack:
            tracer = stack.enter_context(tracer_of(keeper.loaded.config.tracing, process="edge"))
            served = _Served(keeper, tracer)
            await served.start(stack)
            process.announce(served.facts())
            await process.stopping.wait()
            await served.edge.shut_down(deadline_s=keeper.loaded.config.dispatch.shutdown_grace_sec)
        return 0

    return role


class _Served:
    """One Edge with its listeners."""

    def __init__(self, keeper: ConfigKeeper, tracer: Tracer | None) -> None:
        self._keeper = keeper
        loaded = keeper.loaded
        config = self._config = loaded.config
        self._clock = ProcessClock()
        self._addresses: dict[str, str] = {}
        self._keys = self._make_keys(config)
        self._principals: PrincipalDirectory = principal_directory(config.admin)
        self._callers: ApiKeyDirectory = api_keys(config.api_keys)
        self._strangers = Strangers(config.limits.strangers_per_minute, now=self._clock.monotonic)
        self._metrics = Metrics()
        self._rpc_metrics = RpcMetrics(self._metrics)
        instance = secrets.token_hex(8)
        self.edge = Edge(
            snapshot_of(config, revision=keeper.revision, now_unix_s=int(time.time())),
            clock=self._clock,
            codec=AdminStepCodec(),
            new_run_id=_run_ids(),
            tracer=tracer,
            instance=instance,
        )
        self._core = AdminCore(
            journal=SqlJournal(
                store_url(
                    config.store,
                    is_given="store" in loaded.origins,
                    home=lambda: open_home(os.environ),
                ),
                unix_nanos=self._clock.unix_nanos,
            ),
            driver=self.edge.participants,
            clock=self._clock,
            new_id=operation_ids(),
            owner=process_owner("edge"),
            timing=CoreTiming.of(
                participant_lost_s=config.admin.participant_lost_sec,
                read_back_period_s=config.admin.readback_sec,
            ),
        )
        self.edge.participants.attach(self._core.participants_changed)
        keeper.attach(self._take)
        self._port = EdgePort(
            self.edge.dispatcher,
            find_snapshot=lambda: self.edge.snapshot,
            clock=self._clock,
            instance_id=instance,
            find_report=self.edge.nodes.probed,
        )

    def facts(self) -> dict[str, Any]:
        """What programs may know: the addresses really bound."""
        return {"pid": os.getpid(), **self._addresses}

    async def start(self, stack: AsyncExitStack) -> None:
        """Start everything; leaving ``stack`` stops it in reverse.

        Raises:
            Unavailable: an address or the store cannot be had.
        """
        await stack.enter_async_context(self.edge)
        await stack.enter_async_context(running_core(self._core))
        await self._serve_nodes(stack)
        await self._serve_admin(stack)
        await self._serve_ops(stack)
        await self._serve_openengine(stack)
        await self._serve_http(stack)
        self._heed_reload(stack)

    # --- listeners
    # ----------------------------------------------------------------------------------------------------

    async def _serve_nodes(self, stack: AsyncExitStack) -> None:
        config = self._config
        address = config.listen.nodes
        if address is None:
            return
        listener = Listener(
            handler=self.edge.nodes,
            host=address.host,
            port=address.port,
            settings=SessionSettings(
                heartbeat_interval_s=config.heartbeat.interval_sec,
                heartbeat_timeout_s=config.heartbeat.timeout_sec,
                handshake_timeout_s=config.wire.handshake_timeout_sec,
                ready_timeout_s=config.wire.ready_timeout_sec,
                stream_window_bytes=config.wire.window_bytes,
                frame_bytes_max=config.wire.frame_bytes,
                body_bytes_max=config.limits.body_bytes,
            ),
            tls=file_tls(config.tls.nodes),
            is_insecure_allowed=config.insecure,
            connections_max=config.wire.connections,
            unix_nanos=self._clock.unix_nanos,
        )
        with binding("nodes", address):
            await stack.enter_async_context(listener)
        self._bound("nodes", Address(host=address.host, port=listener.port))

    async def _serve_admin(self, stack: AsyncExitStack) -> None:
        address = self._config.listen.admin
        if address is None:
            return
        from iop.api.grpc.listeners import admin_listener, admin_receive_bytes_max
        from iop.app.grpc_listeners import grpc_settings

        listener = admin_listener(
            self._core,
            self._principals,
            grpc_settings(
                address,
                tls=self._config.tls.admin,
                insecure=self._config.insecure,
                receive_bytes_max=admin_receive_bytes_max(self._core.limits),
            ),
            control=self._port,
            read_artifact=self._read_artifact,
            on_ended=self._rpc_metrics.on_ended,
        )
        with binding("admin", address):
            await stack.enter_async_context(listener.serving())
        self._addresses["admin"] = listener.address

    async def _serve_openengine(self, stack: AsyncExitStack) -> None:
        address = self._config.listen.openengine
        if address is None:
            return
        from iop.api.grpc.listeners import inference_listener
        from iop.app.grpc_listeners import grpc_settings

        listener = inference_listener(
            self._port,
            self._port,
            self._callers,
            grpc_settings(address, tls=self._config.tls.openengine, insecure=self._config.insecure),
            admin_profile_revision=1 if self._config.listen.admin is not None else None,
            admit=self._admit,
            on_refused=self._port.note_refused,
            on_ended=self._rpc_metrics.on_ended,
            strangers=self._strangers,
        )
        with binding("openengine", address):
            await stack.enter_async_context(listener.serving())
        self._addresses["openengine"] = listener.address

    async def _read_artifact(self, uri: str) -> AsyncIterator[bytes]:
        """A profile's file; what an Edge before this one named is asked for again first (AD-46)."""
        artifacts = self.edge.artifacts
        if not artifacts.is_known(uri):
            await self._core.name_artifact_again(SCHEME + uri.removeprefix(SCHEME))
        async for data in artifacts.read(uri):
            yield data

    async def _serve_ops(self, stack: AsyncExitStack) -> None:
        address = self._config.listen.ops
        if address is None:
            return
        metrics = self._metrics
        metrics.registry.register(EdgeCollector(self.edge))
        tls = self._config.tls.ops
        server = OpsServer(
            ops_app(
                source=StatusWithSurfaces(
                    self.edge.status,
                    find_snapshot=lambda: self.edge.snapshot,
                    matrix=SurfaceMatrix(self.edge.nodes.probed, limits=http_limits(self._config.limits)),
                ),
                render_metrics=metrics.render,
                metrics_type=metrics.content_type,
                authorize=viewer_check(self._principals),
                is_ready=self._is_ready,
                read_artifact=self._read_artifact,
                more_routes=[
                    *config_routes(self._keeper, self._authenticate, find_overrides=self._core.overrides),
                    *session_routes(self.edge.nodes.terminate_session, self._authenticate),
                ],
            ),
            host=address.host,
            port=address.port,
            tls_cert=str(tls.cert) if tls is not None else None,
            tls_key=str(tls.key) if tls is not None else None,
            tls_client_ca=str(tls.client_ca) if tls is not None and tls.client_ca is not None else None,
        )
        with binding("ops", address):
            await stack.enter_async_context(server)
        self._bound("ops", Address(host=address.host, port=server.port))

    async def _serve_http(self, stack: AsyncExitStack) -> None:
        address = self._config.listen.http
        if address is None:
            return
        limits = http_limits(self._config.limits)
        tls = file_tls(self._config.tls.http)
        surface = EdgeHttp(
            self.edge.dispatcher,
            find_snapshot=lambda: self.edge.snapshot,
            find_keys=lambda: self._keys,
            limits=limits,
            clock=self._clock,
            make_id=id_maker("req"),
            find_report=self.edge.nodes.probed,
            strangers=self._strangers,
        )
        server = HttpServer(
            surface,
            limits=limits,
            clock=self._clock,
            tls=RenewedTls(tls) if tls is not None else None,
        )
        self._metrics.registry.register(HttpCollector(surface, server))
        await stack.enter_async_context(server)
        with binding("http", address):
            host, port = await server.listen(address.host, address.port)
        self._bound("http", Address(host=host, port=port))

    def _bound(self, name: str, address: Address) -> None:
        self._addresses[name] = str(address)
        _log.info("listener.opened", extra={"listener": name, "address": str(address)})

    def _authenticate(self, token: str | None) -> Principal:
        return self._principals.authenticate(Credentials(bearer=token))

    def _is_ready(self) -> tuple[bool, str]:
        if not self._core.is_serving:
            return False, "the operation journal cannot be written"
        return True, ""

    # --- reload -------------------------------------------------------------------------------------------
    # ------------

    def _heed_reload(self, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._keeper.reload)
        stack.callback(loop.remove_signal_handler, signal.SIGHUP)

    def _take(self, config: EdgeConfig, revision: int) -> None:
        """Make a valid config the running one in one turn; what listeners were made with stays until a
        restart.

        Raises:
            InvalidRequest: it cannot be taken; nothing was changed.
        """
        self.edge.apply_snapshot(snapshot_of(config, revision=revision, now_unix_s=int(time.time())))
        self._keys = self._make_keys(config)
        self._callers.replace(api_keys(config.api_keys).grants)
        self._principals.replace(principal_directory(config.admin).grants)

    def _admit(self, key: str) -> Callable[[], None]:
        """Count a generation against the limits of its API key, the same that HTTP counts against (SF-11)."""
        return self._keys.admit(key)

    def _make_keys(self, config: EdgeConfig) -> ApiKeys:
        return http_keys(
            config.api_keys,
            buffered_bytes=http_limits(config.limits).key_buffered_bytes,
            now=self._clock.monotonic,
        )


def _run_ids() -> Callable[[], RunId]:
    make = id_maker("run")
    return lambda: RunId(make())
