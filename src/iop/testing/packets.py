"""Well-formed messages with short names, and two sessions joined without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iop.core.ids import NodeId, RunId
from iop.wire.events import Event
from iop.wire.messages import (
    AdapterConfig,
    AdminStep,
    NodeConfig,
    OpenAICompatSettings,
    ProfileOperation,
    ProtocolProfile,
    ReadyAck,
    ReadyRequest,
    RegisterRequest,
    RegisterResponse,
    RunRequest,
    TunnelRequest,
)
from iop.wire.session import SessionSettings
from iop.wire.session_edge import EdgeSession
from iop.wire.session_node import NodeSession


def register_request(**changes: Any) -> RegisterRequest:
    """A registration of ``node-1`` in the version of this build."""
    return RegisterRequest(
        **{
            "node_id": NodeId("node-1"),
            "token": "a-secret-token",
            "protocol_version": 1,
            "software_version": "0.1.0",
            "instance_id": "instance-1",
            "adapter_types": ("openai_compat",),
            **changes,
        }
    )


def node_config(**changes: Any) -> NodeConfig:
    """Revision 1 with one OpenAI-compatible adapter."""
    profile = ProtocolProfile(
        name="openai",
        operations={"chat_completions": ProfileOperation(method="POST", path="/v1/chat/completions")},
    )
    adapter = AdapterConfig(
        name="engine",
        type="openai_compat",
        capacity=4,
        settings=OpenAICompatSettings(
            endpoint="http://127.0.0.1:8000", api_key="an-engine-key", protocol_profile=profile
        ),
    )
    return NodeConfig(**{"config_revision": 1, "adapters": (adapter,), **changes})


def register_response(**changes: Any) -> RegisterResponse:
    """An acceptance of ``node-1``."""
    return RegisterResponse(
        **{"accepted": True, "node_id": NodeId("node-1"), "config": node_config(), **changes}
    )


def ready_request(**changes: Any) -> ReadyRequest:
    """``node-1`` is ready with revision 1."""
    return ReadyRequest(**{"node_id": NodeId("node-1"), "config_revision": 1, **changes})


def tunnel_request(run_id: str = "run-1", **changes: Any) -> TunnelRequest:
    """A chat completion for the adapter ``engine``."""
    return TunnelRequest(
        **{
            "run_id": RunId(run_id),
            "adapter": "engine",
            "operation": "chat_completions",
            "headers": ((b"Content-Type", b"application/json"),),
            **changes,
        }
    )


def run_request(run_id: str = "run-1", **changes: Any) -> RunRequest:
    """A run on the adapter ``engine``."""
    return RunRequest(
        **{"run_id": RunId(run_id), "adapter": "engine", "target": "a-model", "input": b"{}", **changes}
    )


def admin_step(operation_id: str = "op-1", step: int = 1, **changes: Any) -> AdminStep:
    """A step with an empty request for two ranks."""
    return AdminStep(
        **{
            "operation_id": operation_id,
            "ordinal": 1,
            "step": step,
            "adapter": "engine",
            "group_id": "engine",
            "participant_ids": ("rank-0", "rank-1"),
            "timeout_ms": 30_000,
            "request": b"",
            **changes,
        }
    )


class SessionPair:
    """An Edge session and a Node session whose bytes a test carries by hand.

    Attributes:
        edge_events: what the Edge's session told so far.
        node_events: what the Node's session told so far.
        now: time of every call; a test moves it.
    """

    def __init__(self, settings: SessionSettings | None = None) -> None:
        self.now = 0.0
        self.settings = settings or SessionSettings()
        self.edge = EdgeSession(settings=self.settings, now=self.now)
        self.node = NodeSession(settings=self.settings, now=self.now)
        self.edge_events: list[Event] = []
        self.node_events: list[Event] = []

    @classmethod
    def ready(cls, settings: SessionSettings | None = None) -> SessionPair:
        """A pair behind its handshake, with no events left."""
        pair = cls(settings)
        pair.node.register(register_request())
        pair.carry()
        pair.edge_events += pair.edge.respond_register(register_response(), now=pair.now)
        pair.carry()
        pair.node.send_ready(ready_request(), now=pair.now)
        pair.carry()
        pair.edge_events += pair.edge.respond_ready(ReadyAck(ready=True))
        pair.carry()
        pair.edge_events.clear()
        pair.node_events.clear()
        return pair

    def to_node(self, limit: int = 65536, piece: int | None = None) -> int:
        """Carry one write of the Edge, perhaps in pieces; returns its size."""
        data = self.edge.data_to_send(limit)
        for part in _cut(data, piece):
            self.node_events += self.node.receive_data(part, now=self.now)
        return len(data)

    def to_edge(self, limit: int = 65536, piece: int | None = None) -> int:
        """Carry one write of the Node, perhaps in pieces; returns its size."""
        data = self.node.data_to_send(limit)
        for part in _cut(data, piece):
            self.edge_events += self.edge.receive_data(part, now=self.now)
        return len(data)

    def carry(self) -> None:
        """Carry everything both have to say, until both are silent."""
        while self.to_node() or self.to_edge():
            pass

    def of(self, kind: type, events: Sequence[Event]) -> list[Any]:
        """The events of one kind."""
        return [event for event in events if isinstance(event, kind)]


def _cut(data: bytes, piece: int | None) -> list[bytes]:
    if not data:
        return []
    size = piece or len(data)
    return [data[at : at + size] for at in range(0, len(data), size)]
