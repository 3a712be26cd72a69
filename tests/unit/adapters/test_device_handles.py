"""A trainer's device handles, as PyTorch made them, taken apart and put together anew."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.adapters.device_handles import SharedWeights
from iop.adapters.gate_control import StepFailed
from iop.adapters.handle_pickle import Call, Global, read, written
from iop.admin.enums import AdminErrorCode, TensorDtype
from iop.admin.requests import IpcSource, IpcTensor, TensorSpec

FILE = Path(__file__).parents[2] / "data" / "engines" / "handles" / "torch.json"
HANDLES = {
    name: base64.b64decode(text)
    for name, text in json.loads(FILE.read_text(encoding="utf-8"))["handles"].items()
}
SPEC = TensorSpec(name="head", dtype=TensorDtype.BFLOAT16, shape=(2, 3))


def weights(handle: bytes, *, ranks: int = 1, spec: TensorSpec = SPEC) -> SharedWeights:
    return SharedWeights.read(
        IpcSource(tensors=(IpcTensor(spec=spec, handle=handle),)), ranks=ranks, current={}
    )


def tampered(**fields: object) -> bytes:
    """A handle with other fields, by their place."""
    told = read(HANDLES["one device"])
    assert isinstance(told, dict)
    values = list(told["GPU-1"])
    for place, value in fields.items():
        values[int(place.removeprefix("f"))] = value
    return written({"GPU-1": tuple(values)})


def unlisted(pickle: bytes) -> tuple[object, ...]:
    """A list is read by nobody here: as a tuple it is."""
    assert (pickle[:4], pickle[-2:]) == (b"\x80\x04](", b"e.")
    told = read(pickle[:2] + b"(" + pickle[4:-2] + b"t.")
    assert isinstance(told, tuple)
    return told


@pytest.mark.clause("AD-45")
def test_what_pytorch_says_of_a_tensor_is_what_the_engine_gets() -> None:
    made = weights(HANDLES["two devices"], ranks=2)
    (of_the_tensor,) = unlisted(made.by_device())
    assert read(HANDLES["two devices"]) == of_the_tensor


@pytest.mark.clause("AD-45")
def test_a_parameter_goes_on_as_a_plain_tensor_of_its_storage() -> None:
    spec = TensorSpec(name="head", dtype=TensorDtype.FLOAT32, shape=(2, 3))
    (tensor,) = weights(HANDLES["a parameter"], spec=spec).tensors
    assert tensor.places["GPU-1"].storage == Global("torch.storage", "TypedStorage")
    assert b"Parameter" not in weights(HANDLES["a parameter"], spec=spec).by_device()


@pytest.mark.clause("AD-45")
def test_a_part_of_a_tensor_keeps_its_strides_and_offset() -> None:
    spec = replace(SPEC, shape=(2, 2))
    (tensor,) = weights(HANDLES["a part"], spec=spec).tensors
    assert (tensor.places["GPU-1"].strides, tensor.places["GPU-1"].offset) == ((3, 1), 1)


@pytest.mark.clause("AD-45")
def test_sglang_gets_names_with_tensors_by_the_devices_id() -> None:
    ((name, tensor),) = unlisted(weights(HANDLES["one device"]).named_tensors())
    told = read(HANDLES["one device"])
    assert isinstance(told, dict)
    assert name == "head"
    assert isinstance(tensor, Call)
    assert tensor.function == Global("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
    assert tensor.arguments == (*told["GPU-1"][:6], "GPU-1", *told["GPU-1"][7:])


@pytest.mark.clause("AD-45", "AD-05")
@pytest.mark.parametrize(
    ("handle", "words"),
    [
        (HANDLES["code"], "other fields"),
        (HANDLES["protocol 2"], "protocol 4"),
        (HANDLES["no device"], "without devices"),
        (HANDLES["two devices"], "is on 2 devices"),
        (b"", "protocol 4"),
        (HANDLES["one device"][:-1], "protocol 4"),
        (HANDLES["one device"] + bytes(20_000), "more than"),
        (written([1]), "protocol 4"),
        (written({"GPU-1": ()}), "other fields"),
        (tampered(f0=Global("os", "system")), "other fields"),
        (tampered(f1=Call(Global("os", "system"), ((2, 3),))), "other fields"),
        (tampered(f4=Global("builtins", "eval")), "other fields"),
        (tampered(f5=Global("os", "bfloat16")), "other fields"),
        (tampered(f6=True), "other fields"),
        (tampered(f7=b""), "other fields"),
        (tampered(f7=bytes(257)), "other fields"),
        (tampered(f8=-1), "other fields"),
        (tampered(f7=b"\1e" + bytes(28)), "without expandable_segments"),
        (tampered(f11=b"/../etc/passwd"), "other fields"),
        (tampered(f11=b"etc"), "other fields"),
        (tampered(f14=1), "other fields"),
        (tampered(f5=Global("torch", "float32")), "not its shape and type"),
        (tampered(f1=Call(Global("torch", "Size"), ((3, 2),)), f2=(2, 1)), "not its shape and type"),
        (tampered(f8=11), "beyond its memory"),
        (tampered(f3=252), "beyond its memory"),
        (tampered(f2=(300, 1)), "beyond its memory"),
    ],
)
def test_any_other_handle_is_refused_and_nothing_of_it_is_run(handle: bytes, words: str) -> None:
    with pytest.raises(StepFailed, match=words) as refused:
        weights(handle)
    assert refused.value.code is AdminErrorCode.SOURCE_MISMATCH
    assert not refused.value.changed


@pytest.mark.clause("AD-45")
def test_a_tensor_that_just_fits_into_its_memory_is_taken() -> None:
    assert weights(tampered(f7=b"\1c" + bytes(64))).tensors
    assert weights(tampered(f7=b"\1e" + bytes(62))).tensors, "of an older PyTorch: any bytes"
    assert weights(tampered(f8=12)).tensors
    assert weights(tampered(f3=250)).tensors


@pytest.mark.clause("AD-45")
def test_tensors_that_the_engines_checkpoint_has_not_so_are_refused() -> None:
    source = IpcSource(tensors=(IpcTensor(spec=SPEC, handle=HANDLES["one device"]),))
    for layout in ({"tail": ("BF16", (2, 3))}, {"head": ("BF16", (4, 4))}):
        with pytest.raises(StepFailed):
            SharedWeights.read(source, ranks=1, current=layout)


@pytest.mark.clause("AD-45")
@given(place=st.integers(min_value=0), byte=st.integers(min_value=0, max_value=255), cut=st.integers(0, 300))
def test_a_damaged_handle_is_read_or_refused_and_nothing_else(place: int, byte: int, cut: int) -> None:
    handle = bytearray(HANDLES["one device"])
    handle[place % len(handle)] = byte
    with contextlib.suppress(StepFailed):
        weights(bytes(handle[: len(handle) - cut]))


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.clause("AD-45")
@given(DATA)
def test_what_is_written_is_read_again(value: object) -> None:
    assert read(written(value)) == value


@pytest.mark.clause("AD-45")
@pytest.mark.parametrize("protocol", [4, 5])
def test_what_stands_in_it_many_times_is_read_wherever_it_stood_first(protocol: int) -> None:
    words = [f"word {number}" for number in range(600)]
    value = {word: (words[-1], words[3], number, True, b"x") for number, word in enumerate(words)}
    assert read(pickle.dumps(value, protocol=protocol)) == value


def test_only_plain_data_is_written() -> None:
    with pytest.raises(TypeError, match="float"):
        written((1.5,))
