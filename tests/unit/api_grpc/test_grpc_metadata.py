"""Routing metadata: exact forms in, typed hints out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.api.grpc.metadata import header_text, read_hints
from iop.api.grpc.ports import RoutingHints
from iop.core.errors import InvalidRequest

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.clause("SF-21")
def test_all_keys_of_the_contract_are_read_and_others_left_alone() -> None:
    hints = read_hints(
        [
            ("openengine-routing-key", "tenant 7/session"),
            ("openengine-target-dp-rank", "3"),
            ("openengine-priority", "-2"),
            ("traceparent", TRACE),
            ("tracestate", "a=1"),
            ("tracestate", "b=2"),
            ("openengine-something-new", "??"),
            ("user-agent", "x"),
        ]
    )
    assert hints == RoutingHints(
        routing_key="tenant 7/session",
        target_dp_rank=3,
        priority=-2,
        traceparent=TRACE,
        tracestate="a=1,b=2",
    )
    assert read_hints([]) == RoutingHints()


@pytest.mark.clause("SF-21")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("openengine-routing-key", ""),
        ("openengine-routing-key", " padded"),
        ("openengine-routing-key", "x" * 257),
        ("openengine-routing-key", "caf\xe9"),
        ("openengine-target-dp-rank", ""),
        ("openengine-target-dp-rank", "-1"),
        ("openengine-target-dp-rank", "01"),
        ("openengine-target-dp-rank", "1_0"),
        ("openengine-target-dp-rank", " 1"),
        ("openengine-target-dp-rank", "\u0661"),
        ("openengine-target-dp-rank", "4294967296"),
        ("openengine-target-dp-rank", "9" * 300),
        ("openengine-priority", "high"),
        ("openengine-priority", "1.0"),
        ("openengine-priority", "+1"),
        ("openengine-priority", "2147483648"),
        ("openengine-priority", "-2147483649"),
    ],
)
def test_a_malformed_key_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=key) as caught:
        read_hints([(key, value)])
    assert caught.value.reason == "MALFORMED_METADATA"


@pytest.mark.clause("SF-21")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("openengine-routing-key", "x" * 256),
        ("openengine-target-dp-rank", "0"),
        ("openengine-target-dp-rank", "4294967295"),
        ("openengine-priority", "2147483647"),
        ("openengine-priority", "-2147483648"),
    ],
)
def test_the_ends_of_each_range_are_taken_once_and_refused_twice(key: str, value: str) -> None:
    read_hints([(key, value)])
    with pytest.raises(InvalidRequest, match=key) as caught:
        read_hints([(key, value), (key, value)])
    assert caught.value.reason == "REPEATED_METADATA"


@pytest.mark.clause("SF-21")
def test_a_repeated_trace_parent_counts_as_none() -> None:
    assert read_hints([("traceparent", TRACE), ("traceparent", TRACE)]).traceparent == ""


@pytest.mark.clause("AD-33")
@given(st.text(max_size=40))
def test_any_version_label_becomes_a_header_that_can_travel(label: str) -> None:
    text = header_text(label)
    assert text.isascii()
    assert text == text.strip()
    assert text.isprintable()


def test_a_plain_label_stays_itself() -> None:
    assert header_text("step 12/a") == "step 12/a"
