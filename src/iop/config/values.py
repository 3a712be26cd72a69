"""Values that config keys hold: addresses and secrets."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["HIDDEN", "Address", "Secret", "SecretHash", "StoreUrl", "parse_address"]

HIDDEN: Final = "***"
"""How every secret prints."""

_UNIX: Final = "unix:"
_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104  (compared with, never bound)
_HOST: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen or to dial: ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``.

    Port 0 means any free one. For a Unix socket ``path`` is set and ``host`` is empty.
    """

    host: str = ""
    port: int = 0
    path: Path | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def overlaps(self, other: Address) -> bool:
        """Whether two listeners could not both have these addresses. Any-free-port never overlaps."""
        if self.path is not None or other.path is not None:
            return self.path == other.path
        if self.port != other.port or self.port == 0:
            return False
        return self.host == other.host or bool(_WILDCARDS & {self.host, other.host})


def parse_address(text: str) -> Address:
    """Read ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``.

    Raises:
        ValueError: with what to write instead.
    """
    if text.startswith(_UNIX):
        if len(text) == len(_UNIX):
            raise ValueError("Write unix:PATH")
        return Address(path=Path(text[len(_UNIX) :]))
    host, separator, port_text = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError("Write [IPV6]:PORT, as in [::1]:8080") from None
    elif not separator or _HOST.fullmatch(host) is None:
        raise ValueError("Write HOST:PORT, as in 127.0.0.1:8080")
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and int(port_text) <= 65535):
        raise ValueError("Give a port from 0 (any free one) to 65535")
    return Address(host=host, port=int(port_text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A secret that must be known in clear, because it is presented to somebody. Prints as ``***``.

    ``reference`` is how the config named it (``file:...`` or ``env:...``); the value is only in ``reveal()``.
    """

    reference: str
    _value: str = field(repr=False)

    def reveal(self) -> str:
        """The secret itself. Never log it, never put it into an error."""
        return self._value

    def __str__(self) -> str:
        return HIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretHash:
    """SHA-256 of a secret that others present to us. Prints as ``***``."""

    digest: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: str) -> SecretHash:
        """Hash a secret that is known in clear."""
        return cls(digest=hashlib.sha256(secret.encode()).digest())

    @property
    def reference(self) -> str:
        """The form that a config file may hold."""
        return f"sha256:{self.digest.hex()}"

    def matches(self, presented: str) -> bool:
        """Compare in constant time (EN-104, AD-04, SF-11)."""
        return hmac.compare_digest(self.digest, hashlib.sha256(presented.encode()).digest())

    def __str__(self) -> str:
        return HIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """Where the journal lives: ``sqlite:///PATH`` or ``postgresql://...``. Prints without its password."""

    url: str = field(repr=False)

    @property
    def sqlite_path(self) -> Path | None:
        """The file of an SQLite store; None for PostgreSQL."""
        return Path(self.url.removeprefix("sqlite:///")) if self.url.startswith("sqlite:///") else None

    def under(self, directory: Path) -> StoreUrl:
        """The same store with a relative SQLite path counted from ``directory``."""
        path = self.sqlite_path
        return self if path is None else StoreUrl(url=f"sqlite:///{directory / path}")

    def __str__(self) -> str:
        return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", rf"\1:{HIDDEN}@", self.url)
