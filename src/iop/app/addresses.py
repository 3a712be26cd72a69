"""Clear words for an address that cannot be had."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from iop.config.values import Address
from iop.core.errors import Unavailable

__all__ = ["binding"]

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
