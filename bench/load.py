"""A load generator: keep-alive connections in a closed loop, for a fixed time; counts requests, events and errors.

Run: ``python bench/load.py HOST:PORT MODEL SECONDS CONNECTIONS [CHUNKS INTERVAL_US SIZE]``; prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_PROMPT = "Tell me about the weather on the coast. " * 25


@dataclass
class Tally:
    """What was seen."""

    latencies_s: list[float] = field(default_factory=list)
    first_byte_s: list[float] = field(default_factory=list)
    events: int = 0
    errors: int = 0


class Caller(asyncio.Protocol):
    """One connection that sends the next request when the answer before is whole."""

    def __init__(self, request: bytes, tally: Tally, events_wanted: int, deadline: float) -> None:
        self._request, self._tally, self._deadline = request, tally, deadline
        self._events_wanted = events_wanted
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        self._buffer = b""
        self._events = 0
        self._needed = -1
        self._is_stream = False
        self._begun = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._is_stream:
            self._events += data.count(b"data: ")
            self._buffer = self._buffer[-8:] + data
            if self._buffer.endswith(b"0\r\n\r\n"):
                self._finish(self._events >= self._events_wanted)
            return
        self._buffer += data
        if self._needed < 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._tally.first_byte_s.append(time.perf_counter() - self._begun)
            if not self._buffer.startswith(b"HTTP/1.1 200"):
                self._finish(False)
                return
            length = _LENGTH.search(self._buffer, 0, end + 2)
            if length is None:
                self._is_stream = True
                rest, self._buffer = self._buffer[end + 4 :], b""
                self.data_received(rest)
                return
            self._needed = end + 4 + int(length[1])
        if len(self._buffer) >= self._needed:
            self._finish(True)

    def _finish(self, is_good: bool) -> None:
        now = time.perf_counter()
        if is_good:
            self._tally.latencies_s.append(now - self._begun)
            self._tally.events += self._events
        else:
            self._tally.errors += 1
        if not is_good or now >= self._deadline:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def request_of(host: str, model: str, stream: tuple[int, int, int] | None) -> bytes:
    """The bytes of one chat request of some 1,000 bytes of prompt."""
    content = _PROMPT
    if stream is not None:
        content += " mock:chunks={},interval_us={},size={}".format(*stream)
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    if stream is not None:
        body["stream"] = True
    text = json.dumps(body, separators=(",", ":")).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(text)}\r\n\r\n"
    ).encode() + text


async def run(
    address: str, model: str, seconds: float, connections: int, stream: tuple[int, int, int] | None
) -> dict[str, Any]:
    """Load ``address`` and tell what was seen."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    tally = Tally()
    begun = time.perf_counter()
    request = request_of(address, model, stream)
    wanted = stream[0] if stream else 0
    callers = [
        (
            await loop.create_connection(
                lambda: Caller(request, tally, wanted, begun + seconds), host, int(port)
            )
        )[1]
        for _ in range(connections)
    ]
    async with asyncio.timeout(seconds + 60):
        for caller in callers:
            await caller.done
    elapsed = time.perf_counter() - begun
    latencies = sorted(tally.latencies_s) or [0.0]
    return {
        "requests": len(tally.latencies_s),
        "events": tally.events,
        "errors": tally.errors,
        "seconds": elapsed,
        "p50_ms": statistics.median(latencies) * 1000,
        "p99_ms": latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))] * 1000,
        "first_byte_p50_ms": statistics.median(tally.first_byte_s or [0.0]) * 1000,
    }


if __name__ == "__main__":
    args = sys.argv[1:]
    pattern = (int(args[4]), int(args[5]), int(args[6])) if len(args) > 4 else None
    print(json.dumps(uvloop.run(run(args[0], args[1], float(args[2]), int(args[3]), pattern))))
