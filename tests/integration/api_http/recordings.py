"""Answers of real engines, as they came off the socket, and what may be done to them."""

from __future__ import annotations

import base64
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parents[2] / "data" / "exchanges"


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request and the raw answer to it. ``template`` has MODEL where the model's name goes, quotes included."""

    engine: str
    name: str
    path: str
    template: str
    answer: bytes

    def request(self, model: str) -> bytes:
        return self.template.replace("MODEL", json.dumps(model)).encode()

    @property
    def is_stream(self) -> bool:
        return b"text/event-stream" in self.answer.partition(b"\r\n\r\n")[0]

    @property
    def status(self) -> int:
        return int(self.answer[9:12])

    @property
    def body(self) -> bytes:
        """Without its framing."""
        head, _, rest = self.answer.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" not in head.lower():
            return rest
        body = b""
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if not (length := int(size, 16)):
                return body
            body += rest[:length]
            rest = rest[length + 2 :]

    def header(self, name: bytes) -> bytes | None:
        match = re.search(rb"(?im)^" + name + rb":[ \t]*([^\r\n]*)", self.answer.partition(b"\r\n\r\n")[0])
        return None if match is None else match[1]


def recorded() -> list[Exchange]:
    """All of them, in a stable order."""
    return [
        Exchange(
            engine=file.stem,
            name=each["name"],
            path=each["path"],
            template=each["request"],
            answer=base64.b64decode(each["answer"]),
        )
        for file in sorted(DIRECTORY.glob("*.json"))
        for each in json.loads(file.read_text())["exchanges"]
    ]


def pieces(data: bytes, rng: random.Random, most: int = 8) -> list[bytes]:
    """The same bytes in random parts."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(most)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut it, or change, drop, repeat or swap some bytes of it, wherever they are: header, framing or body."""
    at = rng.randrange(len(data))
    match rng.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 4)) + data[at + rng.randrange(4) :]
        case 2:
            return data[:at] + data[at + rng.randrange(1, 20) :]
        case 3:
            return data[:at] + data[max(0, at - 20) :]
        case 4:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case _:
            end = min(len(data), at + rng.randrange(2, 40))
            return data[:at] + data[at:end][::-1] + data[end:]
