"""Which variables of the parent reach which part of ``iop up``, and when it tells what an earlier run left."""

from __future__ import annotations

from typing import Any

import pytest

from iop.app import up
from iop.app.up import environment_of, settled_status
from iop.core.errors import Unavailable

PARENT = {
    "PATH": "/bin",
    "IOP_HOME": "/h",
    "IOP_LISTEN__HTTP": "127.0.0.1:8081",
    "IOP_STORE": "sqlite:///x.db",
    "IOP_RANKS": "4",
    "IOP_EDGE": "127.0.0.1:1",
}


def test_a_key_of_several_configs_means_the_edges() -> None:
    edge, node, engine = (environment_of(part, PARENT) for part in ("edge", "node", "engine"))
    assert edge == PARENT
    assert set(engine) == {"PATH", "IOP_HOME", "IOP_RANKS"}
    assert set(node) == {"PATH", "IOP_HOME"}


def status_with(*gates: str) -> dict[str, Any]:
    return {"nodes": [{"providers": [{"gates": list(gates)}]}, {"providers": []}], "models": []}


@pytest.mark.clause("AD-26", "AD-35")
async def test_what_holds_a_provider_is_told_once_its_reconciliation_is_over() -> None:
    answers = iter([status_with("reconciliation"), status_with("reconciliation"), status_with("epoch 7")])
    assert await settled_status(lambda: next(answers)) == status_with("epoch 7")


@pytest.mark.clause("AD-35")
async def test_an_engine_that_is_never_reconciled_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "RECONCILED_TIMEOUT_S", 0.0)
    assert await settled_status(lambda: status_with("reconciliation")) == status_with("reconciliation")


async def test_a_status_that_cannot_be_had_is_an_error() -> None:
    def refuse() -> dict[str, Any]:
        raise Unavailable("gone", reason="GONE")

    with pytest.raises(Unavailable):
        await settled_status(refuse)
