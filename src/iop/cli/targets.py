"""Which server a command talks to, and as whom: flags, else what ``iop up`` or ``iop engine`` wrote."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from iop.app.home import ENGINE_FILE, RUN_FILE, RunFile, read_run_file, state_dir
from iop.config.values import parse_address
from iop.core.errors import InvalidRequest

__all__ = ["Endpoint", "find_endpoint", "running"]

DEFAULT_ADDRESSES: Final = {"admin": "127.0.0.1:9091", "ops": "127.0.0.1:9092"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An address and the credential for it; None: send none."""

    address: str
    token: str | None = field(default=None, repr=False)


def running() -> RunFile | None:
    """What runs here according to the state directory, if anything does."""
    home = state_dir(os.environ)
    return read_run_file(home / RUN_FILE) or read_run_file(home / ENGINE_FILE)


def find_endpoint(listener: str, *, target: str | None, token: str | None, role: str) -> Endpoint:
    """Where to send a call.

    Args:
        listener: ``admin`` or ``ops``.
        target: what ``--target`` said; else the address that runs here; else the default one.
        token: what ``--token`` said: ``none``, ``file:PATH``, ``env:NAME``, or a role whose development token to use.
        role: whose development token is used without ``--token``.

    Raises:
        InvalidRequest: ``target`` is no address; the token is no reference, leads nowhere, or names a development
            token that is not here. The command line is wrong then, whatever the server would say.
    """
    run = running()
    known = run.addresses.get(listener) if run is not None else None
    address = _checked(target) if target is not None else known or DEFAULT_ADDRESSES[listener]
    if token is not None:
        return Endpoint(address=address, token=_resolve(token, run))
    # A development token goes only where it belongs: to what runs here.
    is_ours = run is not None and address in {known, run.engine.get(listener)}
    return Endpoint(address=address, token=run.tokens.get(role) if run is not None and is_ours else None)


def _checked(target: str) -> str:
    """An empty one counts as wrong: a script whose variable is not set must not reach what happens to run here."""
    try:
        address = parse_address(target)
        if address.path is None and address.port == 0:
            raise ValueError("Give the port that the server listens on")
    except ValueError as error:
        raise InvalidRequest(
            f"--target {target!r} is no address: {error}.", reason="TARGET_ADDRESS"
        ) from None
    return target


def _resolve(reference: str, run: RunFile | None) -> str | None:
    if reference == "none":
        return None
    if reference in {"viewer", "operator", "admin"}:
        token = run.tokens.get(reference) if run is not None else None
        if token is None:
            raise InvalidRequest(
                f"There is no development token {reference} here: iop up makes one.", reason="NO_TOKEN"
            )
        return token
    kind, _, name = reference.partition(":")
    if kind == "env" and name:
        token = os.environ.get(name)
        if not token:
            raise InvalidRequest(f"The environment variable {name} of --token is not set.", reason="NO_TOKEN")
        return _printable(token, reference)
    if kind == "file" and name:
        try:
            return _printable(Path(name).read_text(encoding="utf-8"), reference)
        except (OSError, UnicodeDecodeError):
            raise InvalidRequest(f"The file {name} of --token cannot be read.", reason="NO_TOKEN") from None
    raise InvalidRequest(
        "A token is given by reference, since command lines show in process lists: "
        "--token file:PATH, env:NAME, none, or viewer, operator or admin for the development tokens.",
        reason="TOKEN_REFERENCE",
    )


def _printable(text: str, reference: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise InvalidRequest(
            f"{reference} of --token leads to an empty or unprintable value; put one line of text there.",
            reason="NO_TOKEN",
        )
    return token
