"""How a request tells which Edges it has come through."""

from __future__ import annotations

import pytest
from msgspec import structs

from iop.core.ids import RequestId
from iop.edge.calls import DispatchRequest
from iop.edge.chain import HOPS_MAX, has_looped, hop_headers, hop_metadata, read_via

pytestmark = pytest.mark.clause("SF-24")


def request(via: str = "") -> DispatchRequest:
    return DispatchRequest(request_id=RequestId("r-1"), model="fast", operation="chat_completions", via=via)


@pytest.mark.parametrize(
    ("via", "is_loop"),
    [
        ("", False),
        ("other", False),
        ("me", True),
        ("other, me", True),
        ("other,me,third", True),
        ("meme", False),
        (" me ", True),
        (", ".join(f"e{n}" for n in range(HOPS_MAX - 1)), False),
        (", ".join(f"e{n}" for n in range(HOPS_MAX)), True),
    ],
)
def test_a_loop_is_ones_own_name_or_too_many_others(via: str, is_loop: bool) -> None:
    assert has_looped(via, "me") is is_loop


def test_an_edge_without_a_name_sees_no_loop_and_says_nothing() -> None:
    headers = [(b"accept", b"x")]
    assert not has_looped("", "")
    assert list(hop_headers(headers, "", "")) == headers


def test_each_edge_adds_its_name_once() -> None:
    first = hop_headers([(b"accept", b"x")], "", "a")
    assert list(first) == [(b"accept", b"x"), (b"iop-via", b"a")]
    second = hop_headers([*first], "a", "b")
    assert list(second) == [(b"accept", b"x"), (b"iop-via", b"a, b")]
    assert read_via([value for name, value in second if name == b"iop-via"]) == "a, b"


def test_a_run_takes_the_callers_request_id_with_it() -> None:
    told = hop_metadata({"mine": "1"}, request("a"), "b")
    assert told == {"mine": "1", "iop-request-id": "r-1", "iop-via": "a, b"}


@pytest.mark.clause("SF-16", "SF-21")
def test_a_run_takes_the_callers_priority_with_it() -> None:
    urgent = structs.replace(request(), priority=7)
    assert hop_metadata({}, urgent, "b")["iop-priority"] == "7"
    assert hop_metadata({"iop-priority": "900"}, urgent, "b")["iop-priority"] == "900", (
        "as it came, unclamped"
    )


def test_what_a_stranger_says_is_bounded_and_cannot_end_a_line() -> None:
    told = read_via([b"a\r\nx: y", "b\x00\x7fé", b"c" * 10_000])
    assert len(told) <= 512
    assert told.isascii()
    assert told.isprintable()
