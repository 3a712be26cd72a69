"""What must hold between keys: addresses, exposure, names that refer to each other, policies."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Protocol

from iop.config.tree import (
    Adapter,
    AdminSection,
    EdgeConfig,
    EngineConfig,
    ListenerTls,
    NodeConfig,
    PrincipalEntry,
    ProtocolProfile,
)
from iop.config.values import Address

__all__ = [
    "PERMISSIONS",
    "PROFILE_OPERATIONS",
    "check_edge",
    "check_engine",
    "check_node",
    "warn_edge",
    "warn_node",
]

PROFILE_OPERATIONS: Final = (
    "models", "chat_completions", "messages", "count_tokens", "tokenize", "responses",
)  # fmt: skip
"""Operations that a protocol profile may name (EN-51)."""

PERMISSIONS: Final = (
    "profile", "get", "list", "watch", "flush", "pause", "resume", "release", "restore", "update-weights",
    "profile-start", "profile-stop", "reconfigure", "abort", "lora", "audit",
)  # fmt: skip
"""Names of single permissions (AD-04)."""

COMMENT_SEC_MIN: Final = 1.0
"""Telling a thousand waiters their place more often would be work of its own."""

_OPERATED_TYPES: Final = frozenset({"llamacpp", "sglang", "trtllm", "vllm"})
"""Kinds that are operated over their own routes, without an admin section."""

_HTTP_TYPES: Final = frozenset({"openai_compat", "vllm", "sglang", "trtllm", "llamacpp", "ollama"})


class Note(Protocol):
    """Takes a finding."""

    def __call__(self, key: str, message: str, fix: str, reads: tuple[str, ...] = ()) -> None:
        """Note it, unless ``key`` or one of ``reads``, which it rests on, could not be read in the first place."""
        ...


def check_edge(config: EdgeConfig, note: Note) -> None:
    """Everything that edge.yaml must keep beyond the types of its keys."""
    listeners = _listeners(config.listen)
    tls = {name: getattr(config.tls, name) for name in listeners}
    _check_addresses(listeners, note)
    _check_exposure(listeners, tls=tls, insecure=config.insecure, note=note)
    if not config.insecure and not config.api_keys:
        for name in ("http", "openengine"):
            address = listeners.get(name)
            if address is not None and not address.is_loopback:
                note(
                    f"listen.{name}",
                    f"{address} is reachable from other machines, and there are no api_keys",
                    "Add api_keys, listen on 127.0.0.1, or write insecure: true",
                    ("insecure", "api_keys"),
                )
    _check_principals(config.admin, "admin", note)
    _check_nodes(config, note)
    _check_models(config, note)
    _check_api_keys(config, note)
    if config.heartbeat.timeout_sec < 2 * config.heartbeat.interval_sec:
        note(
            "heartbeat.timeout_sec",
            "one late heartbeat would end a connection",
            f"Make it at least {2 * config.heartbeat.interval_sec:g}, twice interval_sec",
            ("heartbeat.interval_sec",),
        )


def warn_edge(config: EdgeConfig) -> tuple[str, ...]:
    """What is allowed and yet worth a line at every start."""
    warnings = []
    if config.insecure:
        open_ones = [
            f"{name} ({address})"
            for name, address in _listeners(config.listen).items()
            if address is not None
            and not address.is_loopback
            and (
                getattr(config.tls, name) is None or (name in {"http", "openengine"} and not config.api_keys)
            )
        ]
        if open_ones:
            warnings.append(f"insecure: true leaves open to other machines: {', '.join(open_ones)}")
    if config.listen.admin is not None and not config.admin.principals:
        warnings.append("admin.principals is empty: the admin listener refuses everybody")
    return tuple(warnings)


def check_node(config: NodeConfig, note: Note) -> None:
    """Everything that node.yaml must keep (EN-23)."""
    if config.reconnect.max_attempts == 0 and config.reconnect.interval_sec == 0:
        note(
            "reconnect.interval_sec",
            "attempts without limit need a pause between them",
            "Make it positive, or give max_attempts a positive number",
            ("reconnect.max_attempts",),
        )
    if config.tls is not None and (config.tls.cert is None) != (config.tls.key is None):
        note(
            "tls.cert", "a client certificate needs both cert and key", "Give both, or neither", ("tls.key",)
        )
    if config.edge.path is None and config.edge.port == 0:
        note("edge", "port 0 cannot be dialled", "Write the port that the Edge listens on")


def warn_node(config: NodeConfig) -> tuple[str, ...]:
    """What is allowed and yet worth a line at every start."""
    if config.tls is None and not config.edge.is_loopback:
        return (f"the token travels to {config.edge} without TLS; add a tls section",)
    return ()


def check_engine(config: EngineConfig, note: Note) -> None:
    """Everything that engine.yaml must keep."""
    listeners = _listeners(config.listen)
    _check_addresses(listeners, note)
    _check_exposure(listeners, tls={"admin": config.tls.admin}, insecure=config.insecure, note=note)
    if config.admin is not None:
        _check_principals(config.admin, "admin", note)


# --- parts ------------------------------------------------------------------------------------------------------------


def _listeners(section: object) -> dict[str, Address | None]:
    assert dataclasses.is_dataclass(section)
    return {item.name: getattr(section, item.name) for item in dataclasses.fields(section)}


def _check_addresses(listeners: Mapping[str, Address | None], note: Note) -> None:
    """No two listeners on one address; above all not admin and inference (AD-02)."""
    taken: list[tuple[str, Address]] = []
    for name, address in listeners.items():
        if address is None:
            continue
        for other, other_address in taken:
            if address.overlaps(other_address):
                note(
                    f"listen.{name}",
                    f"{address} is also the address of listen.{other}",
                    "Give each listener an address of its own, or null to turn it off",
                    (f"listen.{other}",),
                )
        taken.append((name, address))
        if address.path is not None and name != "admin":
            note(f"listen.{name}", "only the admin listener can be a Unix socket", "Write HOST:PORT")


def _check_exposure(
    listeners: Mapping[str, Address | None],
    *,
    tls: Mapping[str, ListenerTls | None],
    insecure: bool,
    note: Note,
) -> None:
    """Off loopback only with TLS, or with an explicit ``insecure: true`` (EN-104, AD-04)."""
    for name, address in listeners.items():
        if address is None or address.is_loopback or insecure or tls.get(name) is not None:
            continue
        way = f"Add tls.{name}" if name in tls else "Put a proxy with TLS before it"
        note(
            f"listen.{name}",
            f"{address} is reachable from other machines, without TLS",
            f"{way}, listen on 127.0.0.1, or write insecure: true",
            ("insecure", f"tls.{name}"),
        )


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _check_principals(section: AdminSection, key: str, note: Note) -> None:
    for name in _repeated(principal.name for principal in section.principals):
        note(f"{key}.principals", f"the name {name} appears twice", "Give each principal a name of its own")
    tokens = [principal.token.digest.hex() for principal in section.principals if principal.token is not None]
    if _repeated(tokens):
        note(
            f"{key}.principals",
            "two principals have the same token",
            "Give each principal a token of its own",
        )
    for index, principal in enumerate(section.principals):
        _check_principal(principal, f"{key}.principals[{index}]", note)


def _check_principal(principal: PrincipalEntry, key: str, note: Note) -> None:
    if principal.token is None and principal.mtls_san is None:
        note(
            key,
            "the principal has no credential",
            "Add token or mtls_san",
            (f"{key}.token", f"{key}.mtls_san"),
        )
    if (principal.role is None) == (not principal.permissions):
        note(
            key,
            "the principal needs a role or permissions, not both",
            "Write role: viewer, operator or admin",
            (f"{key}.role", f"{key}.permissions"),
        )
    for permission in principal.permissions:
        if permission not in PERMISSIONS:
            note(f"{key}.permissions", f"{permission!r} is no permission", f"Known: {', '.join(PERMISSIONS)}")


def _check_nodes(config: EdgeConfig, note: Note) -> None:
    for name in _repeated(node.id for node in config.nodes):
        note("nodes", f"the id {name} appears twice", "Give each Node an id of its own")
    if _repeated(node.token.digest.hex() for node in config.nodes):
        note("nodes", "two Nodes have the same token", "Give each Node a token of its own")
    for node_index, node in enumerate(config.nodes):
        for name in _repeated(adapter.provider_id for adapter in node.adapters):
            note(
                f"nodes[{node_index}].adapters", f"the name {name} appears twice", "Name each adapter (EN-85)"
            )
        for index, adapter in enumerate(node.adapters):
            _check_adapter(adapter, f"nodes[{node_index}].adapters[{index}]", note)


def _check_adapter(adapter: Adapter, key: str, note: Note) -> None:
    kind = (f"{key}.type",)
    if adapter.type in _HTTP_TYPES and adapter.endpoint is None:
        note(f"{key}.endpoint", f"type {adapter.type} needs one", "Write endpoint: http://HOST:PORT", kind)
    if adapter.type == "openengine" and adapter.openengine is None:
        note(f"{key}.openengine", "type openengine needs one", "Write openengine: HOST:PORT", kind)
    if adapter.type == "cli" and adapter.cli is None:
        note(f"{key}.cli", "type cli needs its command", "Write cli: {command: [PROGRAM, ARGUMENT]}", kind)
    if adapter.long_context_capacity > adapter.capacity:
        note(
            f"{key}.long_context_capacity",
            "long slots are part of the capacity (EN-111)",
            f"Make it at most {adapter.capacity}",
            (f"{key}.capacity",),
        )
    source = adapter.weights_source
    if source is not None and not source.startswith("/"):
        note(f"{key}.weights_source", f"{source!r} is not absolute", "Write the engine's own absolute path")
    if source is not None and adapter.admin is None and adapter.type not in _OPERATED_TYPES:
        note(
            f"{key}.weights_source",
            "nobody updates the weights of this adapter",
            "Leave it out, or add admin: {target: HOST:PORT, token: ...}",
            (f"{key}.admin", f"{key}.type"),
        )
    profile = adapter.profile
    if isinstance(profile, ProtocolProfile):
        for name, operation in profile.operations.items():
            if name not in PROFILE_OPERATIONS:
                note(
                    f"{key}.profile.operations",
                    f"{name!r} is no operation",
                    f"Known: {', '.join(PROFILE_OPERATIONS)}",
                )
            if not operation.path.startswith("/") or " " in operation.path:
                note(
                    f"{key}.profile.operations.{name}.path",
                    "is no path",
                    "Begin it with / and leave out spaces",
                )
    elif profile != "openai":
        note(
            f"{key}.profile",
            f"{profile!r} is no profile",
            "Known: openai; or write one out",
        )


def _check_models(config: EdgeConfig, note: Note) -> None:
    for name in _repeated([name for model in config.models for name in (model.id, *model.aliases)]):
        note("models", f"the name {name} appears twice among ids and aliases", "Let each name mean one model")
    known = {(node.id, adapter.provider_id) for node in config.nodes for adapter in node.adapters}
    named = _keys_of_adapter_names(config)
    for model_index, model in enumerate(config.models):
        if not model.providers:
            note(f"models[{model_index}].providers", "is empty", "Name at least one node and adapter")
        if 0 < model.queue.comment_sec < COMMENT_SEC_MIN:
            note(
                f"models[{model_index}].queue.comment_sec",
                f"must be 0 or at least {COMMENT_SEC_MIN:g}",
                "0 turns comments off; 10 keeps most proxies from taking the wait for a dead connection",
            )
        for name in _repeated(f"{provider.node}/{provider.adapter}" for provider in model.providers):
            note(f"models[{model_index}].providers", f"{name} appears twice", "Use weight instead")
        for index, provider in enumerate(model.providers):
            if (provider.node, provider.adapter) not in known:
                choices = (
                    ", ".join(sorted(f"{node}/{adapter}" for node, adapter in known)) or "none is configured"
                )
                key = f"models[{model_index}].providers[{index}]"
                note(
                    key,
                    f"there is no adapter {provider.adapter} on a node {provider.node}",
                    f"Known: {choices}",
                    (f"{key}.node", f"{key}.adapter", *named),
                )


def _keys_of_adapter_names(config: EdgeConfig) -> tuple[str, ...]:
    """Every key that a name such as gpu-1/main rests on."""
    keys = ["nodes"]
    for node_index, node in enumerate(config.nodes):
        keys += [f"nodes[{node_index}].id", f"nodes[{node_index}].adapters"]
        for index in range(len(node.adapters)):
            keys += [f"nodes[{node_index}].adapters[{index}].{name}" for name in ("name", "type")]
    return tuple(keys)


def _check_api_keys(config: EdgeConfig, note: Note) -> None:
    for name in _repeated(key.name for key in config.api_keys):
        note("api_keys", f"the name {name} appears twice", "Give each key a name of its own")
    if _repeated(key.key.digest.hex() for key in config.api_keys):
        note("api_keys", "two names have the same key", "Give each name a key of its own")
    names = {name for model in config.models for name in (model.id, *model.aliases)}
    for index, key in enumerate(config.api_keys):
        for model in key.models:
            if model not in names:
                note(
                    f"api_keys[{index}].models",
                    f"there is no model {model}",
                    f"Known: {', '.join(sorted(names))}",
                    (
                        "models",
                        *(
                            f"models[{at}].{name}"
                            for at in range(len(config.models))
                            for name in ("id", "aliases")
                        ),
                    ),
                )
