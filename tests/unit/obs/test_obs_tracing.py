"""W3C trace context: what is read, what is passed on, what counts as none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.obs.tracing import parse_trace, passed_trace, read_trace, with_trace

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"

MALFORMED = [
    "",
    "00",
    PARENT[:-1],
    PARENT + "0",
    PARENT + "-extra",
    PARENT.upper(),
    f"ff-{TRACE}-{SPAN}-01",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-{SPAN}-0g",
    f"00_{TRACE}-{SPAN}-01",
    f" {PARENT}",
    PARENT + "\t",
    f"00-{TRACE[:-1]}é-{SPAN}-01",
    "00-" + "a" * 100_000,
    f"01-{TRACE}-{SPAN}-01x",
]


@pytest.mark.clause("SF-13")
@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_parent_counts_as_none(text: str) -> None:
    assert parse_trace(text, "vendor=1") is None
    assert passed_trace([(b"traceparent", text.encode()), (b"tracestate", b"vendor=1")]) == []


@pytest.mark.clause("SF-13")
def test_a_well_formed_parent_is_read_and_said_again() -> None:
    context = parse_trace(PARENT, "vendor=1,other=x y")
    assert context is not None
    assert (context.trace_id, context.span_id, context.flags) == (TRACE, SPAN, 1)
    assert context.fields() == [(b"traceparent", PARENT.encode()), (b"tracestate", b"vendor=1,other=x y")]


@pytest.mark.clause("SF-13")
def test_a_newer_version_is_read_as_far_as_ours_goes() -> None:
    context = parse_trace(f"01-{TRACE}-{SPAN}-03-what-ever")
    assert context is not None and context.traceparent == f"00-{TRACE}-{SPAN}-03"


@pytest.mark.clause("SF-13")
def test_two_parents_are_none() -> None:
    field = (b"traceparent", PARENT.encode())
    assert read_trace([field]) is not None
    assert read_trace([field, field]) is None
    assert passed_trace([field, field]) == []


@pytest.mark.clause("SF-13")
@pytest.mark.parametrize("state", ["a=" + "x" * 600, ",".join(["a=1"] * 33), "a=é", "a=\x00"])
def test_a_bad_state_is_dropped_and_the_parent_kept(state: str) -> None:
    context = parse_trace(PARENT, state)
    assert context is not None and context.state == ""
    fields = [(b"traceparent", PARENT.encode()), (b"tracestate", state.encode("latin-1"))]
    assert passed_trace(fields) == fields[:1]


@pytest.mark.clause("SF-13")
def test_several_state_fields_are_one_list_and_pass_as_they_came() -> None:
    fields = [(b"tracestate", b"a=1"), (b"traceparent", PARENT.encode()), (b"tracestate", b"b=2")]
    context = read_trace(fields)
    assert context is not None and context.state == "a=1,b=2"
    assert passed_trace(fields) == fields


@pytest.mark.clause("SF-13")
def test_the_next_hop_gets_one_parent() -> None:
    context = parse_trace(PARENT)
    assert context is not None
    told = with_trace([(b"TraceParent", b"rubbish"), (b"a", b"b"), (b"tracestate", b"c=d")], context)
    assert told == [(b"a", b"b"), (b"traceparent", PARENT.encode())]


@pytest.mark.clause("SF-13")
@given(parent=st.binary(max_size=80), state=st.binary(max_size=80))
def test_no_bytes_break_the_reader(parent: bytes, state: bytes) -> None:
    context = read_trace([(b"traceparent", parent), (b"tracestate", state)])
    assert context is None or b"\r" not in b"".join(value for _, value in context.fields())
