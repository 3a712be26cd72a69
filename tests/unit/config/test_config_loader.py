"""Loading: precedence, strictness, and every problem at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_sources import HASH, FakeSecrets, sources

from iop.config import Address, ConfigInvalid, load_edge, load_engine, load_node

WHOLE_EDGE = f"""
listen:
  http: 127.0.0.1:8080
  openengine: 127.0.0.1:9090
  admin: 127.0.0.1:9091
  ops: 127.0.0.1:9092
  nodes: 127.0.0.1:7070
insecure: false
tls:
  nodes: {{cert: edge.pem, key: edge.key, client_ca: nodes-ca.pem}}
  admin: {{cert: edge.pem, key: edge.key, client_ca: ops-ca.pem}}
heartbeat: {{interval_sec: 5, timeout_sec: 15}}
breaker: {{failures: 5, window_sec: 10, open_sec: 10}}
store: sqlite:///edge.db
api_keys:
  - {{name: team-a, key: "{HASH}", models: [fast], requests_per_minute: 600, concurrent: 32, may: [session, priority]}}
admin:
  principals:
    - {{name: ops, token: "{HASH}", role: admin}}
    - {{name: trainer, mtls_san: trainer.example, permissions: [flush, pause]}}
  participant_lost_sec: 30
  readback_sec: 30
nodes:
  - id: gpu-1
    token: file:./gpu-1.token
    adapters:
      - name: main
        type: openai_compat
        endpoint: http://127.0.0.1:8000
        api_key: env:UPSTREAM_KEY
        tls: {{ca: engine-ca.pem}}
        profile: openai
        openengine: 127.0.0.1:8001
        admin: {{target: 127.0.0.1:8002, token: env:ENGINE_ADMIN}}
        capacity: 8
        long_context_capacity: 2
        enabled: true
      - type: vllm
        endpoint: http://127.0.0.1:8100
        profile: {{operations: {{chat_completions: {{method: POST, path: /v1/chat/completions}}}}}}
models:
  - id: fast
    aliases: [fast-latest]
    long_context_tokens: 32768
    queue: {{max: 1000, timeout_sec: 30, no_capacity_grace_sec: 15, paused_timeout_sec: 600}}
    response_model: provider
    providers:
      - {{node: gpu-1, adapter: main, target: org/Real-8B-Instruct, weight: 1}}
      - {{node: gpu-1, adapter: vllm, target: org/Real-8B-Instruct}}
limits: {{body_bytes: 268435456, buffered_bytes: 1073741824, header_bytes: 65536, json_depth: 128, connections: 10000,
  sse_event_bytes: 16777216, first_byte_timeout_sec: 600, total_timeout_sec: 3600}}
