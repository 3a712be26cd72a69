"""The configs that iop up writes are valid, ordinary, and hold no token."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from iop.app.development import make_tokens, write_edge, write_engine, write_node
from iop.app.sources import gather
from iop.config import load_edge, load_engine, load_node

ENGINE = {
    "http": "127.0.0.1:8000",
    "openengine": "127.0.0.1:8001",
    "admin": "127.0.0.1:8002",
    "model": "iop-tiny",
    "slots": 16,
}


@pytest.mark.clause("AD-04")
def test_the_files_load_and_fit_together(tmp_path: Path) -> None:
    directory = tmp_path / "up"
    directory.mkdir()
    tokens = make_tokens()
    engine = load_engine(
        gather(
            write_engine(
                directory,
                tokens=tokens,
                listen={"http": "127.0.0.1:0"},
                settings={"ranks": 2, "checkpoint": None},
            ),
            environment={},
        )
    ).config
    edge = load_edge(
        gather(write_edge(directory, tokens=tokens, listen={}, engine=ENGINE), environment={})
    ).config
    node = load_node(
        gather(write_node(directory, tokens=tokens, edge="127.0.0.1:7070"), environment={})
    ).config

    assert edge.nodes[0].token.matches(node.token.reveal())
    adapter = edge.nodes[0].adapters[0]
    assert adapter.admin is not None
    assert adapter.admin.token is not None
    assert engine.admin is not None
    by_name = {principal.name: principal for principal in engine.admin.principals}
    assert by_name["edge"].token is not None
    assert by_name["edge"].token.matches(adapter.admin.token.reveal())
    assert edge.store.sqlite_path == tmp_path / "edge.db"
    assert engine.store.sqlite_path == tmp_path / "engine.db"
    assert {principal.name for principal in edge.admin.principals} == {"viewer", "operator", "admin"}

    for file in directory.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        if file.suffix == ".yaml":
            text = file.read_text()
            assert not any(token in text for token in (*tokens.roles.values(), tokens.node, tokens.edge)), (
                file
            )


def test_tokens_are_new_each_time_and_hidden_when_printed() -> None:
    first, second = make_tokens(), make_tokens()
    assert set(first.roles.values()).isdisjoint(second.roles.values())
    assert first.node not in repr(first)
