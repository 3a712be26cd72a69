"""A stand-in that answers with what real engines were recorded to answer, and notes what it is asked.

Recordings are the transcripts in `tests/data/engines`. A test says which recording stands for which route, or gives a
function; routes that it does not name answer as the engine does for unknown ones. That stand-ins say what the
engines said is checked by `test_engine_stand_ins.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from engines_transcript import Exchange, Transcript

from iop.testing.adapter_suite import ScriptedUpstream, UpstreamRequest


@dataclass(frozen=True)
class Answer:
    """Status, type and body as they came over the wire."""

    status: int
    body: bytes
    content_type: str = "application/json"

    @staticmethod
    def of(value: object, status: int = 200) -> Answer:
        """JSON of our own, for what a recording only hints at."""
        return Answer(status, json.dumps(value).encode())


class Recordings:
    """One file of recorded answers, by name."""

    def __init__(self, name: str) -> None:
        exchanges = Transcript.load(name).answers
        self._answers = {each.name: answer_of(each) for each in exchanges}
        self._asked: dict[str, Answer] = {}
        for each in exchanges:
            self._asked.setdefault(_question(each.method, each.path, each.request), answer_of(each))

    def __getitem__(self, name: str) -> Answer:
        return self._answers[name]

    def matching(self, words: str) -> dict[str, Answer]:
        """Those whose name has these words."""
        return {name: answer for name, answer in self._answers.items() if words in name}

    def to(self, method: str, path: str, body: Any) -> Answer | None:
        """What was answered to this very question, the first time."""
        return self._asked.get(_question(method, path, body))


def answer_of(exchange: Exchange) -> Answer:
    """As it came over the wire."""
    return Answer(exchange.status, exchange.body.encode(), exchange.content_type)


def _question(method: str, path: str, body: Any) -> str:
    return f"{method} {path} {json.dumps(body, sort_keys=True)}"


Handler = Callable[["Asked"], Answer]


@dataclass(frozen=True)
class Asked:
    """One request that came."""

    method: str
    path: str
    query: dict[str, str]
    body: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class ReplayEngine:
    """Routes by ``METHOD /path``.

    Attributes:
        unknown: the answer of routes that nobody named.
        recorded: if set, answers what has no route but was asked just so when it was recorded.
    """

    unknown: Answer
    recorded: Recordings | None = None
    routes: dict[str, Answer | Handler] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def upstream(self) -> ScriptedUpstream:
        """The server of it."""
        return ScriptedUpstream(self._answer)

    def posts(self) -> list[str]:
        """What was told, rather than asked."""
        return [each.path for each in self.asked if each.method == "POST"]

    def forget(self) -> None:
        """Begin to note anew."""
        self.asked.clear()

    async def _answer(self, request: UpstreamRequest) -> None:
        parts = urlsplit(request.path)
        body = json.loads(request.body) if request.body else None
        asked = Asked(request.method, parts.path, dict(parse_qsl(parts.query)), body)
        self.asked.append(asked)
        route = self.routes.get(str(asked))
        if route is None and self.recorded is not None:
            route = self.recorded.to(request.method, request.path, body)
        if route is None:
            route = self.unknown
        answer = route(asked) if callable(route) else route
        await request.connection.write(
            b"HTTP/1.1 %d X\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (answer.status, answer.content_type.encode(), len(answer.body), answer.body)
        )
