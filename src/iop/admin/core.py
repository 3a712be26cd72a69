"""`AdminCore`: the facade that a service calls and an application runs.

One core stands for one journal and one fleet. Callers authenticate and decode before, encode after; everything else
about an administration call happens here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

from iop.admin.permissions import Principal
from iop.admin.profile import AdminProfile
from iop.admin.requests import ListOperationsRequest, MutationRequest
from iop.admin.results import (
    AdminOperation,
    AdminOperationEvent,
    CancelResult,
    OperationPage,
)

__all__ = ["AdminCore", "MutationCall"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MutationCall:
    """One mutation as it came in: authenticated and decoded, shape not yet checked beyond its types.

    Attributes:
        request_sha256: 32 bytes over the RPC name and the message without `idempotency_key` and `validate_only`,
            serialised deterministically (AD-12). The surface computes it, since only it has the message.
    """

    principal: Principal
    request: MutationRequest
    request_sha256: bytes


class AdminCore:
    """Accepts, executes, recovers and tells about operations.

    `run()` must be running; before it reports ready, `submit` is refused with UNAVAILABLE.
    """

    async def run(self) -> None:
        """Recover unfinished operations, bring gates in force, then execute and reconcile until cancelled."""
        raise NotImplementedError

    async def wait_ready(self) -> None:
        """Wait until pauses, releases, quarantines and versions are in force (AD-26): listeners may open."""
        raise NotImplementedError

    @property
    def is_serving(self) -> bool:
        """Ready, and the store can be written; else health says NOT_SERVING (AD-06)."""
        raise NotImplementedError

    def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        """Check, accept and observe one mutation; closing the iterator only detaches (AD-22).

        The first event leaves after acceptance is durable (AD-20). With `validate_only`: exactly one plan event.

        Raises (at the first `__anext__`, before anything is journalled):
            IopError: a refusal, in the order of AD-17.
        """
        raise NotImplementedError

    async def get(self, principal: Principal, operation_id: str) -> AdminOperation:
        """The whole state of one operation (AD-23). Raises NotFound."""
        raise NotImplementedError

    async def list_operations(
        self, principal: Principal, request: ListOperationsRequest
    ) -> OperationPage:
        """One page, newest first. Raises InvalidRequest on a foreign page token."""
        raise NotImplementedError

    def watch(
        self, principal: Principal, operation_id: str, *, after_sequence: int = 0
    ) -> AsyncIterator[AdminOperationEvent]:
        """Events after a sequence, then live until the terminal one. Raises NotFound."""
        raise NotImplementedError

    async def cancel(self, principal: Principal, operation_id: str, *, reason: str) -> CancelResult:
        """Ask to call an operation off (AD-24)."""
        raise NotImplementedError

    async def profile(self, principal: Principal) -> AdminProfile:
        """What this server offers and how everything stands (AD-50)."""
        raise NotImplementedError

    def participants_changed(self) -> None:
        """Tell the core that a participant joined, left or restarted: look again (AD-35). Never blocks."""
        raise NotImplementedError
