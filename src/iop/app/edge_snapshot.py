"""From the settings tree to the Edge's running snapshot, and to the payload that each Node gets."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from iop.adapters.profiles import DEFAULT_PROFILE, VLLM_PROFILE
from iop.adapters.registry import adapter_types
from iop.config.tree import Adapter, EdgeConfig, Model, NodeEntry
from iop.config.tree import ProtocolProfile as ProfileSection
from iop.core.errors import InvalidRequest
from iop.core.ids import ModelId, NodeId, ProviderId
from iop.edge.calls import ProviderKey, Route
from iop.edge.snapshot import (
    AdapterSpec,
    BreakerSpec,
    DispatchLimits,
    EdgeSnapshot,
    HeartbeatSpec,
    ModelSpec,
    NodeSpec,
    PoolMember,
    QueueSpec,
)
from iop.wire.messages import (
    AdapterConfig,
    AdapterSettings,
    CliSettings,
    NodeConfig,
    NodeRuntime,
    OllamaSettings,
    OpenAICompatSettings,
    OpenEngineSettings,
    ProfileOperation,
    ProtocolProfile,
)

__all__ = ["describe_types", "snapshot_of"]

_CATEGORIES: Final = {
    "openai_compat": "api",
    "vllm": "local_inference",
    "sglang": "local_inference",
    "trtllm": "local_inference",
    "llamacpp": "local_inference",
    "ollama": "local_inference",
    "openengine": "local_inference",
    "cli": "cli",
}
_RUN_TYPES: Final = frozenset({"ollama", "openengine", "cli"})

PLAIN_OPERATIONS: Final = frozenset({"completions", "embeddings"})
"""What travels by path because no profile names it (EN-51)."""


def snapshot_of(config: EdgeConfig, *, revision: int, now_unix_s: int) -> EdgeSnapshot:
    """The running configuration that a valid settings tree means.

    Args:
        config: validated.
        revision: its number (EN-114).
        now_unix_s: shown as when the models were made.

    Raises:
        InvalidRequest: a certificate file named by an adapter cannot be read.
    """
    runtime = _runtime(config)
    targets: dict[ProviderKey, list[str]] = {}
    for model in config.models:
        for provider in model.providers:
            key = ProviderKey(node=NodeId(provider.node), provider=ProviderId(provider.adapter))
            targets.setdefault(key, []).append(provider.target)
    return EdgeSnapshot(
        revision=revision,
        nodes={NodeId(node.id): _node(node, runtime, targets) for node in config.nodes},
        models={ModelId(model.id): _model(model, now_unix_s) for model in config.models},
        breaker=BreakerSpec(
            failures=config.breaker.failures,
            window_s=config.breaker.window_sec,
            open_s=config.breaker.open_sec,
        ),
        heartbeat=HeartbeatSpec(
            interval_s=config.heartbeat.interval_sec, timeout_s=config.heartbeat.timeout_sec
        ),
        limits=DispatchLimits(
            first_byte_timeout_s=config.limits.first_byte_timeout_sec,
            total_timeout_s=config.limits.total_timeout_sec,
            fairness_every=config.dispatch.other_class_every,
        ),
        ready_timeout_s=config.wire.ready_timeout_sec,
        participant_lost_s=config.admin.participant_lost_sec,
        chars_per_token=config.dispatch.text_bytes_per_token,
        shows_provider=config.dispatch.show_provider,
    )


def describe_types() -> list[dict[str, str]]:
    """The adapter types of this build: type, category (EN-90), and whether it takes tunnels or runs (EN-60)."""
    return [
        {
            "type": name,
            "category": _CATEGORIES[name],
            "route": (Route.RUN if name in _RUN_TYPES else Route.TUNNEL).value,
        }
        for name in adapter_types()
    ]


def _runtime(config: EdgeConfig) -> NodeRuntime:
    return NodeRuntime(
        heartbeat_interval_ms=round(config.heartbeat.interval_sec * 1000),
        heartbeat_timeout_ms=round(config.heartbeat.timeout_sec * 1000),
        stream_window_bytes=config.wire.window_bytes,
        frame_bytes_max=config.wire.frame_bytes,
        body_bytes_max=config.limits.body_bytes,
    )


def _model(model: Model, now_unix_s: int) -> ModelSpec:
    return ModelSpec(
        id=ModelId(model.id),
        aliases=model.aliases,
        members=tuple(
            PoolMember(
                key=ProviderKey(node=NodeId(provider.node), provider=ProviderId(provider.adapter)),
                target=provider.target,
                weight=provider.weight,
            )
            for provider in model.providers
        ),
        long_context_tokens=model.long_context_tokens,
        queue=QueueSpec(
            max_waiters=model.queue.max,
            timeout_s=model.queue.timeout_sec,
            no_capacity_grace_s=model.queue.no_capacity_grace_sec,
            paused_timeout_s=model.queue.paused_timeout_sec,
            comment_s=model.queue.comment_sec,
        ),
        response_model=model.response_model,
        conversion_drops=frozenset(model.conversion_drops),
        rewrites=frozenset(model.rewrites),
        created_unix_s=now_unix_s,
    )


def _node(node: NodeEntry, runtime: NodeRuntime, targets: dict[ProviderKey, list[str]]) -> NodeSpec:
    adapters: dict[ProviderId, AdapterSpec] = {}
    payloads: list[AdapterConfig] = []
    for adapter in node.adapters:
        provider = ProviderId(adapter.provider_id)
        key = ProviderKey(node=NodeId(node.id), provider=provider)
        payload = _payload(adapter, tuple(dict.fromkeys(targets.get(key, ()))))
        payloads.append(payload)
        adapters[provider] = _spec(adapter, payload)
    wire = NodeConfig(config_revision=0, adapters=tuple(payloads), runtime=runtime)
    return NodeSpec(
        id=NodeId(node.id),
        token_sha256=(node.token.digest,),
        adapters=adapters,
        wire=wire,
        fingerprint=_fingerprint(payloads, runtime),
    )


def _fingerprint(payloads: list[AdapterConfig], runtime: NodeRuntime) -> str:
    """Changes with anything that a Node is sent, the secrets too, which their repr hides."""
    digest = hashlib.sha256(repr((payloads, runtime)).encode())
    for payload in payloads:
        settings = payload.settings
        if isinstance(settings, OpenAICompatSettings):
            digest.update(b"\0" + settings.api_key.encode())
        for control in (settings, payload.engine_control):
            if isinstance(control, OpenEngineSettings):
                digest.update(b"\0" + control.admin_token.encode() + b"\0" + control.api_key.encode())
    return digest.hexdigest()


CONTROLLED_TYPES: Final = frozenset(
    {"cli", "llamacpp", "ollama", "openai_compat", "openengine", "sglang", "trtllm", "vllm"}
)
"""Kinds that take admin steps whatever the config says of an admin listener: at least a pause at the Node's gate."""


