"""The one Protocol that every engine adapter serves, and what an adapter may ask of its surroundings.

Theory of operation. An adapter is one instance of one engine kind on one Node: a **provider**. The Node
creates it from an :class:`iop.wire.messages.AdapterConfig`, starts it inside a task group of its own, hands
it work, and closes it.

* **Tunnels** are callbacks from first to last byte: :meth:`Adapter.open_tunnel` returns at once, and engine
  bytes go from the engine's socket callback to ``TunnelStream.send_body``. No task and no queue per chunk.
* **Runs** are one coroutine each, owned by the Node.
* **Admin steps** are the operation core's own :class:`iop.admin.steps.StepCall`; success is what was read
  back (AD-37).

The streams below are Protocols of our own: the connection's classes satisfy them, and so does any test
double. An adapter owes each stream exactly one terminal, also after a cancel (EN-52, EN-56), and keeps its
gate slot until nothing of the work is left at the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Final, Protocol

from iop.admin.participant import ProgressSink
from iop.admin.profile import ParticipantInfo
from iop.admin.steps import ParticipantReadBack, StepCall, StepResult
from iop.core.clock import Clock
from iop.core.ids import ParticipantId, SessionId
from iop.wire.messages import (
    BodyFraming,
    CancelReason,
    Header,
    RunEvent,
    RunRequest,
    StreamError,
    TunnelRequest,
    Usage,
)
from iop.wire.model_facts import ModelFacts

# ---- what an adapter is given ----


class TunnelStream(Protocol):
    """One provider request to serve; the part of the connection's tunnel that adapters need."""

    @property
    def request(self) -> TunnelRequest:
        """As sent, without its body."""
        ...

    @property
    def body(self) -> Sequence[bytes]:
        """The whole body in parts."""
        ...

    @property
    def credit_bytes(self) -> int:
        """How many body bytes may be sent now; at or below zero: stop reading from the engine (EN-102)."""
        ...

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """Install callbacks; ``on_cancel`` comes at most once, ``on_writable`` when credit is above zero
        again.
        """
        ...

    def start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """Send the engine's status and headers, at most once."""
        ...

    def send_body(self, data: bytes) -> None:
        """Send the engine's bytes unchanged (EN-53)."""
        ...

    def send_usage(self, usage: Usage) -> None:
        """Send an observation; never part of the body."""
        ...

    def end(self) -> None:
        """The answer is whole."""
        ...

    def fail(self, error: StreamError) -> None:
        """The answer ended badly."""
        ...


