"""One defect: what is wrong, how it gets in, and which checks must see it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

from iop.admin.core import AdminCore, MutationCall
from iop.admin.results import AdminOperationEvent
from iop.testing.conformance_site import Recipe

__all__ = ["Defect", "TellingCore", "changed", "doctored", "patched", "with_core"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defect:
    """A wrong server.

    Attributes:
        name: what is wrong, in a few words.
        caught_by: ids of the checks that must fail.
        recipe: the server, spoilt in one part.
        patch: spoils a function while the server runs; for what no part can be replaced for.
    """

    name: str
    caught_by: tuple[str, ...]
    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    patch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def __str__(self) -> str:
        return self.name


def patched(target: str, replacement: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function or constant of ours replaced, by dotted name."""
    return lambda: mock.patch(target, replacement)


def with_core(core: type[AdminCore]) -> Recipe:
    """The right server with another core."""
    return Recipe(core=core)


class TellingCore(AdminCore):
    """A core whose telling of events can be spoilt: override `tell` or `tell_again`."""

    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        """The core's own events, as told."""
        claimed = await self.is_known(call)
        events = super().submit(call)
        told = self.tell_again(events) if claimed else self.tell(events)
        async with contextlib.aclosing(events), contextlib.aclosing(told):  # type: ignore[type-var]
            async for event in told:
                yield event

    async def is_known(self, call: MutationCall) -> bool:
        """Whether the key of this call was accepted before."""
        key = (call.principal.name, call.request.options.idempotency_key)
        store: Any = self._journal
        return not call.request.options.validate_only and key in store._store.keys

    async def tell(self, events: AsyncIterator[AdminOperationEvent]) -> AsyncIterator[AdminOperationEvent]:
        """Events of a new operation."""
        async for event in events:
            yield event

    async def tell_again(
        self, events: AsyncIterator[AdminOperationEvent]
    ) -> AsyncIterator[AdminOperationEvent]:
        """Events of a replay."""
        async for event in self.tell(events):
            yield event


def doctored(
    change: Callable[[AdminOperationEvent], list[AdminOperationEvent]], *, replays_only: bool = False
) -> Recipe:
    """A server that tells other events than it journalled."""

    class Doctored(TellingCore):
        async def tell(
            self, events: AsyncIterator[AdminOperationEvent]
        ) -> AsyncIterator[AdminOperationEvent]:
            async for event in events:
                for told in [event] if replays_only else change(event):
                    yield told

        async def tell_again(
            self, events: AsyncIterator[AdminOperationEvent]
        ) -> AsyncIterator[AdminOperationEvent]:
            async for event in events:
                for told in change(event):
                    yield told

    return with_core(Doctored)


def changed(call: MutationCall, **options: Any) -> MutationCall:
    """The call with other options."""
    request: Any = call.request
    return dataclasses.replace(
        call, request=dataclasses.replace(request, options=dataclasses.replace(request.options, **options))
    )
