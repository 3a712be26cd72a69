"""The two listeners of a server: administration, and inference; never one for both (AD-02, AD-06)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import grpc

from iop.admin.permissions import Permission, Principal
from iop.admin.profile import AdminLimits
from iop.api.grpc.admin_service import ADMIN_METHODS, ADMIN_SERVICE, AdminOperations, AdminService, audit_name
from iop.api.grpc.artifact_service import (
    ARTIFACT_METHODS,
    ARTIFACT_SERVICE,
    READ,
    ArtifactService,
    ReadArtifact,
)
from iop.api.grpc.auth import ApiCaller, ApiKeyDirectory, PrincipalDirectory
from iop.api.grpc.control_service import CONTROL_METHODS, CONTROL_SERVICE, ControlService, WeightSources
from iop.api.grpc.health import HEALTH_SERVICE
from iop.api.grpc.inference_service import (
    INFERENCE_SERVICE,
    AdmitKey,
    InferenceService,
    NoteRefusal,
    no_limits,
    no_note,
)
from iop.api.grpc.interceptors import AuthInterceptor, ErrorInterceptor, authorize_by_table
from iop.api.grpc.ports import ControlPort, InferencePort
from iop.api.grpc.server import REFLECTION_SERVICE, GrpcListener, GrpcService, ListenerSettings
from iop.api.strangers import Strangers
from iop.core.errors import IopError
from iop.core.limits import MIB
from iop.pb.iop import artifacts_pb2, artifacts_pb2_grpc
from iop.pb.openengine.v1 import admin_pb2, admin_pb2_grpc, openengine_pb2, openengine_pb2_grpc

__all__ = ["admin_listener", "admin_receive_bytes_max", "inference_listener"]

HEALTH_METHODS: Final = f"/{HEALTH_SERVICE}/"
REFLECTION_METHOD: Final = f"/{REFLECTION_SERVICE}/ServerReflectionInfo"


ADMIN_PROFILE_REVISION: Final = 1
"""What GetServerInfo tells of OpenEngineAdmin: the revision of its profile (AD-50)."""

OnEnded: TypeAlias = Callable[[str, str, float], None]


def admin_receive_bytes_max(limits: AdminLimits) -> int:
    """The receive limit of an admin listener: the tensors of one update and room for their frame (AD-104)."""
    return limits.max_inline_tensor_bytes + MIB


def admin_listener(
    operations: AdminOperations,
    principals: PrincipalDirectory,
    settings: ListenerSettings,
    *,
    control: ControlPort | None = None,
    read_artifact: ReadArtifact | None = None,
    weight_sources: WeightSources | None = None,
    on_ended: OnEnded | None = None,
) -> GrpcListener:
    """OpenEngineAdmin with its health and reflection.

    Health answers without credential; reflection needs what a viewer has (AD-03).

    Args:
        operations: the operation core.
        principals: who may do what.
        settings: where to listen; raise its receive limit to `admin_receive_bytes_max`.
        control: serve Control here too, under permissions of its own: the privileged calls live here (AD-103).
        read_artifact: hand out the files that profiles leave, too (AD-46).
        weight_sources: let Control tell where the weights in force can be read again, so that whoever operates this
            server can put them back (AD-32).
        on_ended: told of each call's method, status and seconds; see `iop.api.grpc.rpc_metrics`.
    """
    admin_service = AdminService(operations)

    def register_admin(server: grpc.aio.Server) -> None:
        admin_pb2_grpc.add_OpenEngineAdminServicer_to_server(admin_service, server)

    services = [
        GrpcService(
            name=ADMIN_SERVICE,
            file=admin_pb2.DESCRIPTOR,
            register=register_admin,
            is_serving=lambda: operations.is_serving,
        )
    ]
    if control is not None:
        services.append(_privileged_control(operations, control, weight_sources))
    if read_artifact is not None:
        services.append(_artifacts(operations, read_artifact))

    async def audit_refusal(principal: Principal, method: str, error: IopError) -> None:
        await operations.audit(principal, audit_name(method), outcome=error.reason)

    permissions = {
        **ADMIN_METHODS,
        **CONTROL_METHODS,
        **ARTIFACT_METHODS,
        REFLECTION_METHOD: Permission.PROFILE,
    }
    return GrpcListener(
        services,
        interceptors=(
            ErrorInterceptor(on_ended=on_ended),
            AuthInterceptor(
                authenticator=principals,
                authorize=authorize_by_table(permissions),
                public=frozenset({HEALTH_METHODS}),
                on_refused=audit_refusal,
            ),
        ),
        settings=settings,
    )


def _artifacts(operations: AdminOperations, read: ReadArtifact) -> GrpcService:
    async def audit(principal: Principal, outcome: str) -> None:
        await operations.audit(principal, READ, outcome=outcome)

    service = ArtifactService(read, audit)

    def register(server: grpc.aio.Server) -> None:
        artifacts_pb2_grpc.add_ArtifactsServicer_to_server(service, server)

    return GrpcService(
        name=ARTIFACT_SERVICE,
        file=artifacts_pb2.DESCRIPTOR,
        register=register,
        is_serving=lambda: operations.is_serving,
    )


def _privileged_control(
    operations: AdminOperations, control: ControlPort, weight_sources: WeightSources | None
) -> GrpcService:
    async def audit(principal: Principal, rpc: str, outcome: str) -> None:
        await operations.audit(principal, audit_name(rpc), outcome=outcome)

    service = ControlService(
        control,
        admin_profile_revision=ADMIN_PROFILE_REVISION,
        is_privileged_allowed=True,
        audit=audit,
        weight_sources=weight_sources,
    )

    def register(server: grpc.aio.Server) -> None:
        openengine_pb2_grpc.add_ControlServicer_to_server(service, server)

    return GrpcService(
        name=CONTROL_SERVICE,
        file=openengine_pb2.DESCRIPTOR,
        register=register,
        is_serving=lambda: operations.is_serving,
    )


def inference_listener(
    inference: InferencePort,
    control: ControlPort,
    keys: ApiKeyDirectory,
    settings: ListenerSettings,
    *,
    admin_profile_revision: int | None = ADMIN_PROFILE_REVISION,
    is_privileged_allowed: bool = False,
    admit: AdmitKey = no_limits,
    on_refused: NoteRefusal = no_note,
    on_ended: OnEnded | None = None,
    strangers: Strangers | None = None,
) -> GrpcListener:
    """Inference and Control with their health and reflection.

    Args:
        inference: who generates.
        control: who tells about the server; often the same object.
        keys: without any, everybody is let in.
        settings: where to listen.
        admin_profile_revision: told by GetServerInfo where an admin listener exists too; None: there is none (AD-50).
        is_privileged_allowed: allow the privileged Control calls here (AD-103).
        admit: the limits of API keys, which Generate counts against (SF-11).
        on_refused: hears of generations that never came to `inference`, for whoever explains requests (EN-112).
        on_ended: told of each call's method, status and seconds; see `iop.api.grpc.rpc_metrics`.
        strangers: how often an address may come without a key that is known; None: as often as it likes.
    """
    inference_service = InferenceService(inference, control, admit=admit, on_refused=on_refused)
    control_service = ControlService(
        control, admin_profile_revision=admin_profile_revision, is_privileged_allowed=is_privileged_allowed
    )

    def register_inference(server: grpc.aio.Server) -> None:
        openengine_pb2_grpc.add_InferenceServicer_to_server(inference_service, server)

    def register_control(server: grpc.aio.Server) -> None:
        openengine_pb2_grpc.add_ControlServicer_to_server(control_service, server)

    services = [
        GrpcService(
            name=name,
            file=openengine_pb2.DESCRIPTOR,
            register=register,
            is_serving=lambda: inference.is_serving,
        )
        for name, register in (
            (INFERENCE_SERVICE, register_inference),
            (CONTROL_SERVICE, register_control),
        )
    ]
    return GrpcListener(
        services,
        interceptors=(
            ErrorInterceptor(on_ended=on_ended),
            AuthInterceptor(
                authenticator=keys,
                authorize=_any_caller,
                # The schema is public; so is whether the server is there.
                public=frozenset({HEALTH_METHODS, REFLECTION_METHOD}),
                strangers=strangers,
            ),
        ),
        settings=settings,
    )


def _any_caller(caller: ApiCaller, method: str) -> None:
    """A known key may call everything on the public listener; models and privileges are judged by the handlers."""
