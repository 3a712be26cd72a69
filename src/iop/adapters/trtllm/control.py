"""Control of TensorRT-LLM's HTTP server: the Node's gate, since it has neither pause nor flush (AD-41).

Its memory routes need a signed request and a key of their own, for which there is no setting yet; its metrics
can be read once only, so this adapter leaves them to whoever collects them.
"""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from iop.adapters.native_control import UNHEALTHY, NativeControl, Observed
from iop.admin.enums import AdminOperationKind
from iop.core.errors import Unavailable

NO_ROUTE: Final = "TensorRT-LLM has no HTTP route for it"
NO_KEY: Final = "TensorRT-LLM's memory routes need a runtime-control key, for which there is no setting"

_MISSING: Final = {
    AdminOperationKind.FLUSH_CACHES: NO_ROUTE,
    AdminOperationKind.UPDATE_WEIGHTS: NO_ROUTE,
    AdminOperationKind.RELEASE_RESOURCES: NO_KEY,
    AdminOperationKind.RESTORE_RESOURCES: NO_KEY,
}


class _Version(msgspec.Struct):
    version: str = ""


class TrtllmControl(NativeControl):
    """See the module."""

    NAME: ClassVar[str] = "TensorRT-LLM"

    async def _observe(self) -> Observed:
        health = await self._http.get("/health")
        if not health.is_ok:
            raise Unavailable(f"the engine is not well: {health.words}", reason=UNHEALTHY)
        version = await self._http.get("/version")
        return Observed(
            engine_version=version.read(_Version).version if version.is_ok else "", missing=dict(_MISSING)
        )
