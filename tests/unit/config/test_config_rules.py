"""Rules between keys: addresses, exposure, credentials, names."""

from __future__ import annotations

import pytest
from config_sources import HASH, FakeSecrets, sources

from iop.config import ConfigInvalid, load_edge, load_engine

OTHER_HASH = "sha256:" + "cd" * 32


def problems_of(text: str) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        load_edge(sources(text))
    return str(caught.value)


@pytest.mark.clause("AD-02")
@pytest.mark.parametrize(
    "listen",
    [
        "{openengine: 127.0.0.1:9000, admin: 127.0.0.1:9000}",
        "{openengine: 127.0.0.1:9000, admin: 0.0.0.0:9000}",
        "{http: 127.0.0.1:9000, admin: 127.0.0.1:9000}",
    ],
)
def test_admin_never_shares_an_address(listen: str) -> None:
    assert "is also the address of" in problems_of(f"listen: {listen}\ninsecure: true")


@pytest.mark.clause("AD-02")
def test_either_listener_may_be_absent_and_any_free_port_is_no_conflict() -> None:
    load_edge(sources("listen: {admin: null}"))
    load_edge(sources("listen: {openengine: null, http: null}"))
    load_edge(sources("listen: {http: 127.0.0.1:0, admin: 127.0.0.1:0, openengine: 127.0.0.1:0}"))
    load_edge(sources("listen: {admin: unix:admin.sock}"))


@pytest.mark.clause("EN-104", "AD-04")
@pytest.mark.parametrize("name", ["nodes", "admin", "ops", "http", "openengine"])
def test_off_loopback_without_tls_needs_insecure_written_out(name: str) -> None:
    text = f"listen: {{{name}: 0.0.0.0:9999}}\napi_keys: [{{name: a, key: '{HASH}'}}]\n"
    said = problems_of(text)
    assert f"listen.{name}: 0.0.0.0:9999 is reachable from other machines, without TLS" in said
    loaded = load_edge(sources(text + "insecure: true\n"))
    assert any(name in warning for warning in loaded.warnings)
    load_edge(sources(text + f"tls: {{{name}: {{cert: c.pem, key: k.pem}}}}\n"))


@pytest.mark.clause("AD-04")
def test_the_engine_admin_listener_keeps_the_same_rule() -> None:
    with pytest.raises(ConfigInvalid, match="without TLS"):
        load_engine(sources("listen: {admin: '[::]:8002'}", file="engine.yaml"))


def test_a_public_api_off_loopback_needs_keys() -> None:
    text = "listen: {http: 10.0.0.1:443}\ntls: {http: {cert: c, key: k}}\n"
    assert "there are no api_keys" in problems_of(text)
    load_edge(sources(text + f"api_keys: [{{name: a, key: '{HASH}'}}]"))


@pytest.mark.parametrize(
    ("principals", "said"),
    [
        ("{name: a, role: admin}", "has no credential"),
        (f"{{name: a, token: '{HASH}'}}", "needs a role or permissions"),
        (f"{{name: a, token: '{HASH}', role: admin, permissions: [flush]}}", "needs a role or permissions"),
        (f"{{name: a, token: '{HASH}', role: owner}}", "is not one of its values"),
        (f"{{name: a, token: '{HASH}', permissions: [fly]}}", "is no permission"),
        (
            f"{{name: a, token: '{HASH}', role: admin}}, {{name: b, token: '{HASH}', role: viewer}}",
            "the same token",
        ),
        (
            f"{{name: a, token: '{HASH}', role: admin}}, {{name: a, mtls_san: x, role: viewer}}",
            "appears twice",
        ),
    ],
)
@pytest.mark.clause("AD-04")
def test_principals_are_named_credentialed_and_limited(principals: str, said: str) -> None:
    assert said in problems_of(f"admin: {{principals: [{principals}]}}")


NODE = f"nodes: [{{id: a, token: '{HASH}', adapters: [%s]}}]"
ADAPTER = "{type: vllm, endpoint: 'http://127.0.0.1:1'}"


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("{type: vllm}", "endpoint: type vllm needs one"),
        ("{type: openengine}", "type openengine needs one"),
        ("{type: cli}", "needs its command"),
        ("{type: nova}", "is not one of its values"),
        ("{type: vllm, endpoint: 'ftp://x'}", "is no such URL"),
        ("{type: vllm, endpoint: 'http://u:p@x'}", "must not hold credentials"),
        ("{type: vllm, endpoint: 'http://x', profile: odd}", "is no profile"),
        ("{type: vllm, endpoint: 'http://x', profile: {operations: {sing: {path: /x}}}}", "is no operation"),
        ("{type: vllm, endpoint: 'http://x', profile: {operations: {models: {path: x}}}}", "is no path"),
        (ADAPTER + ", " + ADAPTER, "the name vllm appears twice"),
    ],
)
def test_adapters_are_complete_and_distinct(adapter: str, said: str) -> None:
    assert said in problems_of(NODE % adapter)


@pytest.mark.clause("EN-111")
def test_long_slots_are_part_of_the_capacity() -> None:
    adapter = "{type: vllm, endpoint: 'http://x', capacity: 2, long_context_capacity: %d}"
    assert "long slots are part" in problems_of(NODE % (adapter % 3))
    load_edge(sources(NODE % (adapter % 2)))


