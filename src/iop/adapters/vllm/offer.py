"""What vLLM can do, in words, and what one process of it does offer by its routes and how it was started. Pure."""

from __future__ import annotations

from typing import Final

from iop.adapters.gate_control import GATE_MODES, GATE_OPERATIONS, Offer
from iop.adapters.staged_weights import NEEDS_WEIGHTS_DIRECTORY
from iop.adapters.trainer_group import BACKENDS
from iop.adapters.vllm.answers import Launch
from iop.adapters.vllm.elastic import SCALE_ROUTE
from iop.admin.enums import (
    AdminOperationKind,
    BusyPolicy,
    CacheKind,
    CachePolicy,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightFormat,
    WeightRetention,
    WeightSourceKind,
)
from iop.admin.profile import Capabilities

Op = AdminOperationKind

NEEDS_DEV: Final = "start vLLM with VLLM_SERVER_DEV_MODE=1"
NEEDS_DOCS: Final = "start vLLM without --disable-fastapi-docs, so that its routes can be seen"
NEEDS_SLEEP: Final = "start vLLM with --enable-sleep-mode (GPU only)"
NEEDS_ELASTIC: Final = (
    "start vLLM with --enable-elastic-ep, --enable-eplb and --elastic-ep-max-dp-size (GPU, experts)"
)
NEEDS_TRANSFER: Final = (
    'for a broadcast start vLLM on GPUs with --weight-transfer-config \'{"backend":"nccl"}\', for device handles with '
    '\'{"backend":"ipc"}\' and VLLM_ALLOW_INSECURE_SERIALIZATION=1'
)
NEEDS_PROFILER: Final = "start vLLM with --profiler-config naming a profiler and a directory"

TRANSFER_ROUTES: Final = frozenset(
    {
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
    }
)

TAGS: Final = {ResourceKind.WEIGHTS: "weights", ResourceKind.KV_CACHE: "kv_cache"}
MODES: Final = {PauseMode.DRAIN: "wait", PauseMode.ABORT: "abort", PauseMode.KEEP: "keep"}
RESETS: Final = {CacheKind.MULTIMODAL: "/reset_mm_cache", CacheKind.ENCODER: "/reset_encoder_cache"}

OFFERS: Final[tuple[Offer, ...]] = (
    Offer(
        operation=Op.PAUSE,
        detail="drain, abort at the Node's gate; keep, and all in the engine",
        needs="development mode",
    ),
    Offer(operation=Op.RESUME, detail="frozen requests go on", needs=""),
    Offer(
        operation=Op.FLUSH_CACHES,
        detail="prefix, multimodal, encoder; busy: fail, wait, preempt",
        needs="development mode",
    ),
    Offer(
        operation=Op.RELEASE_RESOURCES,
        detail="weights (offloaded or discarded), KV cache",
        needs="development mode, `--enable-sleep-mode`",
    ),
    Offer(
        operation=Op.RESTORE_RESOURCES,
        detail="all or some; discarded weights from disk",
        needs="development mode, `--enable-sleep-mode`",
    ),
    Offer(
        operation=Op.UPDATE_WEIGHTS,
        detail="disk (safetensors), tensors sent along, a trainer's broadcast (NCCL), a trainer's device handles; "
        "verified by checksum or a probe",
        needs="development mode; the same files on Node and engine; for tensors `IOP_WEIGHTS_DIR`; for broadcasts and "
        "handles `--weight-transfer-config` (`nccl` or `ipc`), a GPU and one engine a model; for handles "
        "`VLLM_ALLOW_INSECURE_SERIALIZATION=1`",
    ),
    Offer(operation=Op.START_PROFILE, detail="CPU, GPU, memory", needs="`--profiler-config`"),
    Offer(
        operation=Op.STOP_PROFILE,
        detail="artifacts fetched through the Node",
        needs="`--profiler-config`",
    ),
    Offer(
        operation=Op.RECONFIGURE_SERVING,
        detail="data-parallel size (elastic expert parallelism)",
        needs="development mode, `--enable-elastic-ep`, `--enable-eplb`, `--elastic-ep-max-dp-size`",
    ),
)


