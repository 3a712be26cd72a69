"""The report: a table for people, JUnit XML for CI, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from xml.etree import ElementTree

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from iop.conformance.model import CheckResult, Outcome, Report

__all__ = ["COLUMNS", "as_json", "as_junit", "cells", "print_table", "row_of", "summary"]

_STYLES: Final[Mapping[Outcome, str]] = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.SKIP: "dim",
    Outcome.NOT_RUN: "yellow",
}

VERSION: Final = 1

COLUMNS: Final = ("outcome", "check", "clauses", "what it means, or what was seen")


def row_of(result: CheckResult) -> str:
    """One line for a terminal, marked up."""
    style = _STYLES[result.outcome]
    detail = f"\n          {escape(result.detail)}" if result.outcome is not Outcome.PASS else ""
    return f"[{style}]{result.outcome.value:<8}[/] {result.check_id:<34} {escape(result.meaning)}{detail}"


def cells(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """Every check, by :data:`COLUMNS`, in plain text; a line each."""
    for result in report.results:
        said = result.meaning if result.outcome is Outcome.PASS else f"{result.meaning}: {result.detail}"
        yield result.outcome.value, result.check_id, " ".join(result.clauses), " ".join(said.split())


def print_table(report: Report, console: Console) -> None:
    """Every check by outcome, then the sum; for a terminal."""
    table = Table(title=f"OpenEngineAdmin conformance of {report.target}", title_justify="left")
    for column in COLUMNS[:2]:
        table.add_column(column, no_wrap=True)
    for column in COLUMNS[2:]:
        table.add_column(column, overflow="fold")
    for result, (outcome, *told) in zip(report.results, cells(report), strict=True):
        table.add_row(f"[{_STYLES[result.outcome]}]{outcome}[/]", *map(escape, told))
    console.print(table)
    console.print(summary(report))


def summary(report: Report) -> str:
    """The sum in one line."""
    counts = ", ".join(f"{report.count(outcome)} {outcome.value}" for outcome in Outcome)
    if report.is_full_pass:
        verdict = "full pass"
    elif report.count(Outcome.FAIL):
        verdict = "not conformant"
    else:
        verdict = "no full pass: some checks were not run"
    return f"{counts}: {verdict}"


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    return {
        "version": VERSION,
        "target": report.target,
        "server": report.server,
        "full_pass": report.is_full_pass,
        "counts": {outcome.value: report.count(outcome) for outcome in Outcome},
        "checks": [
            {
                "id": result.check_id,
                "clauses": list(result.clauses),
                "meaning": result.meaning,
                "outcome": result.outcome.value,
                "detail": result.detail,
                "seconds": round(result.seconds, 3),
            }
            for result in report.results
        ],
    }


def as_junit(report: Report) -> bytes:
    """The report as JUnit XML. NOT RUN is an error there, so that CI does not take it for a pass."""
    suite = ElementTree.Element(
        "testsuite",
        name="openengine-admin-conformance",
        tests=str(len(report.results)),
        failures=str(report.count(Outcome.FAIL)),
        errors=str(report.count(Outcome.NOT_RUN)),
        skipped=str(report.count(Outcome.SKIP)),
        time=f"{sum(result.seconds for result in report.results):.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("target", report.target), ("server", report.server)):
        ElementTree.SubElement(properties, "property", name=name, value=value)
    for result in report.results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=result.clauses[0],
            name=f"{result.check_id}: {result.meaning}",
            time=f"{result.seconds:.3f}",
        )
        match result.outcome:
            case Outcome.FAIL:
                ElementTree.SubElement(case, "failure", message=_clean(result.detail))
            case Outcome.NOT_RUN:
                ElementTree.SubElement(case, "error", message=_clean(result.detail), type="NOT RUN")
            case Outcome.SKIP:
                ElementTree.SubElement(case, "skipped", message=_clean(result.detail))
            case Outcome.PASS:
                pass
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _clean(text: str) -> str:
    """Without characters that XML cannot carry: details quote what a server said."""
    return "".join(c if c >= " " or c in "\t\n" else "?" for c in text)
