"""How many data-parallel engines one vLLM server runs, changed while it serves (elastic expert parallelism, AD-47).

The server answers once it has the new size, and refuses everything meanwhile. A change that breaks in its midst leaves
it refusing until it is restarted, with the same status as one that never began; so it is asked which it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from iop.adapters.engine_http import EngineHttp
from iop.adapters.gate_control import ENGINE, StepFailed, not_verified
from iop.adapters.vllm.answers import RANKS_MAX, IsScaling, WorldSize
from iop.admin.enums import AdminErrorCode, ChangeDisposition, ReconfigurableField
from iop.admin.requests import ServingChange
from iop.admin.results import ChangeResult
from iop.core.errors import DeadlineExceeded, IopError, PreconditionFailed

SCALE_ROUTE: Final = "/scale_elastic_ep"

SIZE: Final = ReconfigurableField.DATA_PARALLEL_SIZE


class ElasticSize:
    """The size of one server.

    Attributes:
        size: as last read; `None` before.
        size_max: what it was started for.
    """

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self.size: int | None = None
        self.size_max = 1

    async def look(self) -> None:
        """Read the size: ranks with and without data parallelism are all that it tells cheaply."""
        ranks = (await self._http.get("/get_world_size", {"include_dp": "true"})).read(WorldSize).world_size
        each = (await self._http.get("/get_world_size", {"include_dp": "false"})).read(WorldSize).world_size
        self.size = ranks // each if 0 < each <= ranks <= RANKS_MAX else None

    def judge(self, changes: Sequence[ServingChange]) -> tuple[ChangeResult, ...]:
        """What would become of each change."""
        return tuple(self._judge(change) for change in changes)

    async def change(self, changes: Sequence[ServingChange], *, timeout_s: float) -> tuple[ChangeResult, ...]:
        """Make the changes, all or none.

        Raises:
            PreconditionFailed: CHANGE_REJECTED, nothing was touched.
            StepFailed: with what is known of the size.
        """
        judged = self.judge(changes)
        rejected = [each.detail for each in judged if each.disposition is ChangeDisposition.REJECTED]
        if rejected:
            raise PreconditionFailed("; ".join(rejected), reason="CHANGE_REJECTED")
        for change, judgement in zip(changes, judged, strict=True):
            if judgement.disposition is ChangeDisposition.APPLIED and isinstance(change.value, int):
                await self._scale(change.value, timeout_s=timeout_s)
        return tuple(
            ChangeResult(
                participant_id=ENGINE,
                field=each.field,
                disposition=each.disposition,
                effective_value=str(self.size),
            )
            for each in judged
        )

    def _judge(self, change: ServingChange) -> ChangeResult:
        disposition, detail = ChangeDisposition.APPLIED, ""
        value = change.value
        if change.field is not SIZE:
            disposition, detail = ChangeDisposition.REJECTED, "vLLM changes only its data-parallel size"
        elif type(value) is not int or not 1 <= value <= self.size_max:
            disposition = ChangeDisposition.REJECTED
            detail = f"it must be from 1 to {self.size_max}, for which the engine was started"
        elif value == self.size:
            disposition = ChangeDisposition.UNCHANGED
        return ChangeResult(
            participant_id=ENGINE,
            field=change.field,
            disposition=disposition,
            detail=detail,
            effective_value=str(self.size),
        )

    async def _scale(self, size: int, *, timeout_s: float) -> None:
        # A little less than we wait, so that what it says of it is heard.
        body = {"new_data_parallel_size": size, "drain_timeout": max(1, int(0.9 * timeout_s))}
        try:
            answer = await self._http.post(SCALE_ROUTE, body, timeout_s=timeout_s)
        except DeadlineExceeded:
            raise StepFailed(
                "the engine still changes its size, and refuses requests meanwhile", retryable=True
            ) from None
        if answer.status == 408:
            raise StepFailed(
                "requests still ran when the engine's time to drain was over; its size is as before",
                code=AdminErrorCode.DRAIN_TIMEOUT,
                changed=False,
                retryable=True,
            )
        if not answer.is_ok and await self._is_scaling():
            raise StepFailed(
                f"changing the size broke off, and the engine refuses everything until it is restarted: {answer.words}"
            )
        await self.look()
        if not answer.is_ok:
            raise StepFailed(f"the engine refused the size, and has {self.size}: {answer.words}")
        if self.size != size:
            raise not_verified(f"the engine answered and says that its data-parallel size is {self.size}")

    async def _is_scaling(self) -> bool:
        """Also when it refuses even this question, as some releases do."""
        try:
            answer = await self._http.post("/is_scaling_elastic_ep")
            return not answer.is_ok or answer.read(IsScaling).is_scaling_elastic_ep
        except IopError:
            return False
