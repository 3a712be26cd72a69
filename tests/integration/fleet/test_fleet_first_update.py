"""The first weight update of engines behind their own admin server can be taken back (AD-32); all real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from iop.admin.enums import AdmissionPolicy, CachePolicy, PauseMode, WeightFormat
from iop.admin.requests import DiskSource, MutationOptions, PauseSpec, UpdateWeightsRequest
from iop.admin.results import OperationCompleted, OperationFailed
from iop.engine import builtin_checkpoint
from iop.testing.engine_fleet import MODEL, EngineFleet

pytestmark = pytest.mark.slow

DIES_APPLYING = """
import os, signal
from iop.engine.updates import Updates

async def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

Updates.apply = die
from iop.cli.main import main
main()
"""


def update(version: str) -> UpdateWeightsRequest:
    """Without `allow_irreversible`."""
    return UpdateWeightsRequest(
        options=MutationOptions(idempotency_key=f"to-{version}"),
        model=MODEL,
        source=DiskSource(path=str(builtin_checkpoint(version)), format=WeightFormat.SAFETENSORS),
        weight_version=version,
        cache_policy=CachePolicy.FLUSH,
        quiesce=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE),
    )


@pytest.mark.clause("AD-32", "AD-30")
async def test_the_edge_is_told_what_its_engines_came_with_and_need_not_be_allowed_anything(
    tmp_path: Path,
) -> None:
    async with EngineFleet(tmp_path, ["n1"], ranks=2, capacity=4) as fleet:
        await fleet.start()
        async with fleet.client() as client:
            (weights,) = (await client.profile()).weights
            assert weights.reversible
            for version in ("second", "first"):
                events = [event async for event in client.submit(update(version))]
                assert isinstance(events[-1].event, OperationCompleted), events[-1].event
                assert (await fleet.say("hello", max_tokens=2)).first_version == version


@pytest.mark.clause("AD-32", "AD-31")
async def test_a_first_update_that_fails_on_one_engine_is_taken_back_on_the_other(tmp_path: Path) -> None:
    more = {"admin": {"participant_lost_sec": 2.0}}
    dies = {"engine-n2": ("-c", DIES_APPLYING)}
    async with EngineFleet(tmp_path, ["n1", "n2"], ranks=1, launchers=dies, capacity=4) as fleet:
        fleet.more = {"admin": {**fleet.edge_config()["admin"], **more["admin"]}}
        fleet.write_edge()
        await fleet.start()
        before = await fleet.say("the harbour", engine="n1")
        async with fleet.client() as client:
            body = [event async for event in client.submit(update("second"))][-1].event
            assert isinstance(body, OperationFailed), body
            assert set(body.error.quarantined) == {"n2/main/0"}, "only who could not be reached"
            versions = {
                p.info.participant_id: p.weight_version for p in (await client.profile()).participants
            }
            assert versions["n1/main/0"] == "first"
        after = await fleet.say("the harbour", engine="n1")
        assert (after.first_version, after.text) == (before.first_version, before.text)
