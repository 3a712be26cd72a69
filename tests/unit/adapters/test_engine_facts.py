"""What engines say of themselves, and what they are believed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.adapters.engine_facts import (
    absent_of,
    facts_of_models,
    facts_of_props,
    facts_of_show,
    may_be_asked_for_tools,
    ranks_of_metrics,
    ranks_of_server_info,
    refuses_tools_at_all,
    tools_of_model_info,
)
from iop.adapters.openengine.model_facts import facts_of_info
from iop.pb.openengine.v1 import model_pb2
from iop.wire.model_facts import ModelFacts, decode_facts, encode_facts, read_names


@pytest.mark.clause("EN-51", "SF-01")
def test_only_a_server_that_knows_wrong_methods_shows_which_routes_it_has() -> None:
    assert absent_of({"chat": 405, "messages": 404, "responses": 200}) == {"messages"}
    assert absent_of({"chat": 404, "messages": 404}) == frozenset()  # answers 404 to everything
    assert absent_of({"chat": 200, "messages": 200}) == frozenset()
    assert absent_of({}) == frozenset()


@pytest.mark.clause("SF-01")
@pytest.mark.parametrize("key", ["max_model_len", "context_length", "context_window"])
def test_a_model_list_tells_lengths_under_the_names_that_engines_use(key: str) -> None:
    body = json.dumps({"data": [{"id": "a", key: 4096}, {"id": "b"}, {"id": 5}, "x"]}).encode()
    assert facts_of_models(body) == {"a": ModelFacts(context_tokens=4096), "b": ModelFacts()}


@pytest.mark.clause("SF-01", "SF-24")
def test_an_edge_says_what_all_of_its_pool_can() -> None:
    told = {
        "context_window": {"min": 2048, "max": 4096},
        "modalities": {"text": True, "image": True, "audio": None},
        "tools": False,
    }
    body = json.dumps(
        {"data": [{"id": "a", "iop": told}, {"id": "b", "iop": {"context_window": 5}}]}
    ).encode()
    wanted = ModelFacts(context_tokens=2048, images=True, audio=None, tools=False)
    assert facts_of_models(body) == {"a": wanted, "b": ModelFacts()}


@pytest.mark.clause("SF-01")
@pytest.mark.parametrize(
    ("info", "facts"),
    [
        ({}, ModelFacts(tools=False)),
        (
            {"max_context_length": 512, "supports_multimodal": False},
            ModelFacts(context_tokens=512, images=False, tools=False),
        ),
        ({"max_context_length": 0, "supports_multimodal": True}, ModelFacts(images=True, tools=False)),
        ({"tokenizer_modes": ["openai_chat"], "supports_multimodal": False}, ModelFacts()),
        ({"tokenizer_modes": ["openai_chat"], "supports_multimodal": True}, ModelFacts(images=True)),
    ],
)
def test_an_openengine_server_says_its_lengths_and_pictures(info: dict[str, Any], facts: ModelFacts) -> None:
    assert facts_of_info(model_pb2.ModelInfo(**info)) == facts


@pytest.mark.clause("SF-01")
@pytest.mark.parametrize("value", [0, -1, True, "4096", 4.5, None, 2**60])
def test_a_length_that_is_none_is_not_told(value: object) -> None:
    body = json.dumps({"data": [{"id": "a", "max_model_len": value}]}).encode()
    assert facts_of_models(body) == {"a": ModelFacts()}


@pytest.mark.clause("SF-01")
def test_props_tell_the_slots_context_the_modalities_and_the_tools() -> None:
    props = {
        "default_generation_settings": {"n_ctx": 2048},
        "modalities": {"vision": False, "audio": True},
        "chat_template_caps": {"supports_tools": True},
    }
    assert facts_of_props(json.dumps(props).encode()) == ModelFacts(
        context_tokens=2048, images=False, audio=True, tools=True
    )
    assert facts_of_props(b'{"modalities":[]}') == ModelFacts()


@pytest.mark.clause("SF-01")
@pytest.mark.parametrize(
    ("status", "words", "refuses"),
    [
        (500, b"tools param requires --jinja flag", True),
        (400, b"tool_choice param requires --jinja flag", True),
        (500, b"Unable to generate parser for this template.", False),
        (404, b"File Not Found", False),
        (200, b'{"prompt":"requires --jinja"}', False),
    ],
)
def test_llama_cpps_words_say_that_it_takes_no_tools_whatever_the_status(
    status: int, words: bytes, refuses: bool
) -> None:
    assert refuses_tools_at_all(status, words) is refuses


@pytest.mark.clause("SF-01")
def test_a_model_that_would_be_loaded_for_it_is_not_asked() -> None:
    assert may_be_asked_for_tools(b'{"is_sleeping":false}')
    assert not may_be_asked_for_tools(b'{"is_sleeping":true}')
    assert not may_be_asked_for_tools(b'{"is_sleeping":false,"role":"router"}')
    assert not may_be_asked_for_tools(b"{}")  # an older one, of which nobody knows


@given(st.binary(max_size=200))
def test_no_bytes_break_the_readers(body: bytes) -> None:
    assert all(facts == ModelFacts() for facts in facts_of_models(body).values())
    facts_of_props(body)
    facts_of_show(body)
    tools_of_model_info(body)
    may_be_asked_for_tools(body)
    assert decode_facts(body.decode("latin-1")) is not None


@given(
    st.builds(
        ModelFacts,
        context_tokens=st.none() | st.integers(1, 2**40),
        images=st.none() | st.booleans(),
        tools=st.none() | st.booleans(),
    )
)
def test_facts_travel_as_text(facts: ModelFacts) -> None:
    assert decode_facts(encode_facts(facts)) == facts


@pytest.mark.clause("SF-21", "SF-22")
@pytest.mark.parametrize(
    ("told", "ranks"),
    [({"dp_size": 4}, {0, 1, 2, 3}), ({"dp_size": 1}, {0}), ({"dp_size": 0}, set()), ({}, set())]
    + [({"dp_size": value}, set()) for value in (-1, "2", True, 10**9)],
)
def test_sglang_tells_its_ranks_by_their_number(told: dict[str, object], ranks: set[int]) -> None:
    assert ranks_of_server_info(json.dumps(told).encode()) == ranks


@pytest.mark.clause("SF-21", "SF-22")
def test_vllm_tells_its_ranks_by_its_counters() -> None:
    metrics = (
        b"# TYPE vllm:num_requests_running gauge\n"
        b'vllm:num_requests_running{engine="0",model_name="a}b"} 0.0\n'
        b'vllm:num_requests_running{model_name="engine=\\"9",engine="7"} 0.0\n'
        b'vllm:num_requests_running{model_name="m",engine="1"} 0.0\n'
        b'vllm:num_requests_waiting{engine="3"} 0.0\nother{engine="4"} 0\n'
        b'vllm:num_requests_running{model_name="open,engine="5} 0\n'
    )
    assert ranks_of_metrics(metrics) == {0, 1}
    assert ranks_of_metrics(b"") == frozenset()
    many = b"".join(b'vllm:num_requests_running{engine="%d"} 0\n' % rank for rank in range(2000))
    assert ranks_of_metrics(many) == frozenset()


def test_names_with_commas() -> None:
    assert read_names("a,b") == {"a", "b"}
    assert read_names("") == frozenset()
