"""``iop admin profile-fetch``: a profile's files, from the server that named them, each held to its digest (AD-46)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from mimetypes import guess_extension
from pathlib import Path
from typing import Annotated

import typer

from iop.admin.results import ProfileArtifact, StopProfileResult
from iop.cli.admin_call import Call, query
from iop.cli.ops_options import ops_client
from iop.cli.output import data, print_json
from iop.core.errors import InvalidRequest, RemoteProtocolError

__all__ = ["register", "save"]

SCHEME = "iop-artifact:"


def register(app: typer.Typer) -> None:
    """Add the verb to `iop admin`."""
    query(app, "profile-fetch", role="viewer")(profile_fetch)


async def profile_fetch(
    call: Call,
    operation: Annotated[str, typer.Argument(help="The operation of profile-stop; its answer names it.")],
    out: Annotated[
        Path, typer.Option("--out", help="Directory for the files; made if it is not there.")
    ] = Path(),
    ops: Annotated[
        str | None,
        typer.Option(
            "--ops",
            metavar="HOST:PORT",
            help="Fetch from an Edge's ops listener; else from the admin server itself.",
        ),
    ] = None,
    ops_token: Annotated[
        str | None,
        typer.Option("--ops-token", metavar="REF", help="With --ops: file:PATH, env:NAME, none, or a role."),
    ] = None,
    ops_tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--ops-tls-ca",
            help="With --ops: authorities of the ops listener, PEM; turns TLS on.",
        ),
    ] = None,
) -> None:
    """Fetch the files of a stopped profile, and check each one's digest.

    From an Edge they come by way of the Nodes, from an engine's own admin server straight.

    Example: iop admin profile-fetch op-4f2a --out profiles
    """
    shown = await call.client.get(operation)
    if not isinstance(shown.result, StopProfileResult):
        raise InvalidRequest(
            f"{operation} is no profile-stop that succeeded: give the operation that profile-stop named.",
            reason="NO_ARTIFACTS",
        )
    read = call.client.artifact if ops is None else _over_ops(ops, ops_token, ops_tls_ca)
    out.mkdir(parents=True, exist_ok=True)
    saved = []
    for artifact in shown.result.artifacts:
        path = await save(artifact, read(artifact.uri), out)
        saved.append({"file": str(path), "bytes": artifact.size_bytes, "sha256": artifact.sha256.hex()})
        if not call.as_json:
            data.print(f"{path}: {artifact.size_bytes} bytes, digest checked")
    if call.as_json:
        print_json({"files": saved})


def _over_ops(ops: str, token: str | None, ca: Path | None) -> Callable[[str], AsyncIterator[bytes]]:
    """The same files by HTTP, where only that listener can be reached."""
    client = ops_client(ops, token, role="viewer", ca=ca)

    async def read(uri: str) -> AsyncIterator[bytes]:
        for chunk in client.artifact(uri.removeprefix(SCHEME)):
            yield chunk

    return read


async def save(artifact: ProfileArtifact, chunks: AsyncIterator[bytes], directory: Path) -> Path:
    """Write one file, whole and right or not at all.

    Raises:
        RemoteProtocolError: it is not what the operation named; nothing is left of it.
    """
    name = f"{artifact.participant_id}.{artifact.kind.name.lower()}"
    # The server chose these words: they must not choose a directory.
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip(".-")
    path = directory / (name + (guess_extension(artifact.media_type) or ".bin"))
    part = path.with_name(path.name + ".part")
    digest, size = sha256(), 0
    try:
        with part.open("wb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > artifact.size_bytes:
                    break
                digest.update(chunk)
                file.write(chunk)
        if size != artifact.size_bytes or digest.digest() != artifact.sha256:
            raise RemoteProtocolError(
                f"What came for {artifact.uri} is not the file that the profile named. Fetch it again.",
                reason="DIGEST_MISMATCH",
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
