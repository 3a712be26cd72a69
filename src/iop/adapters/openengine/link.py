"""What an engine's admin listener tells, and the channels to it: the profile, read anew before each step, where the
weights in force can be read again, and which process of the engine that is.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from iop.adapters.base import AdapterServices
from iop.adapters.openengine.admin_rpc import AdminRpc
from iop.adapters.openengine.channel import bearer, check_authority, connect, error_of, open_channel
from iop.admin.profile import AdminProfile
from iop.admin.requests import DiskSource
from iop.core.errors import (
    InvalidRequest,
    IopError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from iop.core.ids import ParticipantId
from iop.pb.openengine.v1 import openengine_pb2_grpc, server_pb2
from iop.wire.messages import OpenEngineSettings

_log = logging.getLogger(__name__)


class AdminLink:
    """The admin listener of one engine.

    Args:
        settings: where the engine's listeners are, and the token for the admin one.
        services: the Node's change signal.
        on_restart: called when another process of the engine answers.
        on_look: asks what else belongs to a look; what it raises, the look raises.

    Attributes:
        profile: as last read; `None` before.
        instance: of the engine's process; empty where its own listener is not named.
        sources: by model, a weight version and where it can be read again.
        failure: why the listener does not answer; empty while it does.

    Raises:
        InvalidRequest: an authority that is not PEM.
    """

    def __init__(
        self,
        settings: OpenEngineSettings,
        services: AdapterServices,
        *,
        on_restart: Callable[[], None],
        on_look: Callable[[AdminRpc], Awaitable[None]],
    ) -> None:
        check_authority(settings.tls_ca_pem)
        self._settings = settings
        self._services = services
        self._on_restart = on_restart
        self._on_look = on_look
        self._channel: grpc.aio.Channel | None = None
        self._core_channel: grpc.aio.Channel | None = None
        self._rpc: AdminRpc | None = None
        self.profile: AdminProfile | None = None
        self.instance = ""
        self.failure = "the engine's admin listener was not asked yet"
        self.sources: dict[str, tuple[str, DiskSource]] = {}
        self._sources_asked: object = None
        self._ill: dict[ParticipantId, str] = {}

    def start(self) -> None:
        """Open the channels; they connect when first used."""
        self._channel = open_channel(self._settings.admin_target, ca_pem=self._settings.tls_ca_pem)
        self._rpc = AdminRpc(self._channel, self._settings.admin_token)
        if self._settings.target:
            self._core_channel = open_channel(self._settings.target, ca_pem=self._settings.tls_ca_pem)

    async def aclose(self) -> None:
        """Close the channels; mutations go on at the engine."""
        self._rpc = None
        for channel in (self._channel, self._core_channel):
            if channel is not None:
                await channel.close(None)
        self._channel = self._core_channel = None

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self._rpc is not None

    def rpc(self) -> AdminRpc:
        """For calls. Raises Unavailable when it is closed."""
        if self._rpc is None:
            raise Unavailable("the adapter is closed", reason="CLOSED")
        return self._rpc

    async def refresh(self) -> AdminProfile:
        """Read instance and profile; what another process of the engine told is forgotten."""
        if self._core_channel is not None:
            instance = await self._read_instance(self._core_channel)
            if instance != self.instance:
                _log.info("engine.instance_changed")
                self.instance = instance
                self._services.on_change()
                self._on_restart()
        before = self.profile
        self.profile = await self.rpc().profile()
        self._note_quarantine(self.profile)
        await self._learn_sources(self.profile)
        await self._on_look(self.rpc())
        if self.failure or before is None or self.profile.participants != before.participants:
            self.failure = ""
            self._services.on_change()
        return self.profile

    def _note_quarantine(self, profile: AdminProfile) -> None:
        """Say once why the engine itself lets some of its ranks take no inference; only it knows (AD-31)."""
        ill = {
            each.info.participant_id: each.quarantine_reason
            for each in profile.participants
            if each.quarantined
        }
        if ill != self._ill:
            for participant, reason in ill.items():
                _log.warning("engine.quarantined participant=%s reason=%s", participant, reason[:512])
            self._ill = ill

    async def _learn_sources(self, profile: AdminProfile) -> None:
        """Ask where the weights in force can be read again, once for each state of them; not every server tells."""
        state = (self.instance, profile.weights, tuple(each.weight_version for each in profile.participants))
        if state == self._sources_asked:
            return
        try:
            sources = await self.rpc().weight_sources()
        except (Unsupported, PermissionDenied, NotFound, InvalidRequest):
            sources = {}
        except IopError:
            return  # asked again with the next look
        self._sources_asked = state
        if sources != self.sources:
            self.sources = sources
            self._services.on_change()

    async def _read_instance(self, channel: grpc.aio.Channel) -> str:
        await connect(channel)
        stub: Any = openengine_pb2_grpc.ControlStub(channel)
        try:
            info = await stub.GetServerInfo(
                server_pb2.GetServerInfoRequest(), metadata=bearer(self._settings.api_key), timeout=5.0
            )
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from exc
        return str(info.instance_id)

    def note_failure(self, error: IopError) -> None:
        """Say once why it does not answer, and where that is mended."""
        words = error.message
        if isinstance(error, Unauthenticated | PermissionDenied):
            # It is mended elsewhere than where it shows, so say where.
            words = (
                f"the engine's admin server refuses the credential: {words}. Set admin.token of this adapter in the"
                " Edge's config to a token of a principal of that server with role admin"
            )
        if words != self.failure:
            _log.warning("engine_admin.unreachable reason=%s", words)
            self.failure = words
            if self.profile is not None:
                self._services.on_change()
