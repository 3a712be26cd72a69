"""Effective values: one row per leaf, with origin, without secrets."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from config_sources import HASH, FakeSecrets, sources

from iop.admin.permissions import Permission
from iop.config import EdgeConfig, changes_between, effective_values, load_edge, load_node
from iop.config.rules import PERMISSIONS
from iop.config.tree import ADAPTER_TYPES, AdapterType


def test_each_leaf_has_its_value_and_origin() -> None:
    loaded = load_edge(sources("listen: {http: 127.0.0.1:1}", environment={"IOP_INSECURE": "true"}))
    rows = {row.key: row for row in effective_values(loaded)}
    assert (rows["listen.http"].value, rows["listen.http"].origin) == ("127.0.0.1:1", "file edge.yaml:1")
    assert (rows["insecure"].value, rows["insecure"].origin) == ("true", "environment IOP_INSECURE")
    assert (rows["heartbeat.timeout_sec"].value, rows["heartbeat.timeout_sec"].origin) == ("15", "default")
    assert rows["api_keys"].value == "[]"


def test_secrets_never_show() -> None:
    secrets = FakeSecrets(variables={"T": "node-secret", "K": "adapter-secret"})
    text = f"""
store: postgresql://iop:pg-secret@db/iop
api_keys: [{{name: a, key: "{HASH}"}}]
nodes: [{{id: a, token: env:T, adapters: [{{type: vllm, endpoint: "http://x", api_key: env:K}}]}}]
"""
    loaded = load_edge(sources(text, secrets=secrets))
    shown = "\n".join(f"{row.key} {row.value}" for row in effective_values(loaded)) + repr(loaded)
    for secret in ("node-secret", "adapter-secret", "pg-secret", "abab"):
        assert secret not in shown
    assert "nodes[0].adapters[0].api_key *** (env:K)" in shown


def test_a_node_token_shows_its_reference_only() -> None:
    text = "edge: 127.0.0.1:7070\nnode: a\ntoken: env:T\n"
    loaded = load_node(sources(text, secrets=FakeSecrets(variables={"T": "node-secret"})))
    rows = {row.key: row.value for row in effective_values(loaded)}
    assert rows["token"] == "*** (env:T)"


def test_every_setting_has_a_meaning() -> None:
    from iop.config import tree

    for name in dir(tree):
        section = getattr(tree, name)
        if dataclasses.is_dataclass(section) and section.__module__ == tree.__name__:
            for item in dataclasses.fields(section):
                assert item.metadata.get("doc"), f"{name}.{item.name} has no doc"


def test_closed_lists_equal_their_sources() -> None:
    assert set(PERMISSIONS) == {permission.value for permission in Permission}
    assert typing.get_args(AdapterType) == ADAPTER_TYPES


@pytest.mark.clause("EN-114")
def test_changes_name_what_differs_and_know_list_items_by_name() -> None:
    def tree(text: str) -> EdgeConfig:
        return load_edge(sources(text, secrets=FakeSecrets(variables={"T": "one", "U": "two"}))).config

    base = "nodes: [{id: a, token: env:T, adapters: [{type: vllm, endpoint: 'http://x'}]}]"
    assert changes_between(tree(base), tree(base)) == []
    longer = base.replace("nodes: [", f"nodes: [{{id: z, token: '{HASH}'}}, ")
    added = changes_between(tree(base), tree(longer))
    assert [change.key for change in added] == ["nodes[z].id", "nodes[z].token", "nodes[z].adapters"]
    assert all(change.before is None for change in added)
    (capacity,) = changes_between(tree(base), tree(base.replace("'http://x'", "'http://x', capacity: 3")))
    assert (capacity.key, capacity.before, capacity.after) == ("nodes[a].adapters[vllm].capacity", "8", "3")
    (secret,) = changes_between(tree(base), tree(base.replace("env:T", "env:U")))
    assert (secret.key, secret.before, secret.after) == ("nodes[a].token", "***", "***")
