"""One counter per server (AD-13)."""

from __future__ import annotations

import grpc

from iop.conformance.bench import Bench
from iop.conformance.model import check, require
from iop.conformance.wire import Answer

Status = grpc.StatusCode
FAR = 2**40


@check("AD-13-rises")
async def completed_operations_raise_it(bench: Bench) -> None:
    """Every completed operation raises the revision by one, and event, operation and profile agree."""
    offer = await bench.offer()
    before = (await bench.profile()).revision
    for step in (1, 2):
        _, answer = await bench.flushed(offer)
        told = answer.completed.revision
        operation = await bench.get(answer.operation_id)
        now = (await bench.profile()).revision
        require(
            told == operation.revision_after == now == before + step,
            saw=f"{told} in the event, {operation.revision_after} in the operation, {now} in the profile",
            wants=f"{before + step} in all three",
        )
        require(
            operation.revision_before == before + step - 1,
            saw=f"revision_before {operation.revision_before}",
            wants=f"{before + step - 1}",
        )


@check("AD-13-refusals-keep-it")
async def refusals_do_not_raise_it(bench: Bench) -> None:
    """A refusal does not raise the revision."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    before = (await bench.profile()).revision
    unknown = offer.flush(bench.key())
    unknown.target.models.models.append("no-such-model")
    answers = [
        await bench.call("FlushCaches", unknown),
        await bench.call("FlushCaches", offer.flush(bench.key(), expected_revision=FAR)),
    ]
    if offer.has("Resume"):
        answers.append(await bench.call("Resume", offer.resume(bench.key(), FAR)))
    require(not any(a.is_ok for a in answers), saw="nonsense accepted", wants="refusals")
    after = (await bench.profile()).revision
    require(before == after, saw=f"the revision go from {before} to {after} by refusals", wants="no change")


def _names_current(answer: Answer, current: int) -> None:
    answer.refused(Status.ABORTED, where="a wrong expected_revision")
    words = answer.text.replace(",", " ").replace(".", " ").replace(";", " ").split()
    require(
        str(current) in answer.metadata.values() or str(current) in words,
        saw=f"a refusal that does not name the current revision: {answer.told()}",
        wants=f"{current} named",
    )


@check("AD-13-mismatch")
async def mismatch_is_aborted(bench: Bench) -> None:
    """A wrong expected_revision is ABORTED and names the current one; the right one is accepted."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    current = (await bench.profile()).revision
    for wrong in (current + 1, FAR):
        answer = await bench.call("FlushCaches", offer.flush(bench.key(), expected_revision=wrong))
        _names_current(answer, current)
    answer = await bench.call("FlushCaches", offer.flush(bench.key(), expected_revision=current))
    require(answer.is_ok, saw=f"the current revision refused: {answer.told()}", wants="acceptance")


@check("AD-13-zero-is-a-value")
async def zero_is_a_value(bench: Bench) -> None:
    """expected_revision 0 is a value: it is ABORTED where the revision is another."""
    offer = await bench.offer()
    await bench.flushed(offer)
    current = (await bench.profile()).revision
    answer = await bench.call("FlushCaches", offer.flush(bench.key(), expected_revision=0))
    require(
        answer.code is Status.ABORTED,
        saw=f"expected_revision 0 at revision {current}: {answer.told()}",
        wants="ABORTED: zero is a value",
    )
    _names_current(answer, current)


@check("AD-13-pending")
async def pending_mutations_block_it(bench: Bench) -> None:
    """While an operation runs, another with expected_revision is ABORTED (REVISION_PENDING)."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    current = (await bench.profile()).revision
    async with bench.running(offer) as running:
        answer = await bench.call("FlushCaches", offer.flush(bench.key(), expected_revision=current))
        answer.refused(
            Status.ABORTED, reason="REVISION_PENDING", where="the current revision while a mutation runs"
        )
        done = await running.finish()
        require(
            done.completed.revision == current + 1, saw=f"{done.completed.revision}", wants=f"{current + 1}"
        )
