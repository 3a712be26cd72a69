"""Options of the commands that ask an ops listener, and the client that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from iop.cli.targets import find_endpoint
from iop.core.errors import InvalidRequest

if TYPE_CHECKING:
    from iop.client.ops import OpsClient

__all__ = ["OpsCa", "OpsCertificate", "OpsKey", "OpsTarget", "OpsToken", "ops_client"]

OpsTarget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="HOST:PORT", help="The Edge's ops listener; else the one that runs here."
    ),
]
OpsToken: TypeAlias = Annotated[
    str | None,
    typer.Option("--token", metavar="REF", help="file:PATH, env:NAME, none, or viewer|operator|admin."),
]
OpsCa: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        help="Authorities of the ops listener, PEM; turns TLS on.",
    ),
]
OpsCertificate: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-cert", help="Our certificate, PEM, for mutual TLS."),
]
OpsKey: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-key", help="Its private key, PEM, if in another file."),
]


def ops_client(
    target: str | None,
    token: str | None,
    *,
    role: str,
    ca: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> OpsClient:
    """The client for an ops listener.

    Args:
        role: whose development token is used without ``--token``.

    Raises:
        InvalidRequest: as `find_endpoint`; or a certificate of ours for a server that is not known by any authority.
    """
    from iop.client.ops import OpsClient, OpsTarget, OpsTls

    endpoint = find_endpoint("ops", target=target, token=token, role=role)
    if ca is None and (certificate is not None or key is not None):
        raise InvalidRequest("--tls-cert needs --tls-ca: whom to trust on the other side.", reason="NO_CA")
    tls = OpsTls(ca=ca, certificate=certificate, key=key) if ca is not None else None
    return OpsClient(OpsTarget(address=endpoint.address, token=endpoint.token, tls=tls))
