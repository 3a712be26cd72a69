"""Tensors in a trainer's device memory, as PyTorch shares them between processes (AD-45). Pure.

A trainer's handle is a pickle, and a pickle may hold any code. So none is passed on and none is ever loaded: the few
instructions that such a handle consists of are read here as data, anything else is refused, and what an engine gets is
written anew from the numbers that were found.

The handle of one tensor is what a trainer gets from PyTorch on its own::

    pickle.dumps({gpu_uuid: torch.multiprocessing.reductions.reduce_tensor(tensor)[1]})

with an entry for each device that an engine's rank runs on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn, TypeGuard

from iop.adapters.checkpoint import Layout
from iop.adapters.gate_control import StepFailed
from iop.adapters.handle_pickle import Call, Global, read, written
from iop.adapters.trainer_group import DTYPES
from iop.admin.enums import AdminErrorCode
from iop.admin.requests import IpcSource, IpcTensor
from iop.admin.shape import DTYPE_BYTES

HANDLE_BYTES_MAX: Final = 16 * 1024
"""A tensor on one device takes some 300 bytes."""

DEVICES_MAX: Final = 64
RANK_MAX: Final = 16
FIELDS: Final = 15
NAME_BYTES_MAX: Final = 256
"""Longest name of a memory or counter: PyTorch's have less than 100 bytes."""

PLAIN_MEMORY_BYTES: Final = 64
"""Name of a memory as CUDA has it, all of it in an older PyTorch; newer ones put a version and a sort before it."""

EXPANDABLE: Final = b"e"
"""The sort that the engine would fetch from the process that the name tells, whichever that is."""

_COUNTER: Final = re.compile(rb"(?:/[A-Za-z0-9_-]+)?")
"""A name in shared memory and no other path: the engine opens it."""

