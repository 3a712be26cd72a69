"""``make admin-load``: weights change under load, again and again, and every answer is one version's own.

    python bench/admin_load.py [--updates 200] [--callers 20] [--abort-every 10] [--keep-every 0]

Real processes on loopback: one ``iop edge``, two ``iop node``, two ``iop engine --ranks 2``. Callers ask without a
pause, every other answer streamed; meanwhile one operation after another puts the other of the two shipped checkpoints
on both engines. Every answer is held to the text that the version it names gives by itself. An ABORT quiesce may end
answers, a KEEP quiesce may continue one under other weights; whatever else happens to an answer is a fault.
Prints a table; ends with 1 where a fault was found.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from iop.admin.enums import AdminOperationState, AdmissionPolicy, CachePolicy, PauseMode, WeightFormat
from iop.admin.requests import DiskSource, MutationOptions, PauseSpec, UpdateWeightsRequest
from iop.admin.results import AdminOperation
from iop.client.admin import AdminClient
from iop.engine import CHECKPOINTS, builtin_checkpoint
from iop.testing.engine_fleet import MODEL, Answer, EngineFleet
from iop.testing.waiting import eventually

TOKENS: Final = 16
ATTEMPTS: Final = 5
PROMPTS: Final = (
    "Tell me a story.",
    "Tell me a story about a fox.",
    "Tell me about the moon.",
    "What is 3 plus 4?",
    "Who are you?",
    "Write a short letter.",
    "Tell me a story about the sea.",
    "Give me some advice.",
)


@dataclass(slots=True)
class Found:
    """What the callers saw."""

    own: dict[tuple[str, str], str]
    """By version and prompt, its greedy text."""
    checked: collections.Counter[str] = field(default_factory=collections.Counter)
    streamed: int = 0
    aborted: int = 0
    continued: int = 0
    repeated: int = 0
    latencies_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    may_abort: bool = False
    may_continue: bool = False


def length_of(prompt: str) -> int:
    """How many tokens are asked for: 13 to 16, always the same for a prompt, so that its text is known."""
    return TOKENS - PROMPTS.index(prompt) % 4


async def learn(fleet: EngineFleet, version: str) -> dict[tuple[str, str], str]:
    """What one version says by itself. A prompt that both answer alike would prove nothing and is not asked."""
    texts = {}
    for prompt in PROMPTS:
        answer = await fleet.say(prompt, max_tokens=length_of(prompt))
        if not (answer.status == 200 and answer.is_whole and answer.first_version == version):
            raise SystemExit(f"{version} answered {answer}")
        texts[version, prompt] = answer.text
    return texts


def update_to(version: str, key: str, mode: PauseMode, *, is_first: bool) -> UpdateWeightsRequest:
    """One operation over both engines."""
    return UpdateWeightsRequest(
        options=MutationOptions(idempotency_key=f"load-{key}"),
        model=MODEL,
        source=DiskSource(path=str(builtin_checkpoint(version)), format=WeightFormat.SAFETENSORS),
        weight_version=version,
        cache_policy=CachePolicy.FLUSH,
        quiesce=PauseSpec(mode=mode, admission=AdmissionPolicy.QUEUE),
        # The Edge has not seen where the weights that the engines started with come from; all later ones it has.
        allow_irreversible=is_first,
    )


async def change(client: AdminClient, request: UpdateWeightsRequest) -> AdminOperation:
    """Run one update to its end."""
    operation_id = ""
    async for event in client.submit(request):
        operation_id = event.operation_id
    return await client.get(operation_id)


async def change_surely(
    client: AdminClient, version: str, number: int, mode: PauseMode, found: Found
) -> float:
    """Run one update until it succeeded; seconds of the one that did.

    A machine with more work than cores lets engines miss their time now and then. Such an update must have left
    everything as it was, and then it is asked for again.

    Raises:
        SystemExit: one failed otherwise.
    """
    for attempt in range(ATTEMPTS):
        begun = time.monotonic()
        ended = await change(client, update_to(version, f"{number}-{attempt}", mode, is_first=number < 0))
        if ended.state is AdminOperationState.SUCCEEDED:
            return time.monotonic() - begun
        if ended.error is None or not (ended.error.rolled_back and ended.error.retryable):
            break
        found.repeated += 1
    raise SystemExit(f"update {number} to {version} ended {ended.state.name}: {ended.error}")


def judge(found: Found, prompt: str, answer: Answer, *, may_abort: bool, may_continue: bool) -> None:
    """Hold one answer to its version."""
    first, last = answer.first_version, answer.last_version
    if answer.status != 200 or answer.error or not answer.is_whole:
        if may_abort:
            found.aborted += 1
        else:
            found.faults.append(f"failed: {answer}")
    elif first != last:
        if may_continue:
            found.continued += 1
        else:
            found.faults.append(f"two versions: {answer}")
    elif answer.text != found.own.get((first, prompt)):
        of = [
            version for (version, asked), text in found.own.items() if asked == prompt and text == answer.text
        ]
        found.faults.append(f"named {first}, said {of or 'a mixture'}: {answer}")
    else:
        found.checked[first] += 1


async def call_on(
    fleet: EngineFleet, found: Found, number: int, prompts: list[str], stop: asyncio.Event
) -> None:
    """One caller: ask, check, ask again."""
    turn = number
    while not stop.is_set():
        prompt = prompts[turn % len(prompts)]
        is_stream = turn % 2 == 0
        turn += 1
        before = found.may_abort, found.may_continue
        begun = time.monotonic()
        try:
            answer = await fleet.say(prompt, max_tokens=length_of(prompt), is_stream=is_stream)
        except (OSError, EOFError, TimeoutError) as error:
            found.faults.append(f"no answer: {type(error).__name__}: {error}")
            continue
        found.latencies_s.append(time.monotonic() - begun)
        found.streamed += is_stream
        judge(
            found,
            prompt,
            answer,
            may_abort=before[0] or found.may_abort,
            may_continue=before[1] or found.may_continue,
        )


def mode_of(number: int, *, abort_every: int, keep_every: int) -> PauseMode:
    """DRAIN, and now and then another."""
    if abort_every and number % abort_every == abort_every - 1:
        return PauseMode.ABORT
    if keep_every and number % keep_every == keep_every - 1:
        return PauseMode.KEEP
    return PauseMode.DRAIN


def spread(seconds: list[float]) -> str:
    """Median and 95th percentile."""
    if len(seconds) < 2:
        return "too few"
    return f"{statistics.median(seconds):.3f} s / {statistics.quantiles(seconds, n=20)[18]:.3f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What was run and found."""

    updates_s: list[float]
    elapsed_s: float
    found: Found

    def rows(self) -> list[tuple[str, str]]:
        """The table."""
        found = self.found
        return [
            ("updates", f"{len(self.updates_s)}"),
            ("updates per second", f"{len(self.updates_s) / self.elapsed_s:.2f}"),
            ("update, median / 95 %", spread(self.updates_s)),
            ("answers", f"{len(found.latencies_s)} ({found.streamed} streamed)"),
            ("answer, median / 95 %", spread(found.latencies_s)),
            *(
                (f"whole and equal to {version}'s", str(count))
                for version, count in sorted(found.checked.items())
            ),
            ("ended by an ABORT quiesce", str(found.aborted)),
            ("changed version under KEEP, and said so", str(found.continued)),
            ("updates asked for again", str(found.repeated)),
            ("faults", str(len(found.faults))),
        ]


