"""The engine's side of its rank processes: starting them, giving orders, noticing a death, leaving none behind."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, cast

from iop.core.errors import Internal, IopError, Unavailable
from iop.engine.checkpoint import ModelConfig
from iop.engine.collective import Exchange, exchange_bytes
from iop.engine.exact import F32
from iop.engine.framing import FrameBuffer, FrameError, encode_frame

__all__ = ["RankGroup"]

_log = logging.getLogger(__name__)

_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
"""One thread per rank: the ranks are the parallelism, and small products only lose by more."""

_ERRORS: Final[Mapping[str, type[IopError]]] = {kind.code.value: kind for kind in IopError.__subclasses__()}


class _Channel(asyncio.Protocol):
    """One rank's socket: answers are matched to orders by their sequence."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._buffer = FrameBuffer()
        self._waiting: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._heard_at = 0.0
        self._transport: asyncio.Transport | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Cast, not checked: uvloop's transports are no instances of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    @property
    def is_awaited(self) -> bool:
        """Whether it owes an answer that somebody still waits for."""
        return any(not answer.done() or answer.cancelled() for answer in self._waiting)

    def silent_s(self, now: float) -> float:
        """For how long it has owed an answer and said nothing; 0 if it owes none."""
        return now - self._heard_at if self._waiting else 0.0

    def expect(self) -> asyncio.Future[dict[str, Any]]:
        """A future for the next answer that nobody awaits yet."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self.is_lost:
            answer.set_exception(_lost())
        else:
            if not self._waiting:
                self._heard_at = asyncio.get_running_loop().time()
            self._waiting.append(answer)
        return answer

    def order(self, frame: bytes) -> asyncio.Future[dict[str, Any]]:
        """Send an order; the future is its answer."""
        answer = self.expect()
        if self._transport is not None and not self.is_lost:
            self._transport.write(frame)
        return answer

    def data_received(self, data: bytes) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        try:
            for message in self._buffer.feed(data):
                if not self._waiting:
                    raise FrameError("an answer without an order")
                answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(message)
        except FrameError:
            _log.exception("rank.spoke_badly")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the protocol's signature
        self.is_lost = True
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(_lost())
                answer.exception()  # Whoever waits still gets it; if nobody does, that is no leak to warn about.
        self._on_lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class RankGroup:
    """All rank processes of one engine. They live and die together: losing one ends the others.

    Args:
        on_lost: called once, from the event loop, when a rank is lost without ``aclose``.
    """

    def __init__(self, *, ranks: int, on_lost: Callable[[str], None]) -> None:
        self.count = ranks
        self._on_lost = on_lost
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[_Channel] = []
        self._fds: list[int] = []
        self._exchange: Exchange | None = None
        self._is_closed = False
        self._why = ""
        self._answer_timeout_s = 60.0

    @property
    def logits(self) -> F32:
        """Where ranks leave the wanted logits of a step: shape (rows, vocabulary)."""
        assert self._exchange is not None, "ranks are started first"
        return self._exchange.logits

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in order of rank."""
        return tuple(process.pid for process in self._processes)

    async def start(
        self, setup: Mapping[str, Any], *, config: ModelConfig, rows: int, timeout_s: float
    ) -> None:
        """Start the processes and wait until all have loaded.

        Raises:
            IopError: what a rank found wrong with its checkpoint.
            Unavailable: a rank died or did not come up in time.
        """
        self._answer_timeout_s = timeout_s
        ranks, shape = self.count, {"rows": rows, "width": config.width, "vocabulary": config.vocabulary}
        memory_fd = self._own(os.memfd_create("iop-exchange", os.MFD_CLOEXEC))
        os.ftruncate(memory_fd, exchange_bytes(ranks=ranks, **shape))
        self._exchange = Exchange(memory_fd, rank=-1, ranks=ranks, signals={}, alive_fd=-1, **shape)
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        signals = {pair: self._own(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)) for pair in pairs}
        try:
            hellos = [
                await self._spawn(rank, {**setup, "rows": rows, "memory_fd": memory_fd}, signals)
                for rank in range(ranks)
            ]
            async with asyncio.timeout(timeout_s):
                await _all_loaded(hellos)
        except TimeoutError as exc:
            self.close()
            raise Unavailable("A rank did not come up in time.", reason="RANK_NOT_STARTED") from exc
        except BaseException:
            self.close()
            raise

    async def _spawn(
        self, rank: int, setup: Mapping[str, Any], signals: Mapping[tuple[int, int], int]
    ) -> asyncio.Future[dict[str, Any]]:
        ours, theirs = socket.socketpair()
        mine = {pair: fd for pair, fd in signals.items() if rank in pair}
        argument = {
            **setup,
            "rank": rank,
            "ranks": self.count,
            "control_fd": theirs.fileno(),
            "parent": os.getpid(),
            "signals": [[a, b, fd] for (a, b), fd in mine.items()],
        }
        channel = _Channel(lambda: self._on_channel_lost(rank))
        try:
            with theirs:
                # Starting a process by asyncio would tie it to a child watcher; this blocks for a few milliseconds.
                process = subprocess.Popen(  # noqa: ASYNC220, S603  # our own module, our own arguments
                    [sys.executable, "-m", "iop.engine.rank", json.dumps(argument)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), setup["memory_fd"], *mine.values()),
                    env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1")},
                )
            self._processes.append(process)
            ours.setblocking(False)
            hello = channel.expect()
            await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
        except BaseException:
            ours.close()
            raise
        self._channels.append(channel)
        return hello

    async def call(
        self,
        op: str,
        fields: Mapping[str, Any] | None = None,
        *,
        ranks: Collection[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[dict[str, Any], ...]:
        """Give the same order to ranks (all by default) side by side and wait for every answer, in order of rank.

        Raises:
            IopError: the first refusal, after all have answered.
            Unavailable: a rank is lost, or did not answer in time (then all are ended).
        """
        return await self.answers(self.order(op, fields, ranks=ranks), timeout_s=timeout_s)

    def order(
        self, op: str, fields: Mapping[str, Any] | None = None, *, ranks: Collection[int] | None = None
    ) -> list[asyncio.Future[dict[str, Any]]]:
        """Give the order without waiting; ``answers`` waits for what this returns."""
        frame = encode_frame({"op": op, **(fields or {})})
        chosen = range(self.count) if ranks is None else sorted(ranks)
        return [self._channels[rank].order(frame) for rank in chosen]

    async def answers(
        self, orders: Sequence[asyncio.Future[dict[str, Any]]], *, timeout_s: float | None = None
    ) -> tuple[dict[str, Any], ...]:
        """Wait for the answers to an order; raises as ``call`` does."""
        try:
            async with asyncio.timeout(timeout_s or self._answer_timeout_s):
                # Shielded: who gives up waiting must not take the answer from whoever waits for it again.
                found = [await asyncio.shield(order) for order in orders]
        except TimeoutError as exc:
            silent = [str(rank) for rank, channel in enumerate(self._channels) if channel.is_awaited]
            self._lose(f"Rank {', '.join(silent)} did not answer in time.")
            raise _lost(self._why) from exc
        except Unavailable as exc:
            raise _lost(self._why) from exc  # all end with the first: that is the one to name
        for message in found:
            _checked(message)
        return tuple(found)

    def silent_for(self, seconds: float) -> frozenset[int]:
        """Ranks that have owed an answer for so long and said nothing meanwhile."""
        now = asyncio.get_running_loop().time()
        return frozenset(
            rank for rank, channel in enumerate(self._channels) if channel.silent_s(now) >= seconds
        )

    def close(self) -> None:
        """End all ranks now and wait for the kernel to say so; idempotent. They hold nothing that needs saving."""
        self._is_closed = True
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for channel in self._channels:
            channel.close()
        while self._fds:
            os.close(self._fds.pop())

    def _own(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _on_channel_lost(self, rank: int) -> None:
        if not self._is_closed:
            self._lose(f"Rank {rank} ended.")

    def _lose(self, why: str) -> None:
        if self._is_closed:
            return
        self._why = why
        _log.error("rank.lost why=%s", why)
        self.close()
        self._on_lost(why)


async def _all_loaded(hellos: Sequence[asyncio.Future[dict[str, Any]]]) -> None:
    """Wait for every rank's first word; a rank that says what is wrong counts more than those that end with it."""
    lost: Unavailable | None = None
    for hello in hellos:
        try:
            message = await hello
        except Unavailable as exc:
            lost = exc
        else:
            _checked(message)
    if lost is not None:
        raise lost


def _lost(why: str = "") -> Unavailable:
    return Unavailable(
        f"{why or 'A rank of the engine is gone.'} The engine serves nothing until it is restarted.",
        reason="RANK_LOST",
    )


def _checked(message: Mapping[str, Any]) -> None:
    if message.get("ok") is True:
        return
    kind = _ERRORS.get(str(message.get("code")), Internal)
    reason = message.get("reason")
    raise kind(
        str(message.get("message", "A rank answered without sense.")), reason=str(reason) if reason else None
    )
