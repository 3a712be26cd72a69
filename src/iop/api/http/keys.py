"""API keys of the public listener: who calls, and what they may (SF-11, SF-16)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from iop.api.http.head import RequestHead
from iop.api.http.limits import ByteBudget
from iop.core.errors import Overloaded, PermissionDenied, Unauthenticated

__all__ = ["ApiKeySpec", "ApiKeys", "Caller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeySpec:
    """One configured key.

    Attributes:
        sha256: digest of the key; the key itself is not held.
        models: ids or aliases it may use; empty: all.
        requests_per_minute, concurrent: None: unlimited.
        may_session, may_priority: whether ``x-iop-session`` and ``x-iop-priority`` are taken from it (SF-16).
    """

    name: str
    sha256: bytes = field(repr=False)
    models: frozenset[str] = frozenset()
    requests_per_minute: int | None = None
    concurrent: int | None = None
    may_session: bool = False
    may_priority: bool = False


class Caller:
    """One key's running state; an open API has a single nameless caller without limits."""

    __slots__ = ("_allowance", "_last", "budget", "running", "spec")

    def __init__(self, spec: ApiKeySpec | None, *, buffered_bytes: int, now: float) -> None:
        self.spec = spec
        self.budget = ByteBudget(buffered_bytes)
        self.running = 0
        self._allowance = float(spec.requests_per_minute or 0) if spec is not None else 0.0
        self._last = now

    @property
    def name(self) -> str:
        """For logs and ``iop explain``; empty when the API is open."""
        return "" if self.spec is None else self.spec.name

    def enter(self, now: float) -> None:
        """Count a request in; pair with ``leave``.

        Raises:
            Overloaded: its rate or its number of concurrent requests is used up; nothing was counted.
        """
        spec = self.spec
        if spec is not None:
            if spec.concurrent is not None and self.running >= spec.concurrent:
                raise Overloaded(
                    f"This API key may run {spec.concurrent} requests at once.",
                    reason="KEY_CONCURRENCY",
                    retry_after_s=1.0,
                )
            rate = spec.requests_per_minute
            if rate is not None:
                self._allowance = min(float(rate), self._allowance + (now - self._last) * rate / 60.0)
                self._last = now
                if self._allowance < 1.0:
                    raise Overloaded(
                        f"This API key may send {rate} requests a minute.",
                        reason="KEY_RATE",
                        retry_after_s=(1.0 - self._allowance) * 60.0 / rate,
                    )
                self._allowance -= 1.0
        self.running += 1

    def leave(self) -> None:
        """The request counted by ``enter`` is over."""
        self.running -= 1

    def check_model(self, *names: str) -> None:
        """Refuse a model that the key may not use; ``names`` are its id and whatever the caller called it.

        Raises:
            PermissionDenied: none of the names is on the key's list.
        """
        if not self.may_use(*names):
            raise PermissionDenied(
                "This API key may not use that model.", reason="MODEL_NOT_ALLOWED", details={"field": "model"}
            )

    def may_use(self, *names: str) -> bool:
        """Whether one of a model's names is on the key's list."""
        return self.spec is None or not self.spec.models or not self.spec.models.isdisjoint(names)


class ApiKeys:
    """All keys of one configuration. Replace the whole when the configuration changes.

    Args:
        specs: the keys; empty: the API is open.
        buffered_bytes: what each may have buffered at once (``HttpLimits.key_buffered_bytes``, SF-12).
        now: monotonic seconds.
    """

    def __init__(self, specs: Sequence[ApiKeySpec], *, buffered_bytes: int, now: Callable[[], float]) -> None:
        self._now = now
        self._callers = [Caller(spec, buffered_bytes=buffered_bytes, now=now()) for spec in specs]
        self._anybody = Caller(None, buffered_bytes=buffered_bytes, now=now()) if not specs else None

    def now(self) -> float:
        """The time that rates are counted in."""
        return self._now()

    def named(self, name: str) -> Caller:
        """The caller with the key of this name; one without limits if there is none, as on an open API."""
        for caller in self._callers:
            if caller.name == name:
                return caller
        return Caller(None, buffered_bytes=0, now=self._now())

    def admit(self, name: str) -> Callable[[], None]:
        """Count a request of the key of this name in, for surfaces that know their callers otherwise (SF-11).

        Returns:
            What counts it out.

        Raises:
            Overloaded: as :meth:`Caller.enter`.
        """
        caller = self.named(name)
        caller.enter(self._now())
        return caller.leave

    def identify(self, head: RequestHead) -> Caller:
        """Who sent this request.

        Raises:
            Unauthenticated: a key is needed and none came, or nobody has this one.
        """
        if self._anybody is not None:
            return self._anybody
        key = _presented_key(head)
        if key is None:
            raise Unauthenticated("Send an API key as `Authorization: Bearer KEY`.", reason="MISSING_API_KEY")
        digest = hashlib.sha256(key).digest()
        found: Caller | None = None
        for caller in self._callers:
            # Every key is compared, so that time tells nothing about which one came close.
            if caller.spec is not None and hmac.compare_digest(caller.spec.sha256, digest):
                found = caller
        if found is None:
            raise Unauthenticated("This API key is not known here.", reason="INVALID_API_KEY")
        return found


def _presented_key(head: RequestHead) -> bytes | None:
    authorization = head.get(b"authorization")
    if authorization is not None:
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() == b"bearer" and key.strip():
            return key.strip()
    return head.get(b"x-api-key") or head.get(b"api-key")
