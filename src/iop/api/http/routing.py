"""Which handler a path and a method belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from iop.core.errors import InvalidRequest, NotFound

__all__ = ["Routes"]

R = TypeVar("R")

_ALIAS: Final = {b"HEAD": b"GET"}
"""A HEAD request is answered like GET, without its body."""


class Routes(Generic[R]):
    """Exact paths, and at most one prefix whose rest is an argument."""

    def __init__(
        self, exact: Mapping[tuple[bytes, bytes], R], *, prefix: tuple[bytes, R] | None = None
    ) -> None:
        self._exact = dict(exact)
        self._prefix = prefix
        self._methods: dict[bytes, list[str]] = {}
        for method, path in self._exact:
            self._methods.setdefault(path, []).append(method.decode("ascii"))

    def find(self, method: bytes, path: bytes) -> tuple[R, bytes]:
        """The route, and the rest of the path after its prefix.

        Raises:
            NotFound: nothing is served at this path; the message names what is.
            InvalidRequest: it is served for other methods (reason METHOD_NOT_ALLOWED).
        """
        method = _ALIAS.get(method, method)
        route = self._exact.get((method, path))
        if route is not None:
            return route, b""
        if self._prefix is not None and path.startswith(self._prefix[0]) and len(path) > len(self._prefix[0]):
            if method == b"GET":
                return self._prefix[1], path[len(self._prefix[0]) :]
            raise _not_allowed("GET, HEAD")
        allowed = self._methods.get(path)
        if allowed is None:
            known = ", ".join(sorted(name.decode("ascii") for name in self._methods))
            raise NotFound(f"There is nothing at this path. Served here: {known}.", reason="UNKNOWN_PATH")
        raise _not_allowed(", ".join([*allowed, "HEAD"] if "GET" in allowed else allowed))


def _not_allowed(allow: str) -> InvalidRequest:
    return InvalidRequest(f"This path takes {allow}.", reason="METHOD_NOT_ALLOWED", details={"allow": allow})
