"""Small translations from the settings trees to what listeners take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iop.admin.permissions import PRESETS, Permission
from iop.api.grpc.auth import ApiKeyDirectory, ApiKeyGrant, PrincipalDirectory, PrincipalGrant
from iop.api.http.keys import ApiKeys, ApiKeySpec
from iop.api.http.limits import HttpLimits
from iop.config.tree import AdminSection, ApiKey, Limits, ListenerTls
from iop.net.tls import ServerTls

__all__ = ["api_keys", "file_tls", "http_keys", "http_limits", "principal_directory"]


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


def file_tls(tls: ListenerTls | None) -> ServerTls | None:
    """TLS files of a listener that is not gRPC."""
    if tls is None:
        return None
    return ServerTls(certificate=tls.cert, key=tls.key, client_ca=tls.client_ca)


def http_keys(keys: Sequence[ApiKey], *, buffered_bytes: int, now: Callable[[], float]) -> ApiKeys:
    """The callers of the public HTTP listener (SF-11, SF-16)."""
    specs = [
        ApiKeySpec(
            name=key.name,
            sha256=key.key.digest,
            models=frozenset(key.models),
            requests_per_minute=key.requests_per_minute,
            concurrent=key.concurrent,
            may_session="session" in key.may,
            may_priority="priority" in key.may,
        )
        for key in keys
    ]
    return ApiKeys(specs, buffered_bytes=buffered_bytes, now=now)


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
