"""How gRPC listeners listen. Apart from the other translations, which processes without gRPC use."""

from __future__ import annotations

import dataclasses

from iop.api.grpc.server import ListenerSettings
from iop.api.grpc.tls import tls_from_files
from iop.config.tree import ListenerTls
from iop.config.values import Address

__all__ = ["grpc_settings"]


def grpc_settings(
    address: Address, *, tls: ListenerTls | None, insecure: bool, receive_bytes_max: int | None = None
) -> ListenerSettings:
    """How a gRPC listener listens. Raises InvalidRequest when a certificate file cannot be read."""
    material = None if tls is None else tls_from_files(tls.cert, tls.key, tls.client_ca)
    settings = ListenerSettings(address=str(address), tls=material, is_insecure_allowed=insecure)
    if receive_bytes_max is None:
        return settings
    return dataclasses.replace(settings, receive_bytes_max=receive_bytes_max)
