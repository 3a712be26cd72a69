"""What vLLM tells on its control routes, read. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from iop.adapters.engine_http import ShortText

_SAMPLE: Final = re.compile(rb"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? ([0-9.eE+-]+)$")

VALUE_MAX: Final = 2.0**53
"""No count and no time is larger; what is said to be, infinite even, is not told."""

RANKS_MAX: Final = 2**20
"""More, no server has: its answer is nonsense."""

SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")

_WANTED: Final = (
    b"vllm:num_requests_running",
    b"vllm:num_requests_waiting{",
    b"vllm:engine_sleep_state",
    b"process_start_time_seconds",
)


class IsPaused(msgspec.Struct):
    """`/is_paused`."""

    is_paused: bool


class IsSleeping(msgspec.Struct):
    """`/is_sleeping`; also true of an engine that is merely paused."""

    is_sleeping: bool


class Success(msgspec.Struct):
    """The truth about a 200 of `/reset_prefix_cache`. Older engines answer nothing."""

    success: bool


class WeightInfo(msgspec.Struct):
    """`/weight_info`."""

    weight_version: ShortText


class WorldSize(msgspec.Struct):
    """`/get_world_size`: over all of its ranks."""

    world_size: int


class IsScaling(msgspec.Struct):
    """`/is_scaling_elastic_ep`."""

    is_scaling_elastic_ep: bool


class Checksums(msgspec.Struct):
    """`/weight_checker` with `checksum`: by rank and tensor."""

    checksums: dict[str, str]


class Version(msgspec.Struct):
    """`/version`."""

    version: ShortText = ""


class OpenApi(msgspec.Struct):
    """Which routes this process registered."""

    paths: dict[str, msgspec.Raw] = {}


class Model(msgspec.Struct):
    """An entry of `/v1/models`; a LoRA adapter has a parent."""

    id: ShortText
    root: ShortText | None = None
    parent: ShortText | None = None


class Models(msgspec.Struct):
    """`/v1/models`."""

    data: list[Model]


class Choice(msgspec.Struct):
    """Of a completion."""

    text: str = ""
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """`/v1/completions`."""

    choices: list[Choice]


class ServerInfo(msgspec.Struct):
    """`/server_info?config_format=json`."""

    vllm_config: dict[str, Any] = {}
    vllm_env: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What matters here of how the process was started.

    Attributes:
        sleep_mode: `--enable-sleep-mode`: without it a sleep succeeds and frees nothing.
        profiler: kind of the profiler, empty without one.
        profile_dir: where its files go, on the engine's host.
        profiles_memory: the profiler also records memory.
        device: `cpu`, `cuda` and so on.
        transfer: backend of the weight-transfer engine, empty without one.
        unpickles: it takes pickles of handles (`VLLM_ALLOW_INSECURE_SERIALIZATION`).
        elastic: it changes its data-parallel size while it serves, up to `data_parallel_max`.
    """

    sleep_mode: bool = False
    profiler: str = ""
    profile_dir: str = ""
    profiles_memory: bool = False
    device: str = ""
    transfer: str = ""
    unpickles: bool = False
    elastic: bool = False
    data_parallel_max: int = 1

    @staticmethod
    def read(info: ServerInfo) -> Launch:
        """From the dump of its configuration, which has no fixed form: what is not found is not there."""
        config = info.vllm_config
        profiler = _section(config, "profiler_config")
        parallel = _section(config, "parallel_config")
        size_max = parallel.get("elastic_ep_max_dp_size")
        return Launch(
            sleep_mode=_find(config, "enable_sleep_mode") is True,
            profiler=str(profiler.get("profiler") or ""),
            profile_dir=str(profiler.get("torch_profiler_dir") or ""),
            profiles_memory=profiler.get("torch_profiler_with_memory") is True,
            device=str(_section(config, "device_config").get("device") or ""),
            transfer=str(_section(config, "weight_transfer_config").get("backend") or ""),
            unpickles=str(info.vllm_env.get("VLLM_ALLOW_INSECURE_SERIALIZATION")).lower() in {"true", "1"},
            elastic=parallel.get("enable_elastic_ep") is True,
            data_parallel_max=size_max if type(size_max) is int and 0 < size_max <= RANKS_MAX else 1,
        )


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _find(config: dict[str, Any], name: str) -> object:
    """A value at the top or one level below."""
    if name in config:
        return config[name]
    for part in config.values():
        if isinstance(part, dict) and name in part:
            found: object = part[name]
            return found
    return None


@dataclass(slots=True, kw_only=True)
class Load:
    """Of `/metrics`.

    Attributes:
        start_time: of the process; empty where several processes share the metrics.
        sleep: the state that is set on every rank, empty when ranks differ or none is told.
    """

    running: int | None = None
    waiting: int | None = None
    start_time: str = ""
    sleep: str = ""
    _states: dict[str, set[str]] = field(default_factory=dict)

    @staticmethod
    def read(metrics: bytes) -> Load:
        """Sum over ranks."""
        load = Load()
        for name, labels, value in _samples(metrics):
            if name == b"vllm:num_requests_running":
                load.running = (load.running or 0) + int(value)
            elif name == b"vllm:num_requests_waiting":
                load.waiting = (load.waiting or 0) + int(value)
            elif name == b"process_start_time_seconds":
                load.start_time = f"{value:.2f}"
            elif name == b"vllm:engine_sleep_state" and value == 1:
                engine = _label(labels, "engine")
                load._states.setdefault(engine, set()).add(_label(labels, "sleep_state"))
        told = {state for states in load._states.values() for state in states}
        load.sleep = told.pop() if len(told) == 1 else ""
        return load


def _samples(metrics: bytes) -> Iterator[tuple[bytes, bytes, float]]:
    for line in metrics.splitlines():
        if not line.startswith(_WANTED):
            continue
        match = _SAMPLE.match(line)
        if match is not None:
            try:
                value = float(match[3])
            except ValueError:
                continue
            if 0 <= value <= VALUE_MAX:
                yield match[1], match[2] or b"", value


def _label(labels: bytes, name: str) -> str:
    match = re.search(rb'(?:^|,)%b="([^"]*)"' % name.encode(), labels)
    return match[1].decode("utf-8", "replace") if match else ""
