"""Run by a Python with PyTorch: prints what a trainer's handles look like, as JSON of base64 by name.

Without a GPU nothing is shared; the fields are in the order and of the types of `reduce_tensor`, and the names and
offsets in them are made up.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys

import torch


def handle(
    tensor: torch.Tensor, devices: tuple[str, ...], kind: type | None = None, protocol: int = 4
) -> str:
    """Of one tensor on each device."""
    storage = tensor.untyped_storage() if kind is None else tensor._typed_storage()
    told = {
        device: (
            kind or type(tensor),
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            type(storage),
            tensor.dtype,
            index,
            bytes([index + 1]) * 66,
            512,
            0,
            False,
            b"/torch_1_2",
            3,
            bytes([index + 17]) * 64,
            True,
        )
        for index, device in enumerate(devices)
    }
    return base64.b64encode(pickle.dumps(told, protocol=protocol)).decode()


class Evil:
    """Runs code where it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('loaded')",)


half = torch.zeros(2, 3, dtype=torch.bfloat16)
handles = {
    "one device": handle(half, ("GPU-1",)),
    "two devices": handle(half, ("GPU-1", "GPU-2")),
    "a parameter": handle(torch.zeros(2, 3), ("GPU-1",), torch.nn.Parameter),
    "a part": handle(half[:, 1:], ("GPU-1",)),
    "protocol 2": handle(half, ("GPU-1",), protocol=2),
    "no device": handle(half, ()),
    "code": base64.b64encode(pickle.dumps({"GPU-1": Evil()}, protocol=4)).decode(),
}
json.dump({"torch": torch.__version__.partition("+")[0], "handles": handles}, sys.stdout, indent=1)
