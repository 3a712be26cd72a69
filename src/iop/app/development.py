"""The configuration that ``iop up`` writes: one Edge, one Node, one reference engine, tokens made for this run.

The files are ordinary configs, so what ``iop up`` starts can be started by hand from them. The Edge's and the engine's
hold only hashes of the tokens; the tokens themselves are in ``run.json`` and, for the Node and the Edge's adapter, in
files that only this user may read.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from iop.app.home import write_private
from iop.config import SecretHash

__all__ = [
    "ADAPTER_NAME",
    "NODE_ID",
    "ROLES",
    "DevelopmentTokens",
    "make_tokens",
    "write_edge",
    "write_engine",
    "write_node",
]

NODE_ID: Final = "local"
ADAPTER_NAME: Final = "engine"
ROLES: Final[tuple[Literal["viewer"], Literal["operator"], Literal["admin"]]] = (
    "viewer",
    "operator",
    "admin",
)

SHUTDOWN_GRACE_S: Final = 5
"""A person who pressed Ctrl-C waits for running streams no longer than this."""

_HEADER: Final = "# Written by iop up at every start; copy it to change it.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevelopmentTokens:
    """Secrets of one run: by role, of the Node, and of the Edge at the engine."""

    roles: Mapping[str, str] = field(repr=False)
    node: str = field(repr=False)
    edge: str = field(repr=False)


def make_tokens() -> DevelopmentTokens:
    """Make new tokens."""
    return DevelopmentTokens(
        roles={role: f"iop-{role}-{secrets.token_urlsafe(24)}" for role in ROLES},
        node=f"iop-node-{secrets.token_urlsafe(24)}",
        edge=f"iop-edge-{secrets.token_urlsafe(24)}",
    )


def principals(tokens: Mapping[str, str]) -> list[dict[str, str]]:
    """One principal per role, by hash."""
    return [
        {"name": role, "token": SecretHash.of(token).reference, "role": role}
        for role, token in tokens.items()
    ]


def write_engine(
    directory: Path, *, tokens: DevelopmentTokens, listen: Mapping[str, str], settings: Mapping[str, object]
) -> Path:
    """engine.yaml. ``settings`` are further top-level keys; None values are left out."""
    config: dict[str, Any] = {
        "listen": dict(listen),
        **{key: value for key, value in settings.items() if value is not None},
        "store": f"sqlite:///{directory.parent / 'engine.db'}",
        "admin": {
            "principals": [
                {"name": "edge", "token": SecretHash.of(tokens.edge).reference, "role": "admin"},
                *principals(tokens.roles),
            ]
        },
    }
    return _write(directory / "engine.yaml", config)


def write_edge(
    directory: Path,
    *,
    tokens: DevelopmentTokens,
    listen: Mapping[str, str],
    engine: Mapping[str, Any],
) -> Path:
    """edge.yaml, for an engine that announced its addresses, its model and its slots."""
    write_private(directory / "engine-admin.token", tokens.edge + "\n")
    adapter = {
        "name": ADAPTER_NAME,
        "type": "openai_compat",
        "endpoint": f"http://{engine['http']}",
        # What the reference engine serves; the Edge converts the other chat dialects and refuses the rest (SF-01).
        "profile": {
            "operations": {
                "models": {"method": "GET", "path": "/v1/models"},
                "chat_completions": {"method": "POST", "path": "/v1/chat/completions"},
            }
        },
        "openengine": engine["openengine"],
        "admin": {"target": engine["admin"], "token": "file:engine-admin.token"},
        "capacity": engine["slots"],
    }
    config = {
        "listen": dict(listen),
        "dispatch": {"shutdown_grace_sec": SHUTDOWN_GRACE_S},
        "store": f"sqlite:///{directory.parent / 'edge.db'}",
        "admin": {"principals": principals(tokens.roles)},
        "nodes": [{"id": NODE_ID, "token": SecretHash.of(tokens.node).reference, "adapters": [adapter]}],
        "models": [
            {
                "id": engine["model"],
                "providers": [{"node": NODE_ID, "adapter": ADAPTER_NAME, "target": engine["model"]}],
            }
        ],
    }
    return _write(directory / "edge.yaml", config)


def write_node(directory: Path, *, tokens: DevelopmentTokens, edge: str) -> Path:
    """node.yaml, for an Edge that listens at ``edge``."""
    write_private(directory / "node.token", tokens.node + "\n")
    config = {
        "edge": edge,
        "node": NODE_ID,
        "token": "file:node.token",
        "reconnect": {"interval_sec": 1, "max_attempts": 0},
    }
    return _write(directory / "node.yaml", config)


def _write(path: Path, config: Mapping[str, Any]) -> Path:
    write_private(path, _HEADER + yaml.safe_dump(dict(config), sort_keys=False))
    return path
