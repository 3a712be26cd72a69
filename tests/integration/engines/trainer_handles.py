"""Handles of a trainer's device memory, as PyTorch made them (`tests/data/engines/handles`)."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Final

from iop.admin.enums import TensorDtype
from iop.admin.requests import IpcSource, IpcTensor, TensorSpec

FILE: Final = Path(__file__).parents[2] / "data" / "engines" / "handles" / "torch.json"


def shared(tensor: str, handle: str) -> IpcSource:
    """One tensor of bfloat16, two by three, by the name of a recorded handle."""
    told = json.loads(FILE.read_text(encoding="utf-8"))["handles"][handle]
    spec = TensorSpec(name=tensor, dtype=TensorDtype.BFLOAT16, shape=(2, 3))
    return IpcSource(tensors=(IpcTensor(spec=spec, handle=base64.b64decode(told)),))