class RunStream(Protocol):
    """One normalised run to serve."""

    @property
    def request(self) -> RunRequest:
        """With its whole input."""
        ...

    @property
    def credit_bytes(self) -> int:
        """How many delta bytes may be sent now (EN-102)."""
        ...

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """Install callbacks, as for tunnels."""
        ...

    def emit(self, event: RunEvent) -> None:
        """Send one event; sequence numbers are set by the connection."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterServices:
    """What an adapter may use of its Node.

    Attributes:
        clock: the only source of time.
        environment: the Node process's own variables, of which a config may let some through to an agent.
        on_change: say that the snapshot or the participants changed; level-triggered, cheap, may be called
            often.
    """

    clock: Clock
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    on_change: Callable[[], None] = field(default=lambda: None)


# ---- what an adapter tells ----


MODEL_CAPABILITY: Final = "openengine_model:"
"""Prefix of the capability that carries, in base64, what an OpenEngine server says of one target (SF-22)."""


@unique
class Category(Enum):
    """What kind of resource a provider is (EN-90)."""

    API = "api"
    CLI = "cli"
    LOCAL_INFERENCE = "local_inference"


@unique
class Health(Enum):
    """How the engine is, as last probed; UNKNOWN until the first probe."""

    UNKNOWN = "unknown"
    READY = "ready"
    DEGRADED = "degraded"
    DRAINING = "draining"
    NOT_READY = "not_ready"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCapabilities:
    """What this instance really offers, as probed; what is missing is not advertised.

    Attributes:
        kind: the adapter type of the config.
        tunnels: raw provider requests are served.
        runs: normalised runs are served.
        operations: named profile operations that tunnels may use (EN-51).
        admin: admin steps are served.
        admin_refusal: why not, or not all of them, and how to enable it; or why the engine's admin listener does not
            answer now. Empty when all is well.
        sessions: TERMINATE_SESSION ends state that the engine keeps (EN-70).
    """

    kind: str
    category: Category
    tunnels: bool = False
    runs: bool = False
    operations: frozenset[str] = frozenset()
    admin: bool = False
    admin_refusal: str = ""
    sessions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSnapshot:
    """How the provider stands now; cheap to take.

    Attributes:
        reason: why health is not READY, without addresses or secrets (EN-04).
        models: names that the engine serves, as it says; empty when it was not asked yet.
        weight_version: the engine's published label; empty when it tells none.
        engine_in_flight: requests at the engine by its own count; `None` when it tells none.
        engine_queued: waiting inside the engine; `None` when it tells none.
        model_infos: by target, an OpenEngine server's own serialised ``ModelInfo``.
        data_parallel_ranks: by target, the ranks of the engine that a run can ask for (SF-21).
        model_facts: by the engine's name for a model, what it says of it.
        absent_operations: what the profile names and the engine was found not to have.
    """

    health: Health
    reason: str = ""
    models: tuple[str, ...] = ()
    weight_version: str = ""
    engine_version: str = ""
    engine_in_flight: int | None = None
    engine_queued: int | None = None
    model_infos: Mapping[str, bytes] = field(default_factory=dict)
    data_parallel_ranks: Mapping[str, frozenset[int]] = field(default_factory=dict)
    model_facts: Mapping[str, ModelFacts] = field(default_factory=dict)
    absent_operations: frozenset[str] = frozenset()


class Adapter(Protocol):
    """One provider. All methods are called on the event loop; coroutines may run side by side."""

    @property
    def capabilities(self) -> AdapterCapabilities:
        """What it offers. Constant between probes."""
        ...

    def snapshot(self) -> AdapterSnapshot:
        """How it stands, from the last probe and from what requests showed since. No waiting."""
        ...

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Make it ready to serve. Background work is born in ``tasks`` and never raises out of it.

        An engine that cannot be reached yet is no error: it shows in the snapshot.

        Raises:
            InvalidRequest: the config cannot work, whatever the engine does; the message names key and fix.
        """
        ...

    async def aclose(self) -> None:
        """End everything at once and close connections. Idempotent; streams still open get their terminal."""
        ...

    async def probe(self) -> None:
        """Ask the engine how it is and refresh snapshot, capabilities and participants. Bounded; never
        raises.
        """
        ...

    def open_tunnel(self, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """Serve one tunnel. Returns at once and never raises; failures become the stream's one terminal.

        Args:
            stream: bound by the adapter before this returns, so that a cancel always finds it.
            on_done: called exactly once, when the terminal was sent and nothing of it is left at the engine.
        Contract: EN-50 to EN-57, EN-102
        """
        ...

    async def run(self, stream: RunStream) -> None:
        """Serve one normalised run to its terminal event; returns when nothing of it is left at the engine.

        Never raises but `CancelledError`, after which the engine's request is cancelled as well. The adapter
        binds the stream; on its cancel it ends the engine's request and emits CANCELLED (EN-40, EN-56).
        """
        ...

    def open_artifact(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """Stream one profile artifact back (AD-46); as :meth:`open_tunnel`."""
        ...

    async def terminate_session(self, session_id: SessionId) -> None:
        """Drop what the engine keeps for this session; its runs were cancelled before. Unknown: no-op
        (EN-70).
        """
        ...

    def participants(self) -> Sequence[ParticipantInfo]:
        """The engine's ranks as of the last probe, with ids as the engine names them. Empty without admin."""
        ...

    async def execute_step(self, call: StepCall, report: ProgressSink) -> StepResult:
        """Execute one admin step and read its effect back (AD-37). Called once per (operation, step) (AD-36).

        Failures of participants are outcomes, not exceptions.

        Raises:
            Unsupported: this adapter or engine does not offer the step; nothing was touched.
            PreconditionFailed: the engine was found in a state that forbids it; nothing was touched.
            Unavailable: the engine could not be asked at all.
        Cancellation: stops waiting; the step may still take effect, which read-back tells.
        """
        ...

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """Ask the engine how these stand now, one answer per id in order; unreachable is an answer.
        Bounded.
        """
        ...


class EngineControl(Protocol):
    """The admin half of an adapter, for engines whose control interface stands beside their inference one.

    Methods are those of :class:`Adapter`.
    """

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Open the control connection; an unreachable engine is no error."""
        ...

    async def aclose(self) -> None:
        """Close it."""
        ...

    @property
    def failure(self) -> str:
        """Why it does not answer; empty while it does."""
        ...

    async def probe(self) -> None:
        """Refresh participants and weight version. Bounded; never raises."""
        ...

    def weight_version(self) -> str:
        """The published label as of the last probe or step; empty when unknown or not the same on all
        ranks.
        """
        ...

    def participants(self) -> Sequence[ParticipantInfo]:
        """As of the last probe."""
        ...

    async def execute_step(self, call: StepCall, report: ProgressSink) -> StepResult:
        """As :meth:`Adapter.execute_step`."""
        ...

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """As :meth:`Adapter.read_back`."""
        ...

    def open_artifact(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """As :meth:`Adapter.open_artifact`."""
        ...