def _spec(adapter: Adapter, payload: AdapterConfig) -> AdapterSpec:
    is_run = adapter.type in _RUN_TYPES
    profile = (
        payload.settings.protocol_profile if isinstance(payload.settings, OpenAICompatSettings) else None
    )
    named = frozenset(profile.operations) if profile is not None else frozenset[str]()
    # A profile that somebody wrote out is all that the engine offers; the named one is what it may offer.
    operations = named | PLAIN_OPERATIONS if isinstance(adapter.profile, ProfileSection) else None
    return AdapterSpec(
        provider=ProviderId(adapter.provider_id),
        type=adapter.type,
        category=_CATEGORIES[adapter.type],
        route=Route.RUN if is_run else Route.TUNNEL,
        capacity=adapter.capacity,
        long_capacity=adapter.long_context_capacity,
        enabled=adapter.enabled,
        operations=None if is_run else operations,
        profile_operations=named,
        is_administered=adapter.admin is not None or adapter.type in CONTROLLED_TYPES,
        weights_source=adapter.weights_source or "",
        workspace=str(adapter.cli.workspace) if adapter.cli is not None and adapter.cli.workspace else "",
    )


def _payload(adapter: Adapter, targets: tuple[str, ...]) -> AdapterConfig:
    control = None
    if adapter.openengine is not None or adapter.admin is not None:
        token = adapter.admin.token if adapter.admin is not None else None
        control = OpenEngineSettings(
            target=str(adapter.openengine) if adapter.openengine is not None else "",
            admin_target=str(adapter.admin.target) if adapter.admin is not None else "",
            admin_token=token.reveal() if token is not None else "",
            api_key=adapter.api_key.reveal() if adapter.api_key is not None else "",
            tls_ca_pem=_ca(adapter),
        )
    return AdapterConfig(
        name=adapter.provider_id,
        type=adapter.type,
        enabled=adapter.enabled,
        capacity=adapter.capacity,
        long_context_capacity=adapter.long_context_capacity,
        targets=targets,
        settings=control if adapter.type == "openengine" else _settings(adapter),
        engine_control=control,
    )


def _settings(adapter: Adapter) -> AdapterSettings | None:
    if adapter.type == "cli":
        cli = adapter.cli
        assert cli is not None, "the config's rules require it"
        return CliSettings(
            command=cli.command,
            prompt=cli.prompt,
            output=cli.output,
            environment=cli.environment,
            start_timeout_sec=round(cli.start_timeout_sec),
            idle_timeout_sec=round(cli.idle_timeout_sec),
            total_timeout_sec=round(cli.total_timeout_sec),
            output_bytes_max=cli.output_bytes,
        )
    endpoint = adapter.endpoint
    assert endpoint is not None, "the config's rules require it"
    if adapter.type == "ollama":
        return OllamaSettings(endpoint=endpoint, keep_alive=adapter.keep_alive or "")
    return OpenAICompatSettings(
        endpoint=endpoint,
        api_key=adapter.api_key.reveal() if adapter.api_key is not None else "",
        tls_ca_pem=_ca(adapter),
        protocol_profile=_profile(adapter.profile, adapter.type),
    )


def _profile(profile: str | ProfileSection, kind: str) -> ProtocolProfile:
    """Resolve it: the Node looks nothing up (EN-55)."""
    if isinstance(profile, str):
        return VLLM_PROFILE if kind == "vllm" else DEFAULT_PROFILE
    return ProtocolProfile(
        name="written out",
        operations={
            name: ProfileOperation(method=operation.method, path=operation.path)
            for name, operation in profile.operations.items()
        },
    )


def _ca(adapter: Adapter) -> bytes:
    if adapter.tls is None or adapter.tls.ca is None:
        return b""
    return read_file(adapter.tls.ca, f"the adapter {adapter.provider_id}'s tls.ca")


def read_file(path: Path, what: str) -> bytes:
    """A file that a config names. Raises InvalidRequest that says which setting it is."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"The file of {what} cannot be read: {error.strerror}.", reason="FILE_UNREADABLE"
        ) from None