def offered(
    paths: frozenset[str], launch: Launch, profiler_kinds: frozenset[ProfilerKind]
) -> tuple[Capabilities, dict[Op, str]]:
    """What this process of it can, and why it cannot the rest.

    Args:
        paths: its routes.
        profiler_kinds: what its profiler records, where its files can be fetched.
    """
    missing: dict[Op, str] = {}
    operations = set(GATE_OPERATIONS)
    is_dev = {"/pause", "/resume", "/is_paused"} <= paths
    why = NEEDS_DEV if paths else NEEDS_DOCS
    caches = {CacheKind.PREFIX} if "/reset_prefix_cache" in paths else set()
    caches |= {kind for kind, path in RESETS.items() if path in paths}
    can_sleep = launch.sleep_mode and is_dev and "/sleep" in paths
    can_swap = is_dev and {"/collective_rpc", "/weight_info", "/update_weight_version"} <= paths
    if caches:
        operations.add(Op.FLUSH_CACHES)
    else:
        missing[Op.FLUSH_CACHES] = why
    for op in (Op.RELEASE_RESOURCES, Op.RESTORE_RESOURCES):
        if can_sleep:
            operations.add(op)
        else:
            missing[op] = NEEDS_SLEEP if is_dev else why
    if can_swap:
        operations.add(Op.UPDATE_WEIGHTS)
    else:
        missing[Op.UPDATE_WEIGHTS] = why
    for op in (Op.START_PROFILE, Op.STOP_PROFILE):
        if profiler_kinds:
            operations.add(op)
        else:
            missing[op] = NEEDS_PROFILER
    is_elastic = launch.elastic and is_dev and paths >= {SCALE_ROUTE, "/get_world_size"}
    if is_elastic:
        operations.add(Op.RECONFIGURE_SERVING)
    else:
        missing[Op.RECONFIGURE_SERVING] = NEEDS_ELASTIC if is_dev else why
    sources = _sources(paths, launch)
    can_join = can_swap and WeightSourceKind.DISTRIBUTED in sources
    modes = frozenset(MODES) if is_dev else GATE_MODES
    return Capabilities(
        operations=frozenset(operations),
        pause_modes=modes,
        quiesce_modes=modes if can_swap else frozenset(),
        cache_kinds=frozenset(caches),
        busy_policies=frozenset(BusyPolicy) if caches else frozenset(),
        resource_kinds=frozenset(TAGS) if can_sleep else frozenset(),
        weight_retentions=frozenset(WeightRetention) if can_sleep else frozenset(),
        weight_sources=sources if can_swap else frozenset(),
        distributed_backends=BACKENDS if can_join else frozenset(),
        weight_formats=frozenset({WeightFormat.SAFETENSORS}) if can_swap else frozenset(),
        cache_policies=frozenset(CachePolicy) if can_swap else frozenset(),
        profiler_kinds=profiler_kinds,
        reconfigurable_fields=frozenset({ReconfigurableField.DATA_PARALLEL_SIZE})
        if is_elastic
        else frozenset(),
        data_parallel_size_max=launch.data_parallel_max if is_elastic else None,
    ), missing


def lacking_of(paths: frozenset[str], capabilities: Capabilities) -> dict[Op, str]:
    """How to get the parts of what is offered that are not.

    Args:
        paths: its routes.
    """
    lacking: dict[Op, str] = {}
    if PauseMode.KEEP not in capabilities.pause_modes:
        lacking[Op.PAUSE] = NEEDS_DEV if paths else NEEDS_DOCS
    if not capabilities.weight_sources >= {WeightSourceKind.DISTRIBUTED, WeightSourceKind.IPC}:
        lacking[Op.UPDATE_WEIGHTS] = NEEDS_TRANSFER
        if WeightSourceKind.INLINE_TENSORS not in capabilities.weight_sources:
            lacking[Op.UPDATE_WEIGHTS] += f"; {NEEDS_WEIGHTS_DIRECTORY}"
    return lacking


def _sources(paths: frozenset[str], launch: Launch) -> frozenset[WeightSourceKind]:
    """From where weights can come. A trainer's device memory is reached from a GPU only."""
    sources = {WeightSourceKind.DISK}
    if paths >= TRANSFER_ROUTES and launch.device != "cpu":
        if launch.transfer == "nccl":
            sources.add(WeightSourceKind.DISTRIBUTED)
        if launch.transfer == "ipc" and launch.unpickles:
            sources.add(WeightSourceKind.IPC)
    return frozenset(sources)
