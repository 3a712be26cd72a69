"""Small translations from the settings trees to what listeners take."""

from __future__ import annotations

from collections.abc import Sequence

from iop.admin.permissions import PRESETS, Permission
from iop.api.grpc.auth import ApiKeyDirectory, ApiKeyGrant, PrincipalDirectory, PrincipalGrant
from iop.api.grpc.server import ListenerSettings, ServerTls
from iop.api.http.limits import HttpLimits
from iop.app.edge_snapshot import read_file
from iop.config.tree import AdminSection, ApiKey, Limits, ListenerTls
from iop.config.values import Address

__all__ = ["api_keys", "grpc_settings", "http_limits", "principal_directory"]


def principal_directory(section: AdminSection) -> PrincipalDirectory:
    """The principals of an admin listener (AD-03, AD-04)."""
    return PrincipalDirectory(
        [
            PrincipalGrant(
                name=entry.name,
                permissions=(
                    PRESETS[entry.role]
                    if entry.role is not None
                    else frozenset(Permission(name) for name in entry.permissions)
                ),
                token_sha256=entry.token.digest if entry.token is not None else None,
                mtls_san=entry.mtls_san,
            )
            for entry in section.principals
        ]
    )


def api_keys(keys: Sequence[ApiKey]) -> ApiKeyDirectory:
    """The callers of a public listener (SF-11)."""
    return ApiKeyDirectory(
        [
            ApiKeyGrant(
                name=key.name,
                key_sha256=key.key.digest,
                models=frozenset(key.models) if key.models else None,
                may=frozenset(key.may),
            )
            for key in keys
        ]
    )


def grpc_settings(
    address: Address, *, tls: ListenerTls | None, insecure: bool, receive_bytes_max: int | None = None
) -> ListenerSettings:
    """How a gRPC listener listens. Raises InvalidRequest when a certificate file cannot be read."""
    server_tls = None
    if tls is not None:
        server_tls = ServerTls(
            certificate=read_file(tls.cert, "tls cert"),
            key=read_file(tls.key, "tls key"),
            client_ca=read_file(tls.client_ca, "tls client_ca") if tls.client_ca is not None else None,
        )
    settings = ListenerSettings(address=str(address), tls=server_tls, is_insecure_allowed=insecure)
    if receive_bytes_max is None:
        return settings
    return ListenerSettings(
        address=settings.address,
        tls=server_tls,
        is_insecure_allowed=insecure,
        receive_bytes_max=receive_bytes_max,
    )


def http_limits(limits: Limits) -> HttpLimits:
    """The limits of a public HTTP listener (SF-12)."""
    return HttpLimits(
        body_bytes=limits.body_bytes,
        buffered_bytes=limits.buffered_bytes,
        header_bytes=limits.header_bytes,
        json_depth=limits.json_depth,
        connections=limits.connections,
        sse_event_bytes=limits.sse_event_bytes,
        first_byte_timeout_s=limits.first_byte_timeout_sec,
        total_timeout_s=limits.total_timeout_sec,
    )
