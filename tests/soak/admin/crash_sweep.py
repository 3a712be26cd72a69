"""Operations in which a process dies at a write, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable

from crash_site import CAPACITIES, Site

from iop.admin.enums import AdminOperationState
from iop.admin.requests import MutationRequest, ReconfigureServingRequest
from iop.admin.results import AdminOperation
from iop.core.errors import IopError
from iop.testing.process_fleet import eventually

DEAD_WITHIN_S = 60.0
ENDED_WITHIN_S = 120.0
SETTLED_WITHIN_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Who dies when whose journal writes.

    Attributes:
        writer: whose writes are counted, from the operation's acceptance on: ``edge`` or ``engine``.
        victim: who is killed there.
    """

    writer: str
    victim: str


async def strike(site: Site, request: MutationRequest, death: Death, *, point: int) -> bool:
    """Run the operation while somebody dies at a point and is started again; False when it has no such point."""
    order = site.orders[death.writer]
    struck = order.with_suffix(".struck")
    victim = site.process(death.victim)
    order.write_text(f"{point} {0 if death.writer == death.victim else victim.pid}")

    async def follow() -> None:
        with contextlib.suppress(IopError):
            await site.submit(request)

    async with asyncio.timeout(ENDED_WITHIN_S), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(), name="follow")
        await eventually(
            lambda: struck.exists() or following.done(), what="it dies or ends", within_s=DEAD_WITHIN_S
        )
        if not struck.exists():
            await following
            order.write_text("0 0")  # what is left of the count is not for what comes next
            return False
        await eventually(lambda: victim.poll() is not None, what="it died", within_s=DEAD_WITHIN_S)
        struck.unlink()
        order.unlink(missing_ok=True)
        await site.start(death.victim)
    return True


async def check(site: Site, request: MutationRequest, death: Death) -> AdminOperation | None:
    """One key, one operation, one history with one end; the fleet is as it says. None: it was not accepted."""
    events = await site.replay(request)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [event.is_terminal for event in events] == [False] * (len(events) - 1) + [True]
    assert await site.replay(request) == events, "a history does not change"
    found = await site.of_key(request)
    assert len(found) == 1, "one key, one operation"
    async with site.client() as client:
        ended = await client.get(events[0].operation_id)
    left = ended.state is AdminOperationState.SUCCEEDED or not (ended.error and ended.error.rolled_back)
    assert ended.revision_after - ended.revision_before == int(left), ended
    if death.victim == "edge":
        # Its engines live on, so nothing is lost that could not go on, and nobody is in doubt (AD-26).
        assert not (ended.error and ended.error.quarantined), ended
    try:
        await eventually(site.is_as_told, what="the fleet is as told", within_s=SETTLED_WITHIN_S)
    except AssertionError as error:
        raise AssertionError(f"after {ended}: {site.seen}") from error
    if isinstance(request, ReconfigureServingRequest) and death.victim == "edge":
        wanted = request.changes[0].value
        old = next(each for each in CAPACITIES if each != wanted)
        is_new = ended.state is AdminOperationState.SUCCEEDED
        assert await site.slots() == {wanted if is_new else old}, ended
    return ended


async def sweep(site: Site, kind: str, death: Death, *, points: Iterable[int]) -> Counter[str]:
    """Let somebody die at each of these points of one kind of operation, as far as it has them; how it ended how
    often.
    """
    ends: Counter[str] = Counter()
    for point in points:
        request = await site.prepare(kind)
        try:
            if not await strike(site, request, death, point=point):
                break
            ended = await check(site, request, death)
            if ended is not None and ended.state is not AdminOperationState.SUCCEEDED:
                again = dataclasses.replace(request, options=site.options())
                await site.do(again)  # asked for again it succeeds
        except BaseException as error:
            error.add_note(f"{kind}, {death}, point {point}")
            raise
        assert ended is not None
        ends[ended.state.name] += 1
    return ends
