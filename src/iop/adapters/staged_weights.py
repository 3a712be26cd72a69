"""Weights sent along with a request, written as a checkpoint that an engine can load from disk (AD-45).

Engines here take tensors over their own routes only as pickles or device handles. So the tensors go into a directory
that Node and engine see, beside the configuration of the checkpoint that is loaded now, and are loaded like any other.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from iop.adapters.gate_control import StepFailed
from iop.admin.enums import AdminErrorCode, TensorDtype, WeightFormat, WeightSourceKind
from iop.admin.profile import Capabilities
from iop.admin.requests import DiskSource, InlineTensorSource, WeightSource

DIRECTORY_VARIABLE: Final = "IOP_WEIGHTS_DIR"
"""In the Node's environment: where the engine reads what was sent along."""

NEEDS_WEIGHTS_DIRECTORY: Final = (
    f"for tensors sent along name a directory that Node and engine see in the Node's {DIRECTORY_VARIABLE}"
)

BESIDE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Larger files beside the weights are no configuration."""

STORED: Final[Mapping[TensorDtype, tuple[str, int]]] = {
    TensorDtype.FLOAT32: ("F32", 4),
    TensorDtype.FLOAT16: ("F16", 2),
    TensorDtype.BFLOAT16: ("BF16", 2),
    TensorDtype.FLOAT8_E4M3: ("F8_E4M3", 1),
    TensorDtype.FLOAT8_E5M2: ("F8_E5M2", 1),
    TensorDtype.INT8: ("I8", 1),
    TensorDtype.UINT8: ("U8", 1),
    TensorDtype.INT32: ("I32", 4),
    TensorDtype.INT64: ("I64", 8),
}
"""Name and size of an element in a safetensors file."""


class StagedWeights:
    """The directory of one adapter, of which only what is loaded or being loaded is kept.

    Args:
        environment: the Node's.
        endpoint: of the engine; other adapters of the Node keep their own.
    """

    def __init__(self, environment: Mapping[str, str], endpoint: str) -> None:
        root = environment.get(DIRECTORY_VARIABLE, "")
        owner = _short(endpoint)
        self._root = Path(root) / owner if root.startswith("/") and Path(root).is_dir() else None

    @property
    def is_there(self) -> bool:
        """Whether weights can be staged here."""
        return self._root is not None

    def offered(self, capabilities: Capabilities) -> Capabilities:
        """What an engine that loads from disk offers with it."""
        if not self.is_there or WeightSourceKind.DISK not in capabilities.weight_sources:
            return capabilities
        return replace(
            capabilities,
            weight_sources=capabilities.weight_sources | {WeightSourceKind.INLINE_TENSORS},
            tensor_dtypes=frozenset(STORED),
        )

    async def on_disk(self, source: WeightSource, current: str, name: str) -> WeightSource:
        """The source itself, or the checkpoint that was made of its tensors. Raises as :meth:`write`."""
        if not isinstance(source, InlineTensorSource) or not self.is_there:
            return source
        return await asyncio.to_thread(self.write, source, current, _short(name))

    def write(self, source: InlineTensorSource, current: str, name: str) -> DiskSource:
        """Make the checkpoint. Blocking.

        Args:
            current: directory of what is loaded now, whose configuration goes along.
            name: of its directory.

        Raises:
            StepFailed: nothing was touched.
        """
        beside = Path(current)
        if self._root is None or not current.startswith("/") or not beside.is_dir():
            raise _unavailable(
                "the engine's own checkpoint cannot be seen from here, so none can be made like it"
            )
        directory = self._root / name
        try:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            for path in beside.iterdir():
                is_weights = (
                    path.suffix in {".safetensors", ".bin", ".pt", ".gguf"} or "index.json" in path.name
                )
                if path.is_file() and not is_weights and path.stat().st_size <= BESIDE_BYTES_MAX:
                    shutil.copyfile(path, directory / path.name)
            _write_tensors(directory / "model.safetensors", source)
        except OSError as exc:
            raise _unavailable(f"the tensors cannot be written: {exc.strerror}") from exc
        return DiskSource(path=str(directory), format=WeightFormat.SAFETENSORS)

    def keep_only(self, loaded: str) -> None:
        """Remove what is not loaded any more. Blocking."""
        if self._root is None or not self._root.is_dir():
            return
        for directory in self._root.iterdir():
            if str(directory) != loaded:
                shutil.rmtree(directory, ignore_errors=True)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _write_tensors(file: Path, source: InlineTensorSource) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in source.tensors:
        name, size = STORED[tensor.spec.dtype]
        if len(tensor.data) != math.prod(tensor.spec.shape) * size:
            raise StepFailed(
                f"tensor {tensor.spec.name!r} has {len(tensor.data)} bytes, which is not its shape",
                code=AdminErrorCode.SOURCE_MISMATCH,
                changed=False,
            )
        start, end = end, end + len(tensor.data)
        header[tensor.spec.name] = {
            "dtype": name,
            "shape": list(tensor.spec.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in source.tensors:
            out.write(tensor.data)


def _unavailable(message: str) -> StepFailed:
    return StepFailed(message, code=AdminErrorCode.SOURCE_UNAVAILABLE, changed=False)
