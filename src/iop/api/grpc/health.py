"""`grpc.health.v1` that tells the truth at the moment it is asked (AD-06).

Each service has a function that says whether it can serve. A check asks it; a watcher asks it again once per period and
is told of changes. So nothing has to be told to the health service, and nothing can be forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from iop.core.errors import NotFound

__all__ = ["HEALTH_SERVICE", "LiveHealth", "ServingCheck"]

HEALTH_SERVICE: Final = "grpc.health.v1.Health"

OVERALL: Final = ""
"""The service name that means the whole listener: it serves when all of its services do."""

ServingCheck = Callable[[], bool]
"""Whether a service can serve now; cheap, never waits."""

_Answer = health_pb2.HealthCheckResponse


class LiveHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Health of one listener.

    Args:
        checks: by full service name.
        period_s: how late a watcher may hear of a change.
    """

    def __init__(self, checks: Mapping[str, ServingCheck], *, period_s: float = 1.0) -> None:
        self._checks = dict(checks)
        self._period_s = period_s
        self._shut_down = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        """Answer for one service, or for all of them under the empty name.

        Raises:
            NotFound: no such service on this listener.
        """
        if request.service != OVERALL and request.service not in self._checks:
            raise NotFound(
                "This listener has no such service.",
                reason="UNKNOWN_SERVICE",
                details={"service": request.service},
            )
        return _Answer(status=self._status_of(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answer now, and whenever the answer changes; ends with the call, or after a shutdown was told."""
        last: int | None = None
        while True:
            is_last = self._shut_down.is_set()
            status = self._status_of(request.service)
            if status != last:
                last = status
                yield _Answer(status=status)
            if is_last:
                return  # a watcher must not hold up the stop of the listener
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._shut_down.wait()

    def shut_down(self) -> None:
        """From now on nothing here serves, whatever the services say."""
        self._shut_down.set()

    def _status_of(self, service: str) -> int:
        if service == OVERALL:
            is_serving = all(check() for check in self._checks.values())
        elif service in self._checks:
            is_serving = self._checks[service]()
        else:
            return int(_Answer.SERVICE_UNKNOWN)
        return int(_Answer.SERVING if is_serving and not self._shut_down.is_set() else _Answer.NOT_SERVING)
