"""Who calls: credentials from the transport, and the directories that know them (AD-03, AD-04, SF-23).

Secrets are stored as SHA-256 and compared in constant time over all entries, so that neither a timing nor the
order of the config tells anything about them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeVar

from iop.admin.permissions import Permission, Principal
from iop.core.errors import Unauthenticated

__all__ = [
    "ApiCaller",
    "ApiKeyDirectory",
    "ApiKeyGrant",
    "Credentials",
    "PrincipalDirectory",
    "PrincipalGrant",
    "read_credentials",
    "secret_sha256",
]

Grant = TypeVar("Grant")

CREDENTIAL_CHARS_MAX: Final = 4096
"""Longer credentials are refused unread: nothing we issue comes near, and hashing is work for a stranger."""


def secret_sha256(secret: str) -> bytes:
    """The stored form of a token or key: 32 bytes."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a caller presented; `bearer` is never shown.

    Attributes:
        bearer: token or key from metadata; None: none was sent.
        names: subject alternative names of a verified client certificate.
        peer: the transport's address of the caller, for logs and the audit.
    """

    bearer: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()
    peer: str = ""


def read_credentials(
    metadata: Iterable[tuple[str, str | bytes]],
    auth_context: Mapping[str, Iterable[bytes]],
    *,
    peer: str,
) -> Credentials:
    """Take the credentials out of one call's transport.

    Raises:
        Unauthenticated: several credentials, or one that is no bearer token.
    """
    presented = [(key, value) for key, value in metadata if key in {"authorization", "x-api-key"} and value]
    if len(presented) > 1:
        _refuse("Send exactly one credential.", "AMBIGUOUS_CREDENTIAL")
    bearer: str | None = None
    if presented:
        key, value = presented[0]
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        if len(text) > CREDENTIAL_CHARS_MAX:
            _refuse("The credential is too long.", "MALFORMED_CREDENTIAL")
        bearer = text if key == "x-api-key" else _bearer_of(text)
    names = tuple(
        name.decode("utf-8", "replace") for name in auth_context.get("x509_subject_alternative_name", ())
    )
    return Credentials(bearer=bearer, names=names, peer=peer)


def _bearer_of(text: str) -> str:
    scheme, _, token = text.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        _refuse("The authorization metadata must be 'Bearer TOKEN'.", "MALFORMED_CREDENTIAL")
    return token.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipalGrant:
    """One principal of the config: how it is known, and what it may do. At least one way must be given.

    Attributes:
        token_sha256: 32 bytes, or None.
        mtls_san: a subject alternative name of its client certificate, or None.
    """

    name: str
    permissions: frozenset[Permission]
    token_sha256: bytes | None = field(default=None, repr=False)
    mtls_san: str | None = None


class PrincipalDirectory:
    """Knows the principals of an admin listener."""

    def __init__(self, grants: Sequence[PrincipalGrant]) -> None:
        self.grants = tuple(grants)

    def replace(self, grants: Sequence[PrincipalGrant]) -> None:
        """Know these from the next call on; a reload of the config (EN-114)."""
        self.grants = tuple(grants)

    def authenticate(self, credentials: Credentials) -> Principal:
        """The principal behind these credentials. A token decides if sent; a certificate counts without one.

        Raises:
            Unauthenticated: NO_CREDENTIAL, or UNKNOWN_CREDENTIAL.
        """
        if credentials.bearer is not None:
            digest = secret_sha256(credentials.bearer)
            found = _find_by_digest(digest, [(grant.token_sha256, grant) for grant in self.grants])
        elif credentials.names:
            found = next((grant for grant in self.grants if grant.mtls_san in credentials.names), None)
        else:
            _refuse("This listener needs a bearer token in the authorization metadata.", "NO_CREDENTIAL")
        if found is None:
            _refuse("The credential is not known here.", "UNKNOWN_CREDENTIAL")
        return Principal(name=found.name, permissions=found.permissions, peer=credentials.peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeyGrant:
    """One API key of the config (SF-11). `models` None: all of them; `may` holds `session`, `priority`."""

    name: str
    key_sha256: bytes = field(repr=False)
    models: frozenset[str] | None = None
    may: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCaller:
    """The caller of a public listener; an empty name where the listener is open to everybody."""

    name: str = ""
    models: frozenset[str] | None = None
    may: frozenset[str] = frozenset({"priority", "session"})
    peer: str = ""

    def may_use(self, model: str) -> bool:
        """Whether the key covers this model."""
        return self.models is None or model in self.models


class ApiKeyDirectory:
    """Knows the API keys of a public listener; without any, everybody is let in (loopback default)."""

    def __init__(self, grants: Sequence[ApiKeyGrant] = ()) -> None:
        self.grants = tuple(grants)

    def replace(self, grants: Sequence[ApiKeyGrant]) -> None:
        """Know these from the next call on; a reload of the config (EN-114)."""
        self.grants = tuple(grants)

    def authenticate(self, credentials: Credentials) -> ApiCaller:
        """The caller behind these credentials.

        Raises:
            Unauthenticated: keys are configured, and none or an unknown one was sent.
        """
        if not self.grants:
            return ApiCaller(peer=credentials.peer)
        if credentials.bearer is None:
            _refuse("This listener needs an API key in the authorization metadata.", "NO_CREDENTIAL")
        digest = secret_sha256(credentials.bearer)
        found = _find_by_digest(digest, [(grant.key_sha256, grant) for grant in self.grants])
        if found is None:
            _refuse("The API key is not known here.", "UNKNOWN_CREDENTIAL")
        return ApiCaller(name=found.name, models=found.models, may=found.may, peer=credentials.peer)


def _find_by_digest(digest: bytes, entries: Sequence[tuple[bytes | None, Grant]]) -> Grant | None:
    """The entry with this digest. Looks at every entry, also after a match."""
    found: Grant | None = None
    for stored, grant in entries:
        if stored is not None and hmac.compare_digest(stored, digest):
            found = grant
    return found


def _refuse(message: str, reason: str) -> NoReturn:
    raise Unauthenticated(message, reason=reason)
