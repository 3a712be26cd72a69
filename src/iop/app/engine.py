"""The composition root of the reference engine."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from iop.admin.core import AdminCore
from iop.api.grpc.auth import ApiKeyDirectory
from iop.api.grpc.engine_port import EnginePort
from iop.api.grpc.listeners import admin_listener, admin_receive_bytes_max, inference_listener
from iop.api.http.engine import EngineHttp
from iop.api.http.limits import HttpLimits
from iop.api.http.server import HttpServer
from iop.app.addresses import binding
from iop.app.development import ROLES
from iop.app.grpc_listeners import grpc_settings
from iop.app.home import ENGINE_FILE, RunFile, open_home, write_private
from iop.app.listening import id_maker, operation_ids, process_owner, running_core, store_url
from iop.app.process import Process, ProcessClock, Role
from iop.app.sources import gather
from iop.app.translate import principal_directory
from iop.config import EngineConfig, Loaded, load_engine
from iop.config.tree import AdminSection, PrincipalEntry
from iop.config.values import Address, SecretHash
from iop.core.errors import InvalidRequest, NotFound, Unavailable
from iop.engine import CHECKPOINTS, Engine, EngineSettings, builtin_checkpoint
from iop.engine.participants import RankDriver
from iop.store.journal import SqlJournal

__all__ = ["engine_role"]

STOP_GRACE_S: Final = 5.0
"""How long answers that run may go on once the engine was asked to stop."""


def engine_role(
    file: Path | None,
    *,
    flags: Mapping[str, tuple[str, str]],
    warn: Callable[[str], None],
    has_run_file: bool,
) -> Role:
    """Read engine.yaml, if there is one, and make the role.

    Args:
        file: the config; None: defaults and flags.
        flags: by dotted key.
        warn: told what is allowed and yet worth a line.
        has_run_file: whether to write ``engine.json`` into the state directory.

    Raises:
        ConfigInvalid: with every problem.
    """
    loaded = load_engine(gather(file, flags=flags))
    for warning in loaded.warnings:
        warn(warning)

    async def role(process: Process) -> int:
        async with AsyncExitStack() as stack:
            served = _Served(loaded)
            await served.start(stack)
            if has_run_file:
                path = open_home(os.environ) / ENGINE_FILE
                write_private(path, served.run_file().to_json(with_tokens=True))
                stack.callback(path.unlink, missing_ok=True)
            process.announce(served.facts())
            await served.serve_until(process.stopping)
        return 0

    return role


class _Served:
    """One engine with its listeners."""

    def __init__(self, loaded: Loaded[EngineConfig]) -> None:
        config = loaded.config
        self._tokens: dict[str, str] = {}
        if config.admin is None:
            self._tokens = {role: f"iop-{role}-{secrets.token_urlsafe(24)}" for role in ROLES}
            config = dataclasses.replace(config, admin=_development(self._tokens))
        self._config = config
        self._loaded = loaded
        self._clock = ProcessClock()
        self._addresses: dict[str, str] = {}
        self._http: HttpServer | None = None
        self._checkpoint = config.checkpoint or builtin_checkpoint(CHECKPOINTS[0])
        self._engine = Engine(
            EngineSettings(
                checkpoint=self._checkpoint,
                model_id=config.model_id,
                ranks=config.ranks,
                slots=config.slots,
            )
        )
        self._port = EnginePort(self._engine, clock=self._clock)

    def facts(self) -> dict[str, Any]:
        """What programs may know: addresses, model, slots."""
        info = self._engine.info
        return {"pid": os.getpid(), **self._addresses, "model": info.model_id, "slots": info.slots}

    def run_file(self) -> RunFile:
        """The content of engine.json."""
        return RunFile(addresses=self._addresses, pids={"engine": os.getpid()}, tokens=self._tokens)

    async def start(self, stack: AsyncExitStack) -> None:
        """Load the weights, bring the journal's gates into force, then listen.

        Raises:
            InvalidRequest: the checkpoint is absent, damaged, or does not fit the ranks.
            Unavailable: a rank, an address or the store cannot be had.
        """
        await self._start_engine(stack)
        driver = RankDriver(self._engine, checkpoint=self._checkpoint.absolute())
        core = self._make_core(driver)
        await stack.enter_async_context(running_core(core))
        await self._serve_admin(stack, core, driver)
        await self._serve_openengine(stack)
        await self._serve_http(stack)

    async def serve_until(self, stopping: asyncio.Event) -> None:
        """Serve until asked to stop.

        Raises:
            Unavailable: the engine failed.
        """
        async with asyncio.TaskGroup() as tasks:
            failing = tasks.create_task(self._engine.wait_failed(), name="engine-failed")
            asked = tasks.create_task(stopping.wait(), name="engine-stop")
            await asyncio.wait((failing, asked), return_when=asyncio.FIRST_COMPLETED)
            for task in (failing, asked):
                task.cancel()
        # A signal to the whole group ends the ranks too; then stopping is what was asked, not a failure.
        if not stopping.is_set() and failing.done() and not failing.cancelled():
            raise Unavailable(f"The engine failed: {failing.result()}", reason="ENGINE_FAILED")
        if self._http is not None:
            await self._http.aclose(drain_s=STOP_GRACE_S)

    async def _start_engine(self, stack: AsyncExitStack) -> None:
        try:
            await stack.enter_async_context(self._engine)
        except (NotFound, InvalidRequest) as error:
            raise InvalidRequest(
                f"Cannot load the checkpoint {self._checkpoint}: {error.message} Give --checkpoint a directory"
                " with config.json, tokenizer.json and model.safetensors, or leave it out.",
                reason=error.reason,
                details=error.details,
            ) from error

    def _make_core(self, driver: RankDriver) -> AdminCore:
        url = store_url(
            self._config.store,
            is_given="store" in self._loaded.origins,
            home=lambda: open_home(os.environ),
        )
        return AdminCore(
            journal=SqlJournal(url, unix_nanos=self._clock.unix_nanos),
            driver=driver,
            clock=self._clock,
            new_id=operation_ids(),
            owner=process_owner("engine"),
        )

    async def _serve_admin(self, stack: AsyncExitStack, core: AdminCore, driver: RankDriver) -> None:
        address = self._config.listen.admin
        if address is None:
            return
        assert self._config.admin is not None, "made above where the config has none"
        listener = admin_listener(
            core,
            principal_directory(self._config.admin),
            grpc_settings(
                address,
                tls=self._config.tls.admin,
                insecure=self._config.insecure,
                receive_bytes_max=admin_receive_bytes_max(core.limits),
            ),
            control=self._port,
            read_artifact=driver.read_artifact,
            weight_sources=core.weight_sources,
        )
        with binding("admin", address):
            await stack.enter_async_context(listener.serving())
        self._addresses["admin"] = listener.address

    async def _serve_openengine(self, stack: AsyncExitStack) -> None:
        address = self._config.listen.openengine
        if address is None:
            return
        listener = inference_listener(
            self._port,
            self._port,
            ApiKeyDirectory(),
            grpc_settings(address, tls=None, insecure=self._config.insecure),
            admin_profile_revision=1 if self._config.listen.admin is not None else None,
        )
        with binding("openengine", address):
            await stack.enter_async_context(listener.serving())
        self._addresses["openengine"] = listener.address

    async def _serve_http(self, stack: AsyncExitStack) -> None:
        address = self._config.listen.http
        if address is None:
            return
        limits = HttpLimits()
        self._http = HttpServer(
            EngineHttp(self._engine, limits=limits, clock=self._clock, make_id=id_maker("gen")),
            limits=limits,
            clock=self._clock,
        )
        await stack.enter_async_context(self._http)
        with binding("http", address):
            host, port = await self._http.listen(address.host, address.port)
        self._addresses["http"] = str(Address(host=host, port=port))


def _development(tokens: Mapping[str, str]) -> AdminSection:
    """Principals for tokens that were made for this run."""
    return AdminSection(
        principals=tuple(
            PrincipalEntry(name=role, token=SecretHash.of(tokens[role]), role=role) for role in ROLES
        )
    )
