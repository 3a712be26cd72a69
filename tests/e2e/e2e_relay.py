"""A relay in a process of its own: `e2e_relay.py UPSTREAM FILE`; writes its address to FILE, cuts on SIGUSR1."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from iop.testing.tcp_relay import TcpRelay


async def main(upstream: str, told: Path) -> None:
    async with TcpRelay(upstream).running() as relay:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, relay.cut)
        scratch = told.with_suffix(".part")
        scratch.write_text(relay.address)
        scratch.rename(told)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
