"""Options of the commands that ask an ops listener, and the client that they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from iop.cli.common_options import CommonOptions, with_options
from iop.cli.targets import find_endpoint
from iop.core.errors import InvalidRequest

if TYPE_CHECKING:
    from iop.client.ops import OpsClient

__all__ = ["OpsCall", "asks_ops", "ops_client"]

_Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Target: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="HOST:PORT", help="The Edge's ops listener; else the one that runs here."
    ),
]
_Token: TypeAlias = Annotated[
    str | None,
    typer.Option("--token", metavar="REF", help="file:PATH, env:NAME, none, or viewer|operator|admin."),
]
_Ca: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-ca", help="Authorities of the ops listener, PEM; turns TLS on."),
]
_Certificate: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-cert", help="Our certificate, PEM, for mutual TLS."),
]
_Key: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-key", help="Its private key, PEM, if in another file."),
]

_OPTIONS: Final[CommonOptions] = {
    "as_json": (_Json, False),
    "target": (_Target, None),
    "token": (_Token, None),
    "ca": (_Ca, None),
    "certificate": (_Certificate, None),
    "key": (_Key, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsCall:
    """What the options of a command that asks an ops listener said."""

    client: OpsClient
    as_json: bool


def asks_ops(*, role: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a verb ``(call, ...)``: as a command it has its own options and those for the listener that it asks.

    Args:
        role: whose development token is used without ``--token``.
    """

    def command_of(verb: Callable[..., None]) -> Callable[..., None]:
        def run(own: dict[str, Any], common: dict[str, Any]) -> None:
            as_json = common.pop("as_json")
            client = ops_client(**common, role=role)
            verb(OpsCall(client=client, as_json=as_json), **own)

        return with_options(_OPTIONS, verb, run)

    return command_of


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
