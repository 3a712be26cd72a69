"""The two listeners of a server: administration, and inference; never one for both (AD-02, AD-06)."""

from __future__ import annotations

from typing import Final

import grpc

from iop.admin.permissions import Permission
from iop.admin.profile import AdminLimits
from iop.api.grpc.admin_service import ADMIN_METHODS, ADMIN_SERVICE, AdminOperations, AdminService
from iop.api.grpc.auth import PrincipalDirectory
from iop.api.grpc.health import HEALTH_SERVICE
from iop.api.grpc.interceptors import AuthInterceptor, ErrorInterceptor, authorize_by_table
from iop.api.grpc.server import REFLECTION_SERVICE, GrpcListener, GrpcService, ListenerSettings
from iop.core.limits import MIB
from iop.pb.openengine.v1 import admin_pb2, admin_pb2_grpc

__all__ = ["admin_listener", "admin_receive_bytes_max"]

HEALTH_METHODS: Final = f"/{HEALTH_SERVICE}/"
REFLECTION_METHOD: Final = f"/{REFLECTION_SERVICE}/ServerReflectionInfo"


def admin_receive_bytes_max(limits: AdminLimits) -> int:
    """The receive limit of an admin listener: the tensors of one update and room for their frame (AD-104)."""
    return limits.max_inline_tensor_bytes + MIB


def admin_listener(
    operations: AdminOperations, principals: PrincipalDirectory, settings: ListenerSettings
) -> GrpcListener:
    """OpenEngineAdmin with its health and reflection.

    Health answers without credential; reflection needs what a viewer has (AD-03).
    """
    service = AdminService(operations)

    def register(server: grpc.aio.Server) -> None:
        admin_pb2_grpc.add_OpenEngineAdminServicer_to_server(service, server)

    return GrpcListener(
        [
            GrpcService(
                name=ADMIN_SERVICE,
                file=admin_pb2.DESCRIPTOR,
                register=register,
                is_serving=lambda: operations.is_serving,
            )
        ],
        interceptors=(
            ErrorInterceptor(),
            AuthInterceptor(
                authenticator=principals,
                authorize=authorize_by_table({**ADMIN_METHODS, REFLECTION_METHOD: Permission.PROFILE}),
                public=frozenset({HEALTH_METHODS}),
            ),
        ),
        settings=settings,
    )
