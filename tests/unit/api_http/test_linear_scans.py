"""Hostile text must cost a scan by its length, not by its square: a short body would hold up every stream (SF-12)."""

from __future__ import annotations

import time

import pytest

from iop.api.http.errors import Dialect
from iop.api.http.splice import JsonWatch, brackets_of, exceeds_depth
from iop.api.http.sse import SseWatcher
from iop.edge.scrub import scrub
from iop.obs.redaction import clean_text

GROWTH = 8
"""A scan that is linear takes 8 times as long for 8 times the text, one that is quadratic 64 times."""


def watch_json(text: bytes) -> None:
    JsonWatch().feed(text)


def watch_stream(text: bytes) -> None:
    SseWatcher(Dialect.CHAT, choices=1, event_bytes_max=1 << 30).feed(text)


SCANS = {
    "depth": lambda text: exceeds_depth(b"[" * 200 + text, 100),
    "brackets": brackets_of,
    "close-delimited": watch_json,
    "stream": watch_stream,
    "logs": lambda text: clean_text(text.decode("latin-1")),
    "addresses": lambda text: scrub(text.decode("latin-1")),
}
TEXTS = {
    "escaped quotes in a string without end": lambda n: b'{"a":"' + b'\\"' * n,
    "quotes": lambda n: b'"' * (n | 1),
    "backslashes": lambda n: b'"' + b"\\" * (n | 1),
    "spaces in signs": lambda n: b'"finish_reason"' + b" " * n + b"\n\n",
    "signs": lambda n: b'"finish_reason"' * n + b"\n\n",
    "line ends": lambda n: b"\n\r" * n,
    "colons": lambda n: b"://a:" * n,
    "digits and dots": lambda n: b"1." * n,
    "words": lambda n: b"bearer " * n,
}


@pytest.mark.clause("SF-12", "EN-100")
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_a_scan_costs_what_its_text_is_long(scan, text):
    short, long = text(1_000), text(1_000 * GROWTH)
    assert _shortest(scan, long) < 3 * GROWTH * max(_shortest(scan, short), 20_000)


def _shortest(scan, text) -> int:
    """CPU nanoseconds of the quickest of some scans: what else runs on the machine does not count."""
    took = []
    for _ in range(5):
        begun = time.thread_time_ns()
        scan(text)
        took.append(time.thread_time_ns() - begun)
    return min(took)
