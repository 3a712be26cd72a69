"""The audit chain is followed in the store: a row removed, altered, or a tail cut off is found."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from iop.admin.journal import AuditEntry
from iop.app.audit import default_store, verify_audit
from iop.config.values import StoreUrl
from iop.core.errors import NotFound
from iop.store.journal import SqlJournal


@pytest.fixture
async def store(tmp_path: Path) -> StoreUrl:
    """A store with five audit rows."""
    url = StoreUrl(url=f"sqlite:///{tmp_path / 'edge.db'}")
    journal = SqlJournal(url.url, unix_nanos=lambda: 1)
    await journal.acquire("test")
    for number in range(5):
        await journal.append_audit(
            AuditEntry(
                at_unix_nanos=number,
                principal="ops",
                peer="ipv4:127.0.0.1:1",
                method="PAUSE",
                outcome="ACCEPTED",
                operation_id=f"op-{number}",
                request_sha256=b"",
                reason="",
            )
        )
    await journal.aclose()
    return url


def change(store: StoreUrl, statement: str) -> None:
    assert store.sqlite_path is not None
    with sqlite3.connect(store.sqlite_path) as connection:
        (table,) = connection.execute(
            "select name from sqlite_master where name like '%audit%' and type = 'table'"
        ).fetchone()
        connection.execute(statement.format(table=table))
    connection.close()


@pytest.mark.clause("AD-106")
async def test_an_unbroken_chain_is_valid_and_holds_every_head_it_had(store: StoreUrl) -> None:
    report = await verify_audit(store, head=None)
    assert (report.rows, report.problem) == (5, "")
    change(store, 'delete from {table} where "index" = 5')
    earlier = await verify_audit(store, head=None)
    assert (earlier.rows, earlier.problem) == (4, "")
    assert (await verify_audit(store, head=earlier.head)).problem == ""
    assert "the tail was cut off" in (await verify_audit(store, head=report.head)).problem


@pytest.mark.clause("AD-106")
@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ('delete from {table} where "index" = 3', "row 3 is missing"),
        ("update {table} set body = replace(body, 'op-2', 'op-9')", "row 3 was altered"),
        ('delete from {table} where "index" = 1', "row 1 is missing"),
    ],
)
async def test_a_removed_or_altered_row_is_named(store: StoreUrl, statement: str, problem: str) -> None:
    change(store, statement)
    assert (await verify_audit(store, head=None)).problem == problem


async def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await verify_audit(StoreUrl(url=f"sqlite:///{tmp_path / 'gone.db'}"), head=None)
    with pytest.raises(NotFound):
        default_store(tmp_path)
    assert list(tmp_path.iterdir()) == []