"""

SECRETS = FakeSecrets(
    files={"conf/gpu-1.token": "node-secret\n"},
    variables={"UPSTREAM_KEY": "up-secret", "ENGINE_ADMIN": "engine-secret"},
)


def problems_of(text: str, **more: object) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        load_edge(sources(text, **more))  # type: ignore[arg-type]
    return [str(problem) for problem in caught.value.problems]


def test_an_empty_file_is_the_documented_defaults() -> None:
    config = load_edge(sources("")).config
    assert str(config.listen.http) == "127.0.0.1:8080"
    assert str(config.listen.openengine) == "127.0.0.1:9090"
    assert str(config.listen.admin) == "127.0.0.1:9091"
    assert str(config.listen.ops) == "127.0.0.1:9092"
    assert str(config.listen.nodes) == "127.0.0.1:7070"
    assert (config.heartbeat.interval_sec, config.heartbeat.timeout_sec) == (5, 15)
    assert (config.breaker.failures, config.breaker.window_sec, config.breaker.open_sec) == (5, 10, 10)
    assert config.limits.body_bytes == 256 * 2**20
    assert config.limits.buffered_bytes == 2**30
    assert config.wire.window_bytes == 256 * 1024


def test_the_documented_file_reads_whole() -> None:
    config = load_edge(sources(WHOLE_EDGE, secrets=SECRETS)).config
    (node,) = config.nodes
    first, second = node.adapters
    assert node.token.matches("node-secret")
    assert first.api_key is not None
    assert first.api_key.reveal() == "up-secret"
    assert first.admin is not None
    assert first.admin.token is not None
    assert first.admin.token.reveal() == "engine-secret"
    assert second.provider_id == "vllm"
    assert config.models[0].queue.no_capacity_grace_sec == 15
    assert config.tls.nodes is not None
    assert config.tls.nodes.cert == Path("conf/edge.pem")
    assert config.store.sqlite_path == Path("conf/edge.db")


def test_upper_layers_win_key_by_key() -> None:
    loaded = load_edge(
        sources(
            "listen: {http: 127.0.0.1:1, ops: 127.0.0.1:2, nodes: 127.0.0.1:3}",
            environment={"IOP_LISTEN__OPS": "127.0.0.1:22", "IOP_LISTEN__NODES": "127.0.0.1:33", "PATH": "x"},
            flags={"listen.nodes": ("127.0.0.1:333", "--nodes")},
        )
    )
    listen = loaded.config.listen
    assert [str(listen.http), str(listen.ops), str(listen.nodes)] == [
        "127.0.0.1:1",
        "127.0.0.1:22",
        "127.0.0.1:333",
    ]
    assert str(loaded.origins["listen.http"]) == "file edge.yaml:1"
    assert str(loaded.origins["listen.ops"]) == "environment IOP_LISTEN__OPS"
    assert str(loaded.origins["listen.nodes"]) == "flag --nodes"
    assert "listen.admin" not in loaded.origins


def test_every_problem_is_reported_at_once_with_file_line_key_and_fix() -> None:
    found = problems_of(
        "listen:\n  htpp: 127.0.0.1:1\n  ops: nowhere\nheartbeat: {interval_sec: soon}\nlimits: {json_depth: 0}\nx: 1\n"
    )
    assert len(found) == 5
    assert any("edge.yaml:2: listen.htpp: unknown key. Write http" in line for line in found)
    assert any("edge.yaml:3: listen.ops: 'nowhere' is no address. Write HOST:PORT" in line for line in found)
    assert any("edge.yaml:4: heartbeat.interval_sec" in line for line in found)
    assert any("edge.yaml:5: limits.json_depth: 0 is out of range" in line for line in found)
    assert any("edge.yaml:6: x: unknown key. Known here: listen," in line for line in found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "must be a mapping"),
        ("a: [\n", "this is not YAML"),
        ("listen: {ops: 1, ops: 2}", "the key appears twice"),
        ("nodes: 3", "must be a list"),
        ("listen: 3", "must be a mapping"),
        ("insecure: yes", "neither true nor false"),
        ('insecure: "true"', "neither true nor false"),
        ("limits: {connections: " + "9" * 300 + "}", "is not such a number"),
        ("breaker: {failures: 1.5}", "is not such a number"),
        ("heartbeat: {interval_sec: .inf}", "is not such a number"),
        ("nodes: [{token: env:T}]", "nodes[0].id: is required"),
        ("api_keys: [{name: a, key: plain-secret}]", "must be a reference"),
        ("store: mysql://x", "is no store"),
        ("models: [{id: a, providers: []}]", "Name at least one"),
        ("listen: {http: 127.0.0.1:70000}", "0 (any free one) to 65535"),
        ("&a a: *a", "unknown key"),
        ("a: &x [*x]", "nested too deeply"),
    ],
)
def test_a_bad_file_says_what_is_wrong(text: str, said: str) -> None:
    assert any(said in line for line in problems_of(text)), problems_of(text)


def test_a_secret_written_in_clear_is_not_repeated() -> None:
    (found,) = problems_of("api_keys: [{name: a, key: hunter2-in-clear}]")
    assert "hunter2" not in found


def test_an_unset_variable_and_a_missing_file_are_named() -> None:
    found = problems_of("nodes: [{id: a, token: env:NOT_SET}, {id: b, token: file:gone}]")
    assert any("NOT_SET is not set" in line for line in found)
    assert any("the file gone cannot be read (No such file or directory)" in line for line in found)


def test_a_variable_that_names_no_key_is_a_problem_and_one_of_another_config_is_not() -> None:
    found = problems_of(
        "", environment={"IOP_LISTEN__HTPP": "x", "IOP_RECONNECT__INTERVAL_SEC": "3", "IOP_HOME": "h"}
    )
    assert [line.partition(":")[0] for line in found] == ["IOP_LISTEN__HTPP"]


def test_relative_paths_count_from_the_file_and_those_of_flags_from_here() -> None:
    by_file = load_engine(sources("checkpoint: weights", file="engine.yaml")).config
    by_flag = load_engine(sources("", flags={"checkpoint": ("weights", "--checkpoint")})).config
    assert by_file.checkpoint == Path("conf/weights")
    assert by_flag.checkpoint == Path("weights")


def test_null_turns_a_listener_off_and_a_bare_section_means_its_defaults() -> None:
    config = load_edge(sources("listen: {admin: null}\nheartbeat:\napi_keys:\n")).config
    assert config.listen.admin is None
    assert config.heartbeat.interval_sec == 5
    assert config.api_keys == ()


def test_yaml_spellings_that_look_like_other_types_stay_text() -> None:
    text = "edge: 127.0.0.1:7070\nnode: on\ntoken: env:T\n"
    config = load_node(sources(text, secrets=FakeSecrets(variables={"T": "t"}))).config
    assert config.node == "on"


@pytest.mark.clause("EN-23")
def test_reconnect_defaults_to_ten_attempts_ten_seconds_apart() -> None:
    text = "edge: 127.0.0.1:7070\nnode: a\ntoken: env:T\n"
    config = load_node(sources(text, secrets=FakeSecrets(variables={"T": "t"}))).config
    assert (config.reconnect.interval_sec, config.reconnect.max_attempts) == (10, 10)
    assert config.edge == Address(host="127.0.0.1", port=7070)


@pytest.mark.clause("EN-23")
@pytest.mark.parametrize(
    ("reconnect", "is_valid"),
    [
        ("{max_attempts: 0}", True),
        ("{max_attempts: 0, interval_sec: 0.5}", True),
        ("{max_attempts: 0, interval_sec: 0}", False),
        ("{max_attempts: 3, interval_sec: 0}", True),
        ("{max_attempts: -1}", False),
        ("{interval_sec: -1}", False),
    ],
)
def test_reconnect_policies_are_validated(reconnect: str, is_valid: bool) -> None:
    text = f"edge: 127.0.0.1:7070\nnode: a\ntoken: env:T\nreconnect: {reconnect}\n"
    given = sources(text, secrets=FakeSecrets(variables={"T": "t"}), file="node.yaml")
    if is_valid:
        load_node(given)
    else:
        with pytest.raises(ConfigInvalid, match="reconnect"):
            load_node(given)
