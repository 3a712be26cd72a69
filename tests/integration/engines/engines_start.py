"""Starting engines: a free port, and waiting until somebody serves there."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request


def wait_for_http(url: str, process: subprocess.Popen[bytes], *, within_s: float) -> None:
    """Until it answers 200."""
    deadline = time.monotonic() + within_s
    while True:
        assert process.poll() is None, "the engine ended while it started"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        assert time.monotonic() < deadline, "the engine did not start in time"
        time.sleep(0.05)


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
