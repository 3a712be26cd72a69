"""The suite's own parts: checks, requests, hooks, reports."""

from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import grpc
import pytest
from rich.console import Console

from iop.conformance.checks import all_checks
from iop.conformance.hooks import CommandHooks, HookName, HookPhase, NoHooks
from iop.conformance.messages import pb
from iop.conformance.model import Check, CheckFailed, CheckNotRun, CheckResult, Outcome, Report, check
from iop.conformance.offer import Offer
from iop.conformance.report import as_json, as_junit, cells, print_table
from iop.conformance.wire import METHODS, MUTATIONS, Answer, with_unknown


def result(outcome: Outcome, detail: str = "", check_id: str = "AD-12-x") -> CheckResult:
    return CheckResult(
        check_id=check_id, clauses=("AD-12",), meaning="it holds", outcome=outcome, detail=detail, seconds=0.5
    )


def report(*outcomes: Outcome) -> Report:
    return Report(
        target="h:1",
        server="s 1",
        results=tuple(result(o, "saw \x1b<that>" if o is not Outcome.PASS else "") for o in outcomes),
    )


@pytest.mark.clause("AD-102")
def test_every_check_has_an_id_of_its_own_its_clause_and_one_line_of_meaning() -> None:
    checks = all_checks()
    assert len({one.check_id for one in checks}) == len(checks) > 100
    for one in checks:
        assert one.clauses[0] == "-".join(one.check_id.split("-")[:2])
        assert one.meaning
        assert "\n" not in one.meaning
        assert len(one.meaning) < 130
        assert one.timeout_s <= 300


@pytest.mark.clause("AD-102")
@pytest.mark.parametrize(
    ("outcomes", "code", "is_full"),
    [
        ((Outcome.PASS, Outcome.SKIP), 0, True),
        ((Outcome.PASS, Outcome.NOT_RUN), 6, False),
        ((Outcome.PASS, Outcome.NOT_RUN, Outcome.FAIL), 1, False),
        ((), 1, False),
    ],
)
def test_a_run_with_something_not_run_is_no_full_pass(
    outcomes: tuple[Outcome, ...], code: int, is_full: bool
) -> None:
    run = report(*outcomes)
    assert (run.exit_code, run.is_full_pass) == (code, is_full)


@pytest.mark.clause("AD-102")
def test_reports_carry_every_row_and_survive_what_a_server_says() -> None:
    run = report(Outcome.PASS, Outcome.FAIL, Outcome.SKIP, Outcome.NOT_RUN)
    suite = ElementTree.fromstring(as_junit(run))
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
    }
    shape = json.loads(json.dumps(as_json(run)))
    assert [row["outcome"] for row in shape["checks"]] == ["PASS", "FAIL", "SKIP", "NOT RUN"]
    assert shape["counts"]["NOT RUN"] == 1
    console = Console(width=120, file=io.StringIO(), record=True)
    print_table(run, console)
    text = console.export_text()
    assert "not conformant" in text
    assert "<that>" in text
    lines = list(cells(run))
    assert [outcome for outcome, *_ in lines] == ["PASS", "FAIL", "SKIP", "NOT RUN"]
    assert "<that>" in lines[1][3]
    assert not any("\n" in text for line in lines for text in line), "a line each, so that it can be piped"


def profile() -> object:
    def participant(name: str, group: str, *kinds: int, connected: bool = True) -> object:
        return pb.AdminParticipant(
            participant_id=name,
            group_id=group,
            connected=connected,
            models=["m"],
            operations=kinds,
            cache_kinds=[pb.CACHE_KIND_PREFIX],
            busy_policies=[pb.BUSY_POLICY_WAIT],
        )

    flush, pause = pb.ADMIN_OPERATION_KIND_FLUSH_CACHES, pb.ADMIN_OPERATION_KIND_PAUSE
    return pb.AdminProfile(
        participants=[
            participant("a/0", "a", flush),
            participant("a/1", "a", flush, pause),
            participant("b/0", "b"),
        ]
    )


def test_requests_select_whole_groups_that_offer_the_kind() -> None:
    offer = Offer(profile())
    assert offer.ids("FlushCaches") == ("a/0", "a/1")
    assert list(offer.target("FlushCaches").participants.participant_ids) == ["a/0", "a/1"]
    assert not offer.has("Pause"), "a/0 does not offer it, so its group does not"
    assert offer.samples == ("FlushCaches",)


@pytest.mark.parametrize("path", [(), ("options",), ("target",), ("target", "all")])
def test_an_unknown_field_goes_in_without_changing_the_rest(path: tuple[str, ...]) -> None:
    request = pb.PauseRequest(
        options=pb.MutationOptions(idempotency_key="k"), target=pb.TargetSelector(all=pb.AllTargets())
    )
    read = pb.PauseRequest.FromString(with_unknown(request, path))
    assert read != request
    holder = read
    for name in path:
        holder = getattr(holder, name)
    assert holder.SerializeToString()
    read.DiscardUnknownFields()
    assert read == request


def test_mutations_are_the_rpcs_with_a_key() -> None:
    assert {rpc for rpc in METHODS if "options" in METHODS[rpc].input_type.fields_by_name} == set(MUTATIONS)


def test_a_refusal_without_error_info_is_a_failure_even_with_the_right_status() -> None:
    bare = Answer(rpc="Pause", messages=(), code=grpc.StatusCode.ABORTED)
    with pytest.raises(CheckFailed, match="ErrorInfo"):
        bare.refused(grpc.StatusCode.ABORTED)
    told = Answer(
        rpc="Pause",
        messages=(),
        code=grpc.StatusCode.ABORTED,
        reason="REVISION_MISMATCH",
        has_error_info=True,
    )
    assert told.refused(grpc.StatusCode.ABORTED) is told
    with pytest.raises(CheckFailed, match="REVISION_PENDING"):
        told.refused(grpc.StatusCode.ABORTED, reason="REVISION_PENDING")


async def test_hooks_are_commands_that_are_told_their_name_and_phase(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    hooks = CommandHooks({HookName.HOLD: f'echo "$CONFORMANCE_HOOK $CONFORMANCE_PHASE" >> {seen}'})
    assert hooks.has(HookName.HOLD)
    assert not hooks.has(HookName.CUT)
    await hooks.run(HookName.HOLD, HookPhase.BEGIN)
    await hooks.run(HookName.HOLD, HookPhase.END)
    assert seen.read_text() == "hold begin\nhold end\n"


async def test_without_a_hook_and_with_one_that_fails_nothing_is_judged() -> None:
    with pytest.raises(CheckNotRun, match="--hook cut=CMD"):
        await NoHooks().run(HookName.CUT)
    with pytest.raises(CheckNotRun, match="ended with 3: no such rank"):
        await CommandHooks({HookName.CUT: "echo no such rank >&2; exit 3"}).run(HookName.CUT)


def test_a_check_takes_its_clause_from_its_id() -> None:
    @check("AD-12-example", clauses=["AD-13", "AD-12"])
    async def example(bench: object) -> None:
        """It is an example."""

    assert isinstance(example, Check)
    assert example.clauses == ("AD-12", "AD-13")
    assert example.meaning == "It is an example"