async def run(
    directory: Path,
    *,
    updates: int,
    callers: int,
    abort_every: int = 10,
    keep_every: int = 0,
    answers_between: int = 0,
) -> Load:
    """Start the fleet, change weights under load, and judge; between two updates at least so many answers come."""
    async with EngineFleet(directory, ["n1", "n2"]) as fleet, fleet.client() as client:
        await fleet.start()
        first = (await fleet.say("Hello")).first_version
        second = next(version for version in CHECKPOINTS if version != first)
        own = await learn(fleet, first)
        found = Found(own=own)
        await change_surely(client, second, -1, PauseMode.DRAIN, found)
        own |= await learn(fleet, second)
        prompts = [prompt for prompt in PROMPTS if own[first, prompt][:8] != own[second, prompt][:8]]
        if len(prompts) < 3:
            raise SystemExit(f"the checkpoints are too much alike: {own}")
        stop = asyncio.Event()
        took = []
        begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(callers):
                tasks.create_task(call_on(fleet, found, number, prompts, stop), name=f"caller {number}")
            for number in range(updates):
                mode = mode_of(number, abort_every=abort_every, keep_every=keep_every)
                found.may_abort |= mode is PauseMode.ABORT
                found.may_continue |= mode is PauseMode.KEEP
                took.append(await change_surely(client, (first, second)[number % 2], number, mode, found))
                await asyncio.sleep(0)
                found.may_abort = found.may_continue = False
                wanted = len(found.latencies_s) + answers_between
                await eventually(lambda wanted=wanted: len(found.latencies_s) >= wanted, what="answers")
            stop.set()
        return Load(updates_s=took, elapsed_s=time.monotonic() - begun, found=found)


def main() -> int:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(description="Change weights under load and judge every answer.")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--callers", type=int, default=20)
    parser.add_argument("--abort-every", type=int, default=10, help="0: never")
    parser.add_argument("--keep-every", type=int, default=0, help="0: never")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        load = asyncio.run(
            run(
                Path(directory),
                updates=given.updates,
                callers=given.callers,
                abort_every=given.abort_every,
                keep_every=given.keep_every,
            )
        )
    for name, value in load.rows():
        print(f"{name:<42}{value}")
    for fault in load.found.faults[:10]:
        print(f"  {fault}", file=sys.stderr)
    return 1 if load.found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
