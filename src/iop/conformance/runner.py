"""Runs checks one after another, each bounded, each leaving the server as it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

import grpc

from iop.conformance.bench import Bench
from iop.conformance.model import (
    Check,
    CheckFailed,
    CheckNotRun,
    CheckResult,
    CheckSkipped,
    Outcome,
    Report,
)
from iop.core.errors import Unavailable

__all__ = ["run_check", "run_suite"]

PUT_BACK_TIMEOUT_S: Final = 120.0
REACHABLE_S: Final = 15.0


async def run_suite(
    bench: Bench, checks: Sequence[Check], *, on_result: Callable[[CheckResult], None] | None = None
) -> Report:
    """Run checks against one server.

    Raises:
        Unavailable: NOT_REACHABLE, the server does not answer with a profile.
    """
    async with bench.connected():
        server = await _first_look(bench)
        results = []
        for one in checks:
            result = await run_check(bench, one)
            results.append(result)
            if on_result is not None:
                on_result(result)
    return Report(target=bench.target.address, server=server, results=tuple(results))


async def run_check(bench: Bench, one: Check) -> CheckResult:
    """Run one check and put the server back; the bench is connected and has taken note of its state."""
    begun = time.monotonic()
    outcome, detail = await _judged(bench, one)
    left = await _put_back(bench)
    if left:
        outcome, detail = Outcome.FAIL, f"{detail}; afterwards {left}" if detail else left
    return CheckResult(
        check_id=one.check_id,
        clauses=one.clauses,
        meaning=one.meaning,
        outcome=outcome,
        detail=detail,
        seconds=time.monotonic() - begun,
    )


async def _first_look(bench: Bench) -> str:
    """Find out that the server is there and who it is."""
    told = "no answer"
    try:
        async with asyncio.timeout(REACHABLE_S):
            await bench.channel.channel_ready()
            await bench.remember()
            participants = (await bench.offer()).participants
    except TimeoutError:
        pass
    except CheckFailed as failure:
        told = failure.saw
    else:
        names = sorted({f"{p.engine_name} {p.engine_version}".strip() for p in participants})
        return f"{', '.join(names)}; {len(participants)} participants"
    raise Unavailable(
        f"{bench.target.address} gives no admin profile to an admin: {told}. Is it OpenEngineAdmin, and is --token an "
        "admin's?",
        reason="NOT_REACHABLE",
    )


async def _judged(bench: Bench, one: Check) -> tuple[Outcome, str]:
    try:
        async with asyncio.timeout(one.timeout_s):
            await one.run(bench)
    except CheckFailed as failure:
        return Outcome.FAIL, str(failure)
    except CheckSkipped as skip:
        return Outcome.SKIP, str(skip)
    except CheckNotRun as reason:
        return Outcome.NOT_RUN, str(reason)
    except TimeoutError:
        return Outcome.FAIL, f"saw no end of it within {one.timeout_s:g} s; the contract wants answers"
    except grpc.aio.AioRpcError as error:
        return Outcome.FAIL, f"saw {error.code().name} {error.details()!r} where an answer was due"
    except BaseExceptionGroup as group:
        return _of_group(group)
    return Outcome.PASS, ""


def _of_group(group: BaseExceptionGroup[BaseException]) -> tuple[Outcome, str]:
    """Checks that call side by side fail in groups; the first verdict counts."""
    for kind, outcome in (
        (CheckFailed, Outcome.FAIL),
        (CheckNotRun, Outcome.NOT_RUN),
        (CheckSkipped, Outcome.SKIP),
    ):
        inner: BaseException | None = group.subgroup(kind)
        while isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        if inner is not None:
            return outcome, str(inner)
    raise group


async def _put_back(bench: Bench) -> str:
    """What could not be undone; empty when all is as it was."""
    try:
        async with asyncio.timeout(PUT_BACK_TIMEOUT_S):
            await bench.put_back()
    except (CheckFailed, CheckNotRun) as failure:
        return f"the server is not as it was found: {failure}"
    except TimeoutError:
        return "the server is not as it was found: it did not settle in time"
    return ""