_TENSOR: Final = Global("torch", "Tensor")
_SIZE: Final = Global("torch", "Size")
_CLASSES: Final = (_TENSOR, Global("torch.nn.parameter", "Parameter"))
_STORAGES: Final = (Global("torch.storage", "UntypedStorage"), Global("torch.storage", "TypedStorage"))
_DTYPES: Final = tuple(Global("torch", name) for name in DTYPES.values())
_REBUILD: Final = Global("torch.multiprocessing.reductions", "rebuild_cuda_tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """One tensor in the memory of one device.

    Attributes:
        shape: in elements, as `strides` and `offset`.
        memory: which allocation; `memory_bytes` of it from `memory_offset` on are the tensor's storage.
        counter: where its users are counted, as `counter_offset`.
        event: what to wait for before it is read.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: Global
    dtype: str
    device: int
    memory: bytes
    memory_bytes: int
    memory_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """One tensor of a source.

    Attributes:
        dtype: as the engines name it.
        places: its memory on each device, by the device's id.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    places: Mapping[str, SharedTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """All tensors of a source, checked."""

    tensors: tuple[SharedWeight, ...]

    @staticmethod
    def read(source: IpcSource, *, ranks: int, current: Layout) -> SharedWeights:
        """Take the handles apart.

        Args:
            ranks: of the engine, each on a device of its own.
            current: tensors of the checkpoint that the engine runs; empty where this machine does not see it.

        Blocking: a handle as long as may be takes some 10 ms, and a model has thousands of tensors.

        Raises:
            StepFailed: SOURCE_MISMATCH, nothing was touched.
        """
        return SharedWeights(tensors=tuple(_checked(tensor, ranks, current) for tensor in source.tensors))

    def by_device(self) -> bytes:
        """A pickle of one mapping a tensor, from device to what PyTorch rebuilds it from: as vLLM takes them."""
        return written(
            [
                {device: _arguments(shared, shared.device) for device, shared in tensor.places.items()}
                for tensor in self.tensors
            ]
        )

    def named_tensors(self) -> bytes:
        """A pickle of pairs of name and tensor on the first device, for an engine of one rank: as SGLang takes them."""
        pairs = []
        for tensor in self.tensors:
            device, shared = next(iter(tensor.places.items()))
            pairs.append((tensor.name, Call(_REBUILD, _arguments(shared, device))))
        return written(pairs)


def _checked(tensor: IpcTensor, ranks: int, current: Layout) -> SharedWeight:
    name, shape = tensor.spec.name, tensor.spec.shape
    known = current.get(name)
    if current and known is None:
        _refuse(name, "is none of the engine's checkpoint")
    if known is not None and known[1] != shape:
        _refuse(name, f"has shape {shape}, the engine's has {known[1]}")
    places = _shared(tensor)
    if len(places) != ranks:
        _refuse(name, f"is on {len(places)} devices, and the engine runs on {ranks}")
    return SharedWeight(name=name, dtype=DTYPES[tensor.spec.dtype], shape=shape, places=places)


def _arguments(shared: SharedTensor, device: int | str) -> tuple[object, ...]:
    """In the order of `rebuild_cuda_tensor`. What was a trainer's parameter comes as a plain tensor."""
    return (
        _TENSOR,
        Call(_SIZE, (shared.shape,)),
        shared.strides,
        shared.offset,
        shared.storage,
        Global("torch", shared.dtype),
        device,
        shared.memory,
        shared.memory_bytes,
        shared.memory_offset,
        False,
        shared.counter,
        shared.counter_offset,
        shared.event,
        shared.waits,
    )


def _shared(tensor: IpcTensor) -> dict[str, SharedTensor]:
    name = tensor.spec.name
    if len(tensor.handle) > HANDLE_BYTES_MAX:
        _refuse(name, f"has a handle of more than {HANDLE_BYTES_MAX} bytes")
    try:
        told = read(tensor.handle)
    except ValueError:
        _refuse(
            name, "has a handle that is not PyTorch's of a device tensor by device id (pickle protocol 4)"
        )
    if not isinstance(told, dict) or not 1 <= len(told) <= DEVICES_MAX:
        _refuse(name, "has a handle without devices")
    places: dict[str, SharedTensor] = {}
    for device, arguments in told.items():
        shared = _shared_tensor(arguments)
        if not _is_name(device) or shared is None:
            _refuse(name, "has a handle with other fields than PyTorch's of a device tensor")
        if len(shared.memory) != PLAIN_MEMORY_BYTES and shared.memory[1:2] == EXPANDABLE:
            _refuse(
                name,
                "is in an expandable segment, whose handle names a process and its open files; "
                "let the trainer run without expandable_segments",
            )
        if shared.shape != tensor.spec.shape or shared.dtype != DTYPES[tensor.spec.dtype]:
            _refuse(name, f"is {shared.dtype} {shared.shape} by its handle, which is not its shape and type")
        last = shared.offset + sum(
            (size - 1) * step for size, step in zip(shared.shape, shared.strides, strict=True)
        )
        if 0 not in shared.shape and (last + 1) * DTYPE_BYTES[tensor.spec.dtype] > shared.memory_bytes:
            _refuse(name, "reaches beyond its memory by its handle")
        places[device] = shared
    return places


def _shared_tensor(arguments: object) -> SharedTensor | None:
    """`None`: other fields than PyTorch's."""
    if not isinstance(arguments, tuple) or len(arguments) != FIELDS:
        return None
    kind, size, strides, offset, storage, dtype, device, memory, length, start, grad, *rest = arguments
    counter, counter_offset, event, waits = rest
    shape = (
        size.arguments[0] if isinstance(size, Call) and size.function == _SIZE and size.arguments else None
    )
    if (
        kind not in _CLASSES
        or storage not in _STORAGES
        or dtype not in _DTYPES
        or not _are_sizes(shape)
        or not _are_sizes(strides)
        or len(shape) != len(strides)
        or not _are_sizes((offset, device, length, start, counter_offset))
        or not all(
            isinstance(each, bytes) and len(each) <= NAME_BYTES_MAX for each in (memory, counter, event)
        )
        or not memory
        or not _COUNTER.fullmatch(counter)
        or type(grad) is not bool
        or type(waits) is not bool
    ):
        return None
    return SharedTensor(
        shape=shape,
        strides=strides,
        offset=offset,
        storage=storage,
        dtype=dtype.name,
        device=device,
        memory=memory,
        memory_bytes=length,
        memory_offset=start,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        waits=waits,
    )


def _is_name(device: object) -> TypeGuard[str]:
    return (
        isinstance(device, str)
        and device.isascii()
        and device.isprintable()
        and 0 < len(device) <= NAME_BYTES_MAX
    )


def _are_sizes(value: object) -> TypeGuard[tuple[int, ...]]:
    return (
        isinstance(value, tuple)
        and len(value) <= RANK_MAX
        and all(type(each) is int and 0 <= each < 2**63 for each in value)
    )


def _refuse(name: str, what: str) -> NoReturn:
    raise StepFailed(f"tensor {name!r} {what}", code=AdminErrorCode.SOURCE_MISMATCH, changed=False)
