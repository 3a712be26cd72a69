"""From settings to snapshot: names, numbers, secrets, fingerprints."""

from __future__ import annotations

from pathlib import Path

import pytest

from iop.api.http.rewrite import RULES
from iop.app.edge_snapshot import snapshot_of
from iop.app.sources import OsSecrets
from iop.config import EdgeConfig, Sources, load_edge
from iop.core.errors import InvalidRequest
from iop.core.ids import ModelId, NodeId, ProviderId
from iop.edge.calls import ProviderKey, Route
from iop.wire.messages import OpenAICompatSettings

TEXT = """
heartbeat: {interval_sec: 1, timeout_sec: 3}
limits: {first_byte_timeout_sec: 7, total_timeout_sec: 70}
nodes:
  - id: n
    token: env:TOKEN
    adapters:
      - {name: a, type: openai_compat, endpoint: "http://127.0.0.1:1", api_key: env:KEY, capacity: 3,
         admin: {target: "127.0.0.1:2", token: env:ADMIN}}
      - {type: openengine, openengine: "127.0.0.1:3", long_context_capacity: 1}
      - {name: w, type: vllm, endpoint: "http://x", profile: {operations: {models: {method: GET, path: /m}}}}
models:
  - {id: m, aliases: [mm], queue: {max: 5, timeout_sec: 6}, providers: [
      {node: n, adapter: a, target: real, weight: 2}, {node: n, adapter: openengine, target: other}]}
"""
VARIABLES = {"TOKEN": "node-secret", "KEY": "engine-key", "ADMIN": "engine-admin"}


def config(text: str = TEXT, variables: dict[str, str] | None = None) -> EdgeConfig:
    return load_edge(Sources(text=text, secrets=OsSecrets(variables or VARIABLES))).config


def key(provider: str) -> ProviderKey:
    return ProviderKey(node=NodeId("n"), provider=ProviderId(provider))


def test_the_snapshot_says_what_the_config_says() -> None:
    snapshot = snapshot_of(config(), revision=4, now_unix_s=9)
    assert snapshot.revision == 4
    assert snapshot.heartbeat.interval_s == 1
    assert snapshot.limits.first_byte_timeout_s == 7
    model = snapshot.find_model("mm")
    assert model is not None
    assert model.id == ModelId("m")
    assert (model.queue.max_waiters, model.queue.timeout_s) == (5, 6)
    assert [(member.key, member.target, member.weight) for member in model.members] == [
        (key("a"), "real", 2),
        (key("openengine"), "other", 1),
    ]


@pytest.mark.clause("SF-13")
def test_the_providers_name_is_shown_unless_the_config_says_no() -> None:
    assert snapshot_of(config(), revision=1, now_unix_s=9).shows_provider
    silent = config("dispatch: {show_provider: false}\n" + TEXT)
    assert not snapshot_of(silent, revision=1, now_unix_s=9).shows_provider


@pytest.mark.clause("SF-15")
def test_a_models_rules_are_off_unless_named_and_an_unknown_one_is_refused() -> None:
    plain = snapshot_of(config(), revision=1, now_unix_s=9).models[ModelId("m")]
    assert plain.rewrites == frozenset()
    ruled = TEXT.replace("aliases: [mm]", "rewrites: [merge_system, reasoning_names, include_usage]")
    assert snapshot_of(config(ruled), revision=1, now_unix_s=9).models[ModelId("m")].rewrites == frozenset(
        RULES
    )
    with pytest.raises(InvalidRequest, match="rewrites"):
        config(ruled.replace("merge_system", "merge_everything"))


@pytest.mark.clause("EN-60")
def test_the_route_follows_the_type() -> None:
    adapters = snapshot_of(config(), revision=1, now_unix_s=0).nodes[NodeId("n")].adapters
    assert adapters[ProviderId("a")].route is Route.TUNNEL
    assert adapters[ProviderId("openengine")].route is Route.RUN
    assert adapters[ProviderId("a")].is_administered
    assert adapters[ProviderId("openengine")].is_administered


@pytest.mark.clause("EN-55", "EN-85")
def test_a_node_gets_its_adapters_resolved() -> None:
    wire = snapshot_of(config(), revision=1, now_unix_s=0).nodes[NodeId("n")].wire
    first, second, third = wire.adapters
    assert (first.name, second.name) == ("a", "openengine")
    assert first.targets == ("real",)
    assert isinstance(first.settings, OpenAICompatSettings)
    assert first.settings.protocol_profile is not None
    assert "chat_completions" in first.settings.protocol_profile.operations
    assert first.settings.api_key == "engine-key"
    assert first.engine_control is not None
    assert first.engine_control.admin_token == "engine-admin"
    assert isinstance(third.settings, OpenAICompatSettings)
    assert third.settings.protocol_profile is not None
    assert list(third.settings.protocol_profile.operations) == ["models"]


@pytest.mark.clause("EN-86")
def test_neither_storage_nor_workspace_rides_in_the_payload() -> None:
    text = TEXT.replace(
        "      - {name: w,",
        "      - {name: c, type: cli, cli: {command: [agent], workspace: /srv/agents}}\n      - {name: w,",
    )
    node = snapshot_of(config(text), revision=1, now_unix_s=0).nodes[NodeId("n")]
    assert "/srv/agents" not in repr(node.wire)
    assert node.adapters[ProviderId("c")].workspace == "/srv/agents"


@pytest.mark.clause("EN-17")
@pytest.mark.parametrize("name", ["KEY", "ADMIN"])
def test_a_changed_secret_changes_the_fingerprint_and_nothing_shows_it(name: str) -> None:
    before = snapshot_of(config(), revision=1, now_unix_s=0)
    same = snapshot_of(config(), revision=2, now_unix_s=5)
    after = snapshot_of(config(variables={**VARIABLES, name: "changed"}), revision=2, now_unix_s=0)
    n = NodeId("n")
    assert before.nodes[n].fingerprint == same.nodes[n].fingerprint
    assert before.nodes[n].fingerprint != after.nodes[n].fingerprint
    assert not any(secret in repr(before) for secret in VARIABLES.values())


def test_an_unreadable_authority_is_named_by_its_setting(tmp_path: Path) -> None:
    text = TEXT.replace(
        "profile: {operations", f"tls: {{ca: {tmp_path / 'gone.pem'}}}, profile: {{operations"
    )
    with pytest.raises(InvalidRequest, match=r"the adapter w's tls.ca cannot be read"):
        snapshot_of(config(text), revision=1, now_unix_s=0)
