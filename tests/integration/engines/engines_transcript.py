"""What an engine was asked and what it answered: kept without what changes from run to run, and compared by shape.

A transcript is a file of `tests/data/engines`. Only a real engine writes one (`make engines-test RECORD=1`); the
stand-ins of `make test` answer from it, and every run of `make engines-test` compares the engine with it.

Kept is each answer's status, type and body. Ids, times, rates, addresses and directories of the machine give way to
fixed ones of the same kind; headers, and so credentials, are not kept at all. The **shape** of an answer is what a
client can rely on: status, media type, keys, kinds of values, the values that name a state, and the words of an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

DATA: Final = Path(__file__).parents[2] / "data" / "engines"

RECORDS: Final = os.environ.get("ENGINES_RECORD", "") == "1"
"""Whether real engines write their transcripts anew instead of being compared with them."""

_IDS: Final = re.compile(
    r"\b(chatcmpl-tool|chatcmpl|cmpl|modelperm|call|resp|msg|rs|fc)([-_])[0-9A-Za-z]{8,}(?:-[0-9a-f]{4,})*"
)
_BARE_ID: Final = re.compile(r"[0-9A-Za-z]{32}")
_ADDRESS: Final = re.compile(r"127\.0\.0\.1:\d+")
_FIXED: Final[Mapping[str, object]] = {
    "created": 1_790_000_000,
    "created_at": 1_790_000_000,
    "completed_at": 1_790_000_000,
    "size": 1_000_000,
    "pid": 1,
    "port": 8080,
    "system_fingerprint": "fingerprint",
}
_START: Final = re.compile(r"^(process_start_time_seconds) \S+$", re.MULTILINE)
_RATES: Final = re.compile(r"(_ms|_per_second|_per_token_ms)$")

_TELLING: Final = frozenset(
    {"status", "state", "value", "role", "finish_reason", "stop_reason", "type", "object", "owned_by", "code"}
)
"""Keys whose words are part of the shape."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One question and its answer.

    Attributes:
        name: unique in its transcript.
        path: with its query.
        request: the JSON that was sent; `None` for none.
    """

    name: str
    method: str
    path: str
    request: Any = None
    status: int
    content_type: str
    body: str

    def as_json(self) -> dict[str, Any]:
        """For the file; requests without a body have no such key."""
        told = {key: getattr(self, key) for key in self.__dataclass_fields__}
        if self.request is None:
            del told["request"]
        return told


@dataclass
class Transcript:
    """One file of them."""

    engine: str
    answers: list[Exchange] = field(default_factory=list)

    @staticmethod
    def load(name: str) -> Transcript:
        """From the tree."""
        content = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
        return Transcript(content["engine"], [Exchange(**each) for each in content["answers"]])

    def save(self, name: str) -> None:
        """Into the tree."""
        content = {"engine": self.engine, "answers": [each.as_json() for each in self.answers]}
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (DATA / f"{name}.json").write_text(text + "\n", encoding="utf-8")

    def shapes(self) -> dict[str, object]:
        """By the exchange's name."""
        return {each.name: shape_of(each) for each in self.answers}

    def differences(self, other: Transcript) -> list[str]:
        """How another engine's answers to the same questions differ in shape, one line each."""
        mine, theirs = self.shapes(), other.shapes()
        lines = [f"{name}: not asked any more" for name in mine if name not in theirs]
        lines += [f"{name}: asked anew" for name in theirs if name not in mine]
        for name in mine:
            if name in theirs and mine[name] != theirs[name]:
                lines += _explained(name, mine[name], theirs[name])
        return lines


class Cleaner:
    """Puts fixed values for those that change from run to run.

    Args:
        places: directories of this machine, by what they are called in the transcript; longest first.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = sorted(places.items(), key=lambda each: -len(each[0]))

    def words(self, text: str) -> str:
        """Of plain text."""
        for place, name in self._places:
            text = text.replace(place, name)
        return _ADDRESS.sub("127.0.0.1:8080", _IDS.sub(r"\g<1>\g<2>0000000000000000", text))

    def value(self, value: Any, key: str = "") -> Any:
        """Of JSON."""
        if isinstance(value, dict):
            return {name: self.value(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self.value(each, key) for each in value]
        if key in _FIXED and value is not None:
            return _FIXED[key]
        if isinstance(value, str):
            return "0" * 32 if _BARE_ID.fullmatch(value) else self.words(value)
        if isinstance(value, float) or (_RATES.search(key) and isinstance(value, int)):
            return 1.0 if _RATES.search(key) else value
        return value

    def body(self, body: bytes, content_type: str) -> str:
        """Of an answer, by its media type."""
        text = body.decode("utf-8", "replace")
        if content_type.startswith("application/json") and text:
            return json.dumps(self.value(json.loads(text)), separators=(",", ":"), ensure_ascii=False)
        if content_type.startswith("text/event-stream"):
            return "\n".join(self._line(line) for line in text.split("\n"))
        return _START.sub(r"\1 1.79600631478e+09", self.words(text))

    def _line(self, line: str) -> str:
        if not line.startswith("data: {"):
            return self.words(line)
        told = self.value(json.loads(line[6:]))
        return "data: " + json.dumps(told, separators=(",", ":"), ensure_ascii=False)


def shape_of(exchange: Exchange) -> dict[str, object]:
    """What a client can rely on of one answer."""
    kind = exchange.content_type.partition(";")[0]
    told: dict[str, object] = {"status": exchange.status, "content_type": kind}
    if exchange.status >= 400:
        # What our code reads in a refusal are its words.
        told["body"] = exchange.body
    elif kind == "application/json" and exchange.body:
        told["body"] = _shape(json.loads(exchange.body))
    elif kind == "text/event-stream":
        events = [_shape(event) for event in _events(exchange.body)]
        told["events"] = sorted({json.dumps(event, sort_keys=True) for event in events})
        told["done"] = exchange.body.rstrip().endswith("data: [DONE]")
    elif exchange.path.startswith("/metrics"):
        told["families"] = sorted(set(re.findall(r"^# TYPE (\S+ \S+)$", exchange.body, re.MULTILINE)))
        told["samples"] = sorted(line for line in exchange.body.split("\n") if line and line[0] != "#")
    else:
        told["body"] = exchange.body
    return told


def _events(body: str) -> Iterator[Any]:
    for line in body.split("\n"):
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def _shape(value: Any, key: str = "") -> object:
    if isinstance(value, dict):
        return {name: _shape(each, name) for name, each in sorted(value.items())}
    if isinstance(value, list):
        each = {json.dumps(_shape(item, key), sort_keys=True) for item in value}
        return [json.loads(item) for item in sorted(each)]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return "a number"
    return value if key in _TELLING else "words"


def _explained(name: str, mine: object, theirs: object, at: str = "") -> list[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        lines = []
        for key in sorted({*mine, *theirs}):
            if mine.get(key) != theirs.get(key):
                lines += _explained(name, mine.get(key), theirs.get(key), f"{at}.{key}")
        return lines
    if isinstance(mine, list) and isinstance(theirs, list):
        gone, new = (
            [each for each in one if each not in other] for one, other in ((mine, theirs), (theirs, mine))
        )
        return [
            f"{name}: {at} {word} {each!r:.600}"
            for word, many in (("lost", gone), ("got", new))
            for each in many
        ]
    return [f"{name}: {at or 'answer'} was {mine!r:.300}, is {theirs!r:.300}"]
