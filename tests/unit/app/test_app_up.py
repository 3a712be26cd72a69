"""Which variables of the parent reach which part of ``iop up``."""

from __future__ import annotations

from iop.app.up import environment_of

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
