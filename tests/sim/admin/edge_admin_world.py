"""The same world with a whole Edge between core and engines: steps travel as the wire carries them (AD-36, EN-120)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence

from iop.admin.core import AdminCore
from iop.admin.steps import StepCall
from iop.core.errors import IopError, PreconditionFailed, Unavailable
from iop.core.ids import GroupId, OperationId, ParticipantId, RunId
from iop.edge.edge import Edge
from iop.net.admin_steps import AdminStepCodec
from iop.testing.admin_world import AdminWorld
from iop.testing.edge_fleet import FakeEdgeConnection, adapter_spec, snapshot_of
from iop.testing.fake_participants import FakeFleet
from iop.testing.memory_journal import MemoryJournal
from iop.wire.messages import (
    AdminStep,
    AdminStepResult,
    CommandRequest,
    CommandResponse,
    ParticipantReport,
)

CODEC = AdminStepCodec()
NODES = ("n1", "n2")


class FleetBehindNodes(FakeFleet):
    """Engines of two ranks each; whoever vanishes takes its Node's connection along."""

    def __init__(self) -> None:
        super().__init__({f"{node}/main": 2 for node in NODES})
        self.connections: dict[GroupId, NodeOfGroup] = {}

    async def _until_connected(self, call: StepCall) -> None:
        if not all(self.ranks[p].connected for p in call.participant_ids):
            self.connections[call.group_id].lose()
            raise Unavailable("the connection ended")


class NodeOfGroup(FakeEdgeConnection):
    """A Node that carries steps to one group of the fleet."""

    def __init__(self, edge: Edge, fleet: FleetBehindNodes, node: str) -> None:
        super().__init__(edge.nodes, node=node)
        self._fleet = fleet
        self._group = GroupId(f"{node}/main")
        fleet.connections[self._group] = self

    async def command(self, request: CommandRequest, *, timeout_s: float) -> CommandResponse:
        """Tell the ranks."""
        await asyncio.sleep(0)
        if self.close_reason is not None:
            raise Unavailable("the connection ended")
        reports = []
        for index, info in enumerate(p for p in self._fleet.participants() if p.group_id == self._group):
            back = self._fleet._read_back(info.participant_id)
            reports.append(
                ParticipantReport(
                    adapter="main",
                    info=CODEC.encode_info(dataclasses.replace(info, rank=index)),
                    read_back=CODEC.encode_read_back(back),
                )
            )
        return CommandResponse(type=request.type, ok=True, participants=tuple(reports))

    async def admin_step(  # type: ignore[override]  # progress is not told
        self, step: AdminStep, *, payload: Sequence[bytes] = (), on_event: object = None, timeout_s: float
    ) -> AdminStepResult:
        """Carry it out."""
        self._require_ready()
        call = StepCall(
            operation_id=OperationId(step.operation_id),
            ordinal=step.ordinal,
            step=step.step,
            group_id=self._group,
            participant_ids=tuple(map(ParticipantId, step.participant_ids)),
            body=CODEC.decode_step(step.request, payload),
            timeout_s=timeout_s,
        )
        told = {"operation_id": step.operation_id, "step": step.step}
        try:
            result = await self._fleet.execute(call, lambda _: None)
        except PreconditionFailed as stale:
            return AdminStepResult(**told, refused_code="stale_step", refused_reason=stale.message)
        except IopError as error:
            if self.close_reason is not None:
                raise Unavailable("the connection ended") from error
            return AdminStepResult(**told, refused_code="unavailable", refused_reason=error.message)
        return AdminStepResult(**told, outcome=CODEC.encode_result(result))


class EdgeWorld(AdminWorld):
    """Its driver is an Edge."""

    fleet: FleetBehindNodes
    edge: Edge

    def __init__(self) -> None:
        super().__init__({})
        self.fleet = FleetBehindNodes()

    @contextlib.asynccontextmanager
    async def server(self) -> AsyncIterator[AdminCore]:
        """Run an Edge with its core; every Node is connected and every rank known."""
        adapters = {f"{node}/main": adapter_spec("main", is_administered=True) for node in NODES}
        runs = itertools.count(1)
        self.edge = Edge(
            snapshot_of(adapters, {"m": list(adapters)}),
            clock=self.clock,
            codec=CODEC,
            new_run_id=lambda: RunId(f"run-{next(runs)}"),
        )
        self.journal = MemoryJournal(self.store, unix_nanos=self.clock.unix_nanos)
        self.core = AdminCore(
            journal=self.journal,
            driver=self.edge.participants,
            clock=self.clock,
            new_id=self._new_id,
            owner="test",
            timing=self.timing,
            limits=self.limits,
        )
        self.edge.participants.attach(self.core.participants_changed)
        async with self.edge, asyncio.TaskGroup() as tasks:
            runner = tasks.create_task(self.core.run(), name="server")
            await self.core.wait_ready()
            for node in NODES:
                self.connect(node)
            await self.settle(5)
            try:
                yield self.core
            finally:
                runner.cancel()

    def connect(self, node: str) -> None:
        """Connect a Node anew."""
        NodeOfGroup(self.edge, self.fleet, node).connect()

    def heal(self, group: str) -> None:
        """All faults are over; a group's engine restarts, and its Node is connected."""
        self.fleet.faults.clear()
        self.fleet.release_hangs.set()
        self.fleet.restart(group)
        if self.fleet.connections[GroupId(group)].close_reason is not None:
            self.connect(group.split("/", maxsplit=1)[0])

    def take_gates(self) -> None:
        """Show the Edge's gates where the checks look for them."""
        gates: Mapping[ParticipantId, object] = {
            p: gate for group in self.edge.participants._groups.values() for p, gate in group.gates.items()
        }
        self.fleet.gates = dict(gates)  # type: ignore[arg-type]