@pytest.mark.clause("EN-62")
def test_models_name_adapters_that_exist_and_names_mean_one_model() -> None:
    nodes = NODE % ADAPTER
    provider = "{node: a, adapter: %s, target: t}"
    assert "Known: a/vllm" in problems_of(f"{nodes}\nmodels: [{{id: m, providers: [{provider % 'gone'}]}}]")
    good = provider % "vllm"
    twice = f"models: [{{id: m, providers: [{good}]}}, {{id: n, aliases: [m], providers: [{good}]}}]"
    assert "the name m appears twice" in problems_of(f"{nodes}\n{twice}")
    load_edge(sources(f"{nodes}\nmodels: [{{id: m, providers: [{good}]}}]"))


@pytest.mark.clause("EN-110")
def test_waiting_streams_are_told_their_place_never_or_not_too_often() -> None:
    text = "models: [{{id: m, providers: [], queue: {{comment_sec: {}}}}}]"
    assert "models[0].queue.comment_sec: must be 0 or at least 1" in problems_of(text.format(0.5))
    assert "comment_sec" not in problems_of(text.format(1))
    assert "comment_sec" not in problems_of(text.format(0))


def test_api_keys_name_models_that_exist() -> None:
    assert "there is no model m" in problems_of(f"api_keys: [{{name: a, key: '{HASH}', models: [m]}}]")


@pytest.mark.clause("EN-104")
def test_node_credentials_are_hashed_when_loaded_and_hidden_when_printed() -> None:
    text = "nodes: [{id: a, token: env:T}]"
    config = load_edge(sources(text, secrets=FakeSecrets(variables={"T": "node-secret"}))).config
    token = config.nodes[0].token
    assert token.matches("node-secret")
    assert not token.matches("node-secret2")
    assert "node-secret" not in repr(config)
    assert str(token) == "***"


@pytest.mark.clause("EN-103")
def test_a_heartbeat_timeout_survives_one_late_beat() -> None:
    assert "one late heartbeat" in problems_of("heartbeat: {interval_sec: 5, timeout_sec: 9}")
    load_edge(sources("heartbeat: {interval_sec: 5, timeout_sec: 10}"))


def test_rules_between_keys_judge_what_is_readable_beside_what_is_not() -> None:
    text = f"""
listen: {{http: nowhere, openengine: 127.0.0.1:5, ops: 127.0.0.1:5}}
heartbeat: {{interval_sec: -1}}
admin:
  principals:
    - {{name: ops, token: plain, role: god}}
    - {{name: ops, token: "{HASH}"}}
nodes:
  - {{id: n, token: "{HASH}", adapters: [{{name: a, type: vllm, endpoint: "ftp://x"}}, {{name: b, type: vllm}}]}}
  - {{id: n, token: "file:gone", adapters: []}}
models:
  - id: m
    providers: [{{node: other, adapter: a, target: t}}]
"""
    with pytest.raises(ConfigInvalid) as caught:
        load_edge(sources(text))
    found = {problem.key for problem in caught.value.problems}
    assert found == {
        "listen.http",
        "listen.ops",
        "heartbeat.interval_sec",
        "admin.principals[0].token",
        "admin.principals[0].role",
        "admin.principals",
        "admin.principals[1]",
        "nodes[0].adapters[0].endpoint",
        "nodes[0].adapters[1].endpoint",
        "nodes[1].token",
        "nodes",
        "models[0].providers[0]",
    }
    assert "unread-" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "models"),
    [
        ('[{id: "?", token: "HASH", adapters: [{name: a, type: vllm, endpoint: "http://x"}]}]', "n/a"),
        ('[{id: n, token: "HASH", adapters: [{name: "?", type: vllm, endpoint: "http://x"}]}]', "n/a"),
        ('[{id: n, token: "HASH", adapters: [{type: vlllm, endpoint: "http://x"}]}]', "n/vllm"),
        ("5", "n/a"),
        ('[{id: n, token: "HASH", adapters: 5}]', "n/a"),
        ('[{id: n, token: "HASH", adapters: [5]}]', "n/a"),
    ],
)
def test_a_finding_that_rests_on_an_unreadable_value_is_left_out(nodes: str, models: str) -> None:
    node, _, adapter = models.partition("/")
    text = (
        f"nodes: {nodes.replace('HASH', HASH)}\n"
        f"models: [{{id: m, providers: [{{node: {node}, adapter: {adapter}, target: t}}]}}]\n"
    )
    with pytest.raises(ConfigInvalid) as caught:
        load_edge(sources(text))
    assert len(caught.value.problems) == 1, str(caught.value)
    assert caught.value.problems[0].key.startswith("nodes")


def test_a_finding_points_at_the_item_of_the_list_that_it_is_about() -> None:
    text = f"""nodes:
  - id: n
    token: "{HASH}"
    adapters:
      - {{name: a, type: vllm, endpoint: "http://x"}}
      - name: b
        type: vllm
"""
    with pytest.raises(ConfigInvalid) as caught:
        load_edge(sources(text))
    assert [problem.where for problem in caught.value.problems] == ["edge.yaml:6"]


@pytest.mark.clause("AD-32")
def test_a_declared_source_of_weights_is_absolute_and_of_an_engine_that_is_operated() -> None:
    def node(adapter: str) -> str:
        return f"nodes: [{{id: n, token: '{HASH}', adapters: [{{endpoint: 'http://h', {adapter}}}]}}]"

    operated = "type: openai_compat, admin: {target: '127.0.0.1:1'}"
    loaded = load_edge(sources(node(f"{operated}, weights_source: /models/a")))
    assert loaded.config.nodes[0].adapters[0].weights_source == "/models/a"
    load_edge(sources(node("type: vllm, weights_source: /models/a")))
    assert "'models/a' is not absolute" in problems_of(node(f"{operated}, weights_source: models/a"))
    alone = problems_of(node("type: openai_compat, weights_source: /models/a"))
    assert "nodes[0].adapters[0].weights_source: nobody updates the weights of this adapter" in alone
