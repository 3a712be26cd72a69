"""What every role that listens needs: clear words for an address that cannot be had, ids, the journal's place."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from iop.admin.permissions import Permission, require
from iop.api.grpc.auth import Credentials, PrincipalDirectory
from iop.config.values import Address, StoreUrl
from iop.core.errors import Unavailable

__all__ = ["binding", "id_maker", "process_owner", "store_url", "viewer_check"]

_REASONS = {
    errno.EADDRINUSE: "another process has that address",
    errno.EADDRNOTAVAIL: "this machine has no such address",
    errno.EACCES: "this user may not use that port",
}


@contextlib.contextmanager
def binding(name: str, address: Address) -> Iterator[None]:
    """Turn what goes wrong while a listener binds into one message that names listener, address and way out.

    Raises:
        Unavailable: ADDRESS_UNAVAILABLE.
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or "it cannot be bound")
        raise _unavailable(name, address, reason) from error
    except Unavailable as error:
        # Listeners that bind by themselves say it each in their own words; an operator sees one form.
        if error.reason not in {"ADDRESS_IN_USE", "BIND_FAILED"}:
            raise
        raise _unavailable(
            name, address, "another process has it, or it is no address of this machine"
        ) from error


def _unavailable(name: str, address: Address, reason: str) -> Unavailable:
    return Unavailable(
        f"Cannot listen on {address} ({name}): {reason}. Free it, or choose another, as in --{name} 127.0.0.1:0.",
        reason="ADDRESS_UNAVAILABLE",
        details={"listener": name, "address": str(address)},
    )


def id_maker(prefix: str) -> Callable[[], str]:
    """Ids that are unique over restarts: one random part per process, then a count; cheap enough per request."""
    base = f"{prefix}-{secrets.token_hex(5)}"
    count = itertools.count(1)
    return lambda: f"{base}-{next(count)}"


def process_owner(role: str) -> str:
    """Names this process in the store's lease, for people."""
    return f"{role}@{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


def store_url(store: StoreUrl, *, is_given: bool, home: Callable[[], Path]) -> str:
    """The journal's URL; the default one lies in the state directory."""
    if is_given:
        return store.under(Path.cwd()).url
    return store.under(home()).url


def viewer_check(principals: PrincipalDirectory) -> Callable[[str | None], None]:
    """Guards the ops listener: a bearer token whose principal may read the profile (SF-30)."""

    def check(token: str | None) -> None:
        require(principals.authenticate(Credentials(bearer=token)), Permission.PROFILE)

    return check
