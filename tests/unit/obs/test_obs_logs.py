"""Logs: one object per event, identifiers in scope, no secrets and no content."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from iop.obs import LogFormat, RepeatLimiter, bound, configure_logging, timed


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    written = io.StringIO()
    configure_logging(fmt=LogFormat.JSON, stream=written, process="edge")
    yield written
    root.handlers, root.level = handlers, level


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.clause("SF-32")
def test_an_event_has_its_text_fields_and_the_identifiers_in_scope(stream: io.StringIO) -> None:
    with bound(request_id="r1", node_id=None):
        logging.getLogger("iop.edge").info("run.completed", extra={"outcome": "complete"})
    logging.getLogger("iop.edge").info("run.completed")
    first, second = events(stream)
    assert first["event"] == "run.completed"
    assert first["outcome"] == "complete"
    assert first["request_id"] == "r1"
    assert first["process"] == "edge"
    assert first["level"] == "info"
    assert first["logger"] == "iop.edge"
    assert "node_id" not in first
    assert "request_id" not in second


def test_credentials_and_content_never_show(stream: io.StringIO) -> None:
    logging.getLogger("x").warning(
        "caller.refused",
        extra={
            "token": "hunter2",
            "prompt": "dear diary",
            "headers": {"Authorization": "Bearer hunter2hunter2", "accept": "json"},
            "detail": "sent 'Authorization: Bearer hunter2hunter2' to postgresql://u:hunter2@db",
            "nested": [{"api_key": "hunter2"}],
        },
    )
    text = stream.getvalue()
    assert "hunter2" not in text
    assert "diary" not in text
    (event,) = events(stream)
    assert event["headers"] == {"Authorization": "***", "accept": "json"}
    assert event["nested"] == [{"api_key": "***"}]


def test_an_error_carries_its_chain_of_causes(stream: io.StringIO) -> None:
    try:
        try:
            raise OSError("disk is gone")
        except OSError as error:
            raise RuntimeError("the journal cannot be written") from error
    except RuntimeError:
        logging.getLogger("x").exception("journal.failed")
    (event,) = events(stream)
    assert "disk is gone" in json.dumps(event)
    assert "the journal cannot be written" in json.dumps(event)


def test_a_timed_action_logs_its_end_and_duration(stream: io.StringIO) -> None:
    clock = iter([10.0, 10.25, 20.0, 20.5])
    log = logging.getLogger("x")
    with timed(log, "migration", monotonic=lambda: next(clock), op_id="o1"):
        pass
    with pytest.raises(ValueError, match="no"), timed(log, "migration", monotonic=lambda: next(clock)):
        raise ValueError("no")
    first, second = events(stream)
    assert (first["event"], first["duration_ms"], first["op_id"]) == ("migration.completed", 250.0, "o1")
    assert second["event"] == "migration.failed"


def test_repeats_are_held_back_and_counted() -> None:
    limiter = RepeatLimiter(period_s=10, keys_max=2)
    assert limiter.admit("a", now=0) == 0
    assert limiter.admit("a", now=1) is None
    assert limiter.admit("a", now=9.9) is None
    assert limiter.admit("b", now=9.9) == 0
    assert limiter.admit("a", now=10) == 2
    assert limiter.admit("c", now=11) == 0
    assert limiter.admit("b", now=11) == 0, "the oldest key was forgotten to keep memory bounded"


def test_a_traceback_shows_no_local_variables(stream: io.StringIO) -> None:
    def handle(prompt: str) -> None:
        raise ValueError(len(prompt))

    try:
        handle("my secret plan")
    except ValueError:
        logging.getLogger("x").exception("request.failed")
    assert "my secret plan" not in stream.getvalue()


def test_a_group_of_errors_shows_each_of_them(stream: io.StringIO) -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ExceptionGroup(
                "two tasks", [OSError("disk"), ValueError("Bearer hunter2hunter2")]
            ) from None
    except ExceptionGroup:
        logging.getLogger("x").exception("tasks.failed")
    ((group,),) = [event["exception"] for event in events(stream)]
    assert [[inner["exc_type"] for inner in chain] for chain in group["exceptions"]] == [
        ["OSError"],
        ["ValueError"],
    ]
    assert "hunter2" not in stream.getvalue()
    assert group["frames"][0]["name"] == "test_a_group_of_errors_shows_each_of_them"


def test_a_recursion_without_end_is_logged_in_bounds(stream: io.StringIO) -> None:
    def again() -> None:
        again()

    try:
        again()
    except RecursionError:
        logging.getLogger("x").exception("request.failed")
    (event,) = events(stream)
    assert len(event["exception"][0]["frames"]) == 50


def test_a_line_for_people_has_the_same_fields() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    written = io.StringIO()
    configure_logging(fmt=LogFormat.CONSOLE, stream=written, process="node")
    try:
        with bound(run_id="r1"):
            logging.getLogger("iop.node").warning(
                "link.%s", "lost", extra={"why": "no heart", "token": "hunter2"}
            )
        try:
            raise OSError("Bearer hunter2hunter2 was refused")
        except OSError:
            logging.getLogger("iop.node").exception("link.failed")
    finally:
        root.handlers, root.level = handlers, level
    first, second, *rest = written.getvalue().splitlines()
    assert first.endswith("[warning ] link.lost [iop.node] process=node run_id=r1 token=*** why='no heart'")
    assert "[error   ] link.failed" in second
    assert rest[0].startswith("Traceback")
    assert "hunter2" not in written.getvalue()


def test_a_debug_line_of_a_noisy_library_is_left_out(stream: io.StringIO) -> None:
    logging.getLogger("sqlalchemy").info("SELECT 1")
    logging.getLogger("sqlalchemy").warning("the pool is full")
    assert [event["event"] for event in events(stream)] == ["the pool is full"]
