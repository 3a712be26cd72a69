"""A vLLM server that changes its data-parallel size while it serves: a stand-in by its source, since it takes GPUs."""

from __future__ import annotations

import pytest
from engines_rig import ask
from engines_steps import PAUSE, do, error_of, facing
from replay_engine import Answer, ReplayEngine
from sglang_stub import Sglang
from vllm_replay import DEV, VllmReplay

from iop.adapters.base import Adapter, Health
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    ChangeDisposition,
    ReconfigurableField,
)
from iop.admin.requests import ServingChange, ServingValue
from iop.admin.steps import JudgeReconfigureStep, ParticipantReadBack, ReconfigureStep
from iop.core.errors import PreconditionFailed, Unsupported
from iop.testing.adapter_suite import assert_all_ok

SIZE = ReconfigurableField.DATA_PARALLEL_SIZE
STUCK = Answer.of({"is_scaling_elastic_ep": True})


def changes(value: ServingValue = 4, field: ReconfigurableField = SIZE) -> tuple[ServingChange, ...]:
    return (ServingChange(field=field, value=value),)


@pytest.fixture
def vllm() -> VllmReplay:
    engine = VllmReplay(data_parallel_max=4)
    engine.ranks, engine.data_parallel = 2, 2
    return engine


async def read_back(adapter: Adapter) -> ParticipantReadBack:
    (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
    return back


@pytest.mark.clause("AD-15", "AD-37", "AD-47")
async def test_the_size_is_changed_both_ways_and_read_back(vllm: VllmReplay) -> None:
    async with facing("vllm", vllm) as adapter:
        (info,) = adapter.participants()
        assert AdminOperationKind.RECONFIGURE_SERVING in info.capabilities.operations
        assert info.capabilities.reconfigurable_fields == {SIZE}
        assert info.capabilities.data_parallel_size_max == 4
        assert (await read_back(adapter)).serving == ((SIZE, 2),)
        for size in (4, 1):
            vllm.forget()
            result = await do(adapter, ReconfigureStep(changes=changes(size)))
            assert_all_ok(result)
            (change,) = result.participants[0].changes
            assert (change.disposition, change.effective_value) == (ChangeDisposition.APPLIED, str(size))
            (asked,) = [each for each in vllm.asked if each.path == "/scale_elastic_ep"]
            assert asked.body["new_data_parallel_size"] == size
            assert 0 < asked.body["drain_timeout"] <= 60
            assert (await read_back(adapter)).serving == ((SIZE, size),)


@pytest.mark.clause("AD-37", "AD-47")
async def test_the_size_that_it_has_is_not_asked_for_again(vllm: VllmReplay) -> None:
    async with facing("vllm", vllm) as adapter:
        result = await do(adapter, ReconfigureStep(changes=changes(2)))
        assert_all_ok(result)
        (outcome,) = result.participants
        assert not outcome.changed
        assert outcome.changes[0].disposition is ChangeDisposition.UNCHANGED
        assert vllm.posts() == []


@pytest.mark.clause("AD-47")
@pytest.mark.parametrize(
    "change", [changes(5), changes(0), changes(True), changes(2, ReconfigurableField.CAPACITY)]
)
async def test_what_it_was_not_started_for_is_rejected_and_told_before_anything_is_sent(
    vllm: VllmReplay, change: tuple[ServingChange, ...]
) -> None:
    async with facing("vllm", vllm) as adapter:
        (judged,) = (await do(adapter, JudgeReconfigureStep(changes=change))).participants
        assert judged.changes[0].disposition is ChangeDisposition.REJECTED
        assert judged.changes[0].detail
        assert not judged.changed
        with pytest.raises(PreconditionFailed, match=judged.changes[0].detail):
            await do(adapter, ReconfigureStep(changes=change))
        assert vllm.posts() == []


@pytest.mark.clause("AD-37", "AD-47")
async def test_a_size_that_vllm_refuses_leaves_the_old_one_in_force(vllm: VllmReplay) -> None:
    vllm.routes["POST /scale_elastic_ep"] = DEV["scale_elastic_ep"]
    async with facing("vllm", vllm) as adapter:
        error = await error_of(adapter, ReconfigureStep(changes=changes()))
        assert "refused the size, and has 2" in error.message
        assert "Scale failed" in error.message


@pytest.mark.clause("AD-37", "AD-47")
async def test_an_answer_that_changed_nothing_is_no_success(vllm: VllmReplay) -> None:
    vllm.routes["POST /scale_elastic_ep"] = Answer.of({"message": "Scaled to 4 data parallel engines"})
    async with facing("vllm", vllm) as adapter:
        error = await error_of(adapter, ReconfigureStep(changes=changes()))
        assert error.code is AdminErrorCode.VERIFICATION_FAILED


@pytest.mark.clause("AD-47")
async def test_requests_that_outlive_its_drain_leave_it_untouched(vllm: VllmReplay) -> None:
    vllm.routes["POST /scale_elastic_ep"] = Answer.of(
        {"detail": "Scale failed due to request drain timeout"}, 408
    )
    async with facing("vllm", vllm) as adapter:
        (outcome,) = (await do(adapter, ReconfigureStep(changes=changes()))).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.DRAIN_TIMEOUT
        assert not outcome.changed


@pytest.mark.clause("AD-37", "AD-47")
@pytest.mark.parametrize("told", [STUCK, Answer.of({"error": "The model is currently scaling."}, 503)])
async def test_a_change_that_broke_off_in_its_midst_is_told_from_one_that_never_began(
    vllm: VllmReplay, told: Answer
) -> None:
    vllm.routes["POST /scale_elastic_ep"] = DEV["scale_elastic_ep"]
    vllm.routes["POST /is_scaling_elastic_ep"] = told
    async with facing("vllm", vllm) as adapter:
        error = await error_of(adapter, ReconfigureStep(changes=changes()))
        assert "until it is restarted" in error.message


@pytest.mark.clause("EN-34", "AD-37", "AD-47")
async def test_one_that_changes_its_size_is_not_ready_and_no_other_process(vllm: VllmReplay) -> None:
    async with facing("vllm", vllm, "endless") as adapter:
        await do(adapter, PAUSE)
        before = adapter.participants()
        kept = dict(vllm.routes)
        refusal = Answer.of({"error": "The model is currently scaling. Please try again later."}, 503)
        vllm.routes = {**dict.fromkeys(kept, refusal), "GET /health": kept["GET /health"]}
        await adapter.probe()
        assert adapter.snapshot().health is Health.NOT_READY
        assert adapter.participants() == before
        assert (await ask(adapter, {})).error is not None, "its gate is still closed"
        vllm.routes = kept
        await adapter.probe()
        assert adapter.snapshot().health is Health.READY
        assert (await read_back(adapter)).paused


@pytest.mark.clause("AD-15")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_routes_that_are_not_told_for_a_while_are_asked_for_again(kind: str) -> None:
    engine: ReplayEngine = VllmReplay() if kind == "vllm" else Sglang()
    told = engine.routes["GET /openapi.json"]
    engine.routes["GET /openapi.json"] = Answer.of({"error": "later"}, 503)
    async with facing(kind, engine) as adapter:
        (info,) = adapter.participants()
        assert info.capabilities.operations == {AdminOperationKind.PAUSE, AdminOperationKind.RESUME}
        assert adapter.snapshot().health is Health.READY
        engine.routes["GET /openapi.json"] = told
        await adapter.probe()
        (info,) = adapter.participants()
        assert AdminOperationKind.FLUSH_CACHES in info.capabilities.operations


@pytest.mark.clause("AD-15", "AD-47")
async def test_a_vllm_of_a_fixed_size_does_not_offer_it_and_says_how_to_start_it() -> None:
    vllm = VllmReplay()
    async with facing("vllm", vllm) as adapter:
        (info,) = adapter.participants()
        assert AdminOperationKind.RECONFIGURE_SERVING not in info.capabilities.operations
        assert "--enable-elastic-ep" in adapter.capabilities.admin_refusal
        for step in (JudgeReconfigureStep(changes=changes()), ReconfigureStep(changes=changes())):
            with pytest.raises(Unsupported, match="--enable-elastic-ep"):
                await do(adapter, step)
        assert vllm.posts() == []
        assert (await read_back(adapter)).serving == ()
