"""Hostile handles: whatever their bytes, they are read as a device tensor or refused, and nothing of them is run."""

from __future__ import annotations

import base64
import json
import pickletools
import sys
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from iop.adapters.device_handles import HANDLE_BYTES_MAX, SharedWeights
from iop.adapters.gate_control import StepFailed
from iop.admin.enums import TensorDtype
from iop.admin.requests import IpcSource, IpcTensor, TensorSpec

FILE = Path(__file__).parents[2] / "data" / "engines" / "handles" / "torch.json"
HANDLES = [
    base64.b64decode(text) for text in json.loads(FILE.read_text(encoding="utf-8"))["handles"].values()
]
ONE = next(each for each in HANDLES if each.count(b"GPU-1") == 1)
SPEC = TensorSpec(name="head", dtype=TensorDtype.BFLOAT16, shape=(2, 3))

OPCODES = [each.code.encode("latin-1") for each in pickletools.opcodes]
PIECES = st.sampled_from(
    [*OPCODES, b"K\x05", b"h\x00", b"\x8c\x01a", b"\x8c\x03\xed\xa0\x80", b"C\x01x", b"\x8a\x02\xff\x00"]
)
WRITTEN = {"torch", "torch.storage", "torch.multiprocessing.reductions"} | {
    "Tensor",
    "Size",
    "UntypedStorage",
    "TypedStorage",
    "rebuild_cuda_tensor",
    "bfloat16",
    "head",
}


@st.composite
def spliced(draw: st.DrawFn) -> bytes:
    """A true handle with other instructions put in somewhere, over some of its own."""
    handle = draw(st.sampled_from(HANDLES))
    start = draw(st.integers(0, len(handle)))
    pieces = b"".join(draw(st.lists(PIECES | st.binary(max_size=4), max_size=6)))
    return handle[:start] + pieces + handle[start + draw(st.integers(0, 12)) :]


def read(handle: bytes) -> SharedWeights | None:
    """The weights, or nothing where they are refused; every other end is a failure."""
    source = IpcSource(tensors=(IpcTensor(spec=SPEC, handle=handle),))
    try:
        return SharedWeights.read(source, ranks=1, current={})
    except StepFailed as exc:
        refusal = exc
    assert not refusal.changed
    assert len(refusal.message.encode()) < 300
    return None


@pytest.mark.clause("AD-05", "AD-45")
@given(handle=spliced() | st.lists(PIECES, max_size=40).map(lambda each: b"\x80\x04" + b"".join(each) + b"."))
@example(ONE.replace(b"\x8c\x05GPU-1", b"\x8c\x03\xed\xa0\x80"))
@example(ONE.replace(b"bfloat16", b"\xed\xa0\x80\n\x1b[2m"))
@example(b"\x80\x04S'\\U'\n.")
def test_a_hostile_handle_is_refused_or_becomes_checked_fields_alone(handle: bytes) -> None:
    known = set(sys.modules)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights = read(handle)
    assert set(sys.modules) == known, "nothing is imported for it"
    if weights is None:
        return
    for written in (weights.by_device(), weights.named_tensors()):
        assert len(written) < 4096
        told = list(pickletools.genops(written))
        assert {code.name for code, _, _ in told} <= {
            *("PROTO", "EMPTY_LIST", "EMPTY_DICT", "MARK", "APPENDS", "SETITEMS", "TUPLE", "STOP"),
            *("BINUNICODE", "BINBYTES", "LONG1", "NEWTRUE", "NEWFALSE", "STACK_GLOBAL", "REDUCE"),
        }
        (tensor,) = weights.tensors
        texts = {argument for code, argument, _ in told if code.name == "BINUNICODE"}
        assert texts <= WRITTEN | set(tensor.places)


@pytest.mark.clause("AD-05", "AD-45")
@pytest.mark.parametrize(
    "handle",
    [
        b"\x80\x04" + b"N" * HANDLE_BYTES_MAX,
        b"\x80\x04)" + b"\x85" * (HANDLE_BYTES_MAX - 4) + b".",
        b"\x80\x04}\x94" + b"\x8c\x01ah\x00s" * 2700 + b".",
        b"\x80\x04)\x94" + b"(h\x00h\x00t\x94" * 2300 + b".",
        b"\x80\x04r\xff\xff\xff\x7f.",
        b"\x80\x04B\xff\xff\xff\xff.",
        b"\x80\x04\x8e" + b"\xff" * 8 + b".",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04L" + b"9" * 15_000 + b"L\n.",
        b"\x80\x04" + b"(" * 16_000 + b"t" * 300 + b".",
    ],
    ids=[
        "values",
        "nesting",
        "a cycle",
        "shared",
        "memo",
        "bytes",
        "more bytes",
        "a number",
        "digits",
        "marks",
    ],
)
def test_a_bomb_is_refused_within_the_time_that_its_bytes_take(handle: bytes) -> None:
    begin = time.process_time()
    assert read(handle) is None
    assert time.process_time() - begin < 2.0
