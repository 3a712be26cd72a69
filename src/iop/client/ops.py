"""A small client for the ops listener: health, fleet status, explanations."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx2

from iop.config import ConfigInvalid, Problem
from iop.core.errors import (
    InvalidRequest,
    IopError,
    NotFound,
    PermissionDenied,
    RemoteProtocolError,
    Unauthenticated,
    Unavailable,
)

__all__ = ["OpsClient", "OpsTarget", "OpsTls"]

_BY_STATUS: Final[dict[int, type[IopError]]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsTls:
    """How to know an ops listener that speaks TLS, and what to show it (AD-03).

    Attributes:
        ca: PEM file of the authorities that vouch for it; nobody else does.
        certificate: PEM file of ours, with its chain, for mutual TLS; None: none is shown.
        key: its private key; None: it is in the same file.
    """

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Raises InvalidRequest for files that cannot be read or hold no PEM."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # what ssl raises is one too
            raise InvalidRequest(
                f"TLS cannot be set up from {self.ca} and what goes with it: {error.strerror or error}.",
                reason="TLS_FILES",
            ) from None
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsTarget:
    """Which listener, and with which viewer token; None sends none. Without ``tls``: plain HTTP."""

    address: str
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 10.0
    tls: OpsTls | None = None


class OpsClient:
    """Asks one ops listener. Each call is one request on a connection of its own."""

    def __init__(self, target: OpsTarget) -> None:
        self._target = target

    def status(self, *, with_leases: bool = False) -> dict[str, Any]:
        """The fleet. Raises what the answer's status means, Unavailable when nobody answers."""
        return self._get("/status", {"leases": "true"} if with_leases else {})

    def explain(self, request_id: str) -> dict[str, Any]:
        """One recent request. Raises NotFound."""
        return self._get(f"/explain/{request_id}", {})

    def command(self, node: str, what: str, *, adapter: str = "") -> dict[str, Any]:
        """A Node's answer, through its Edge (EN-75). Raises NotFound, or Unavailable when the Node is not ready."""
        return self._get(
            f"/nodes/{quote(node, safe='')}/{quote(what, safe='')}", {"adapter": adapter} if adapter else {}
        )

    def terminate_session(self, session: str) -> dict[str, Any]:
        """End an agent's session on every ready Node (EN-70). Raises PermissionDenied without ``abort``."""
        return self._ask("DELETE", f"/sessions/{quote(session, safe='')}")

    def artifact(self, name: str) -> Iterator[bytes]:
        """A profile's file in pieces (AD-46). Raises NotFound, or Unavailable when its Node is away or was lost."""
        target = self._target
        headers = {"authorization": f"Bearer {target.token}"} if target.token else {}
        try:
            with (
                self._client() as client,
                client.stream("GET", f"/artifacts/{quote(name)}", headers=headers) as answer,
            ):
                if answer.status_code != 200:
                    answer.read()
                    raise _error_of(answer.status_code, _shape_of(answer.content), target.address)
                yield from answer.iter_bytes()
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unavailable(f"{target.address} did not send the whole file.", reason="CUT") from error

    def show_config(self) -> dict[str, Any]:
        """The running config, and the reconfigured values that hold over it (AD-47)."""
        return self._get("/config", {})

    def plan_config(self, text: str, *, name: str = "") -> dict[str, Any]:
        """What a config would change. Raises ConfigInvalid with every problem, each at a line of ``name``."""
        return self._ask("POST", "/config/plan", body={"text": text, "name": name})

    def apply_config(self, text: str, *, name: str = "") -> dict[str, Any]:
        """Make a config the running one, whole. Raises ConfigInvalid with every problem; nothing was changed then."""
        return self._ask("POST", "/config/apply", body={"text": text, "name": name})

    def _get(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        return self._ask("GET", path, query=query)

    def _ask(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        target = self._target
        headers = {"authorization": f"Bearer {target.token}"} if target.token else {}
        try:
            with self._client() as client:
                answer = client.request(method, path, params=query, json=body, headers=headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._unreachable(error) from error
        try:
            shape = answer.json()
        except ValueError as error:
            raise RemoteProtocolError(
                f"{target.address} is no ops listener: it did not answer JSON."
            ) from error
        if answer.status_code != 200 or not isinstance(shape, dict):
            raise _error_of(answer.status_code, shape, target.address)
        return shape

    def _client(self) -> httpx2.Client:
        target = self._target
        scheme = "http" if target.tls is None else "https"
        # An ambient proxy must not see tokens that belong on loopback.
        return httpx2.Client(
            base_url=f"{scheme}://{target.address}",
            timeout=target.timeout_s,
            trust_env=False,
            verify=True if target.tls is None else target.tls.context(),
        )

    def _unreachable(self, error: Exception) -> Unavailable:
        target = self._target
        details = {"address": target.address}
        if _is_of_tls(error):
            why_not = "its certificate is not from the authorities of --tls-ca, or it does not speak TLS"
            return Unavailable(
                f"{target.address} cannot be trusted: {why_not}.", reason="TLS_FAILED", details=details
            )
        if isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError) and target.tls is None:
            return Unavailable(
                f"{target.address} does not answer HTTP. If it speaks TLS, say whom to trust: --tls-ca FILE.",
                reason="UNREACHABLE",
                details=details,
            )
        return Unavailable(
            f"Nobody answers at {target.address}. Is the Edge running? Start one with: iop up",
            reason="UNREACHABLE",
            details=details,
        )


def _is_of_tls(error: BaseException | None) -> bool:
    """Whether TLS is why it failed; the library wraps its errors."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None


def _shape_of(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _error_of(status: int, body: object, address: str) -> IopError:
    """The typed error behind a refusal."""
    inner = body.get("error", {}) if isinstance(body, dict) else {}
    message = inner.get("message") if isinstance(inner, dict) else None
    reason = inner.get("code") or inner.get("reason") if isinstance(inner, dict) else None
    problems = inner.get("problems") if isinstance(inner, dict) else None
    if isinstance(problems, list):
        return ConfigInvalid([_problem(problem) for problem in problems])
    kind = _BY_STATUS.get(status, Unavailable)
    return kind(
        str(message or f"the ops listener answered {status}"),
        reason=str(reason) if reason else None,
        details={"server": address} if status in {401, 403} else None,
    )


def _problem(shape: object) -> Problem:
    """One problem as the Edge told it."""
    fields = shape if isinstance(shape, dict) else {}
    return Problem(**{name: str(fields.get(name, "")) for name in ("where", "key", "message", "fix")})
