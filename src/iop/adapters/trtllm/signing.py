"""How requests to TensorRT-LLM's memory routes are signed. Pure.

The engine takes them only with a keyed digest over method, path, time, a nonce and the exact body. What it checks is
the digest; time and nonce are fresh all the same, for the day it checks those too.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from iop.wire.messages import Header

SCHEME: Final = "trtllm-runtime-control-v1"
HEADER: Final = b"x-trtllm-runtime-control-"


def signed(key: str, *, method: str, path: str, body: bytes, unix_s: int, nonce: str) -> list[Header]:
    """The three headers of one request.

    Args:
        key: shared with the engine's process.
        path: without a query.
        nonce: 32 hexadecimal digits, new for each try.
    """
    text = "\n".join((SCHEME, method, path, str(unix_s), nonce, "")).encode() + body
    digest = hmac.new(key.encode(), text, hashlib.sha256).hexdigest()
    return [
        (HEADER + b"auth", b"sha256=" + digest.encode()),
        (HEADER + b"timestamp", str(unix_s).encode()),
        (HEADER + b"nonce", nonce.encode()),
    ]
