"""Any engine's answers with parts of them changed to what cannot be: no adapter ends, and what it tells can be sent."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from engines_rig import config_of, running
from engines_steps import PAUSE, do
from replay_engine import Answer, Asked, ReplayEngine
from sglang_stub import Sglang
from vllm_replay import VllmReplay

from iop.adapters.base import Health
from iop.core.errors import IopError
from iop.net.admin_steps import AdminStepCodec
from iop.wire.messages import AdapterConfig, OllamaSettings

ROUNDS = 40
SEEDS = {"vllm": 3}
"""With these, as with 1 for a router, it once found something."""

LONG = "x" * 100_000
VALUES: list[object] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**30, -(10**30), 1.5, 1e308),
    *("", "\0", "é\n\r", "/" * 5000, "9" * 30, LONG, [], {}, [[]] * 50, {"a": 1}, [None], ["x"]),
]
BODIES = [
    *(b"", b"<html>", b"null", b"[]", b"{", b"[" * 50_000, b"\xff\xfe", b'"x"', b"1e999"),
    *(b'{"a":' + b"9" * 5000 + b"}", rb'"\ud800"'),
]
STATUSES = [200, 200, 301, 401, 404, 418, 429, 500, 503]


class Plain(ReplayEngine):
    """One that answers the same always."""

    def __init__(self, **routes: Answer) -> None:
        super().__init__(unknown=Answer.of({}))
        self.routes = {f"GET {path}": answer for path, answer in routes.items()}


def llamacpp(role: str) -> Plain:
    loaded = {"value": "loaded", "failed": False, "args": ["-m", "/models/m.gguf"]}
    return Plain(
        **{
            "/props": Answer.of({"role": role, "build_info": "b1", "model_alias": "m", "is_sleeping": False}),
            "/slots": Answer.of([{"id": 0, "is_processing": False}, {"id": 1}]),
            "/metrics": Answer(200, b"llamacpp:requests_processing 1\n", "text/plain"),
            "/v1/models": Answer.of({"data": [{"id": "m", "status": loaded, "max_model_len": 4096}]}),
        }
    )


ENGINES: dict[str, Callable[[], ReplayEngine]] = {
    "vllm": lambda: VllmReplay(sleep_mode=True, data_parallel_max=4),
    "sglang": Sglang,
    "trtllm": lambda: Plain(
        **{
            "/health": Answer(200, b""),
            "/version": Answer.of({"version": "1"}),
            "/v1/models": Answer.of({"data": [{"id": "m"}]}),
            "/memory_status": Answer.of({"state": "running", "parked_tags": ["kv_cache"]}),
        }
    ),
    "llamacpp": lambda: llamacpp(""),
    "llamacpp, a router": lambda: llamacpp("router"),
    "openai_compat": lambda: llamacpp(""),
    "ollama": lambda: Plain(
        **{
            "/api/version": Answer.of({"version": "1"}),
            "/api/tags": Answer.of({"models": [{"name": "m:latest", "digest": "sha256:aa"}]}),
            "/api/ps": Answer.of({"models": [{"name": "m:latest", "digest": "sha256:aa", "size_vram": 5}]}),
        }
    ),
}


def changed(value: Any, chance: random.Random) -> Any:
    """The same with parts of it left out, repeated or made into something else."""
    if chance.random() < (0.05 if isinstance(value, dict | list) else 0.15):
        return chance.choice(VALUES)
    if isinstance(value, dict):
        return {key: changed(each, chance) for key, each in value.items() if chance.random() > 0.03}
    if isinstance(value, list):
        return [changed(each, chance) for each in value] * chance.choice((1, 1, 1, 3))
    return value


def falsified(answer: Answer, chance: random.Random) -> Answer:
    """As it is every other time."""
    if chance.random() < 0.5:
        return answer
    if chance.random() < 0.2:
        return Answer(chance.choice(STATUSES), chance.choice(BODIES))
    try:
        told = json.loads(answer.body)
    except ValueError:
        text = bytearray(answer.body)
        for _ in range(min(5, len(text))):
            text[chance.randrange(len(text))] = chance.randrange(256)
        return Answer(answer.status, bytes(text), answer.content_type)
    return Answer(answer.status, json.dumps(changed(told, chance)).encode(), answer.content_type)


def made_false(
    answer: Answer | Callable[[Asked], Answer], chance: random.Random
) -> Callable[[Asked], Answer]:
    return lambda asked: falsified(answer(asked) if callable(answer) else answer, chance)


@pytest.mark.clause("EN-34", "EN-91", "AD-35", "AD-37")
@pytest.mark.parametrize("name", ENGINES)
async def test_whatever_an_engine_answers_its_adapter_lives_on_and_tells_what_can_be_sent(name: str) -> None:
    chance = random.Random(f"{name}{SEEDS.get(name, 1)}")
    kind = name.partition(",")[0]
    engine = ENGINES[name]()
    true = dict(engine.routes)
    codec = AdminStepCodec()
    environment = {"TRTLLM_RUNTIME_CONTROL_API_KEY": "k"}
    async with engine.upstream().serving() as upstream:
        config = config_of(kind, upstream.endpoint, "m")
        if kind == "ollama":
            settings = OllamaSettings(endpoint=upstream.endpoint)
            config = AdapterConfig(name="main", type=kind, targets=("m",), settings=settings)
        async with running(config, environment) as adapter:
            for _ in range(ROUNDS):
                engine.routes = {route: made_false(answer, chance) for route, answer in true.items()}
                await adapter.probe()
                ids = [info.participant_id for info in adapter.participants()]
                told = [codec.encode_info(info) for info in adapter.participants()]
                told += [codec.encode_read_back(back) for back in await adapter.read_back(ids)]
                assert sum(map(len, told)) + len(repr(adapter.snapshot())) < 500_000
            engine.routes = true
            for _ in range(2):
                await adapter.probe()
            assert adapter.snapshot().health is Health.READY
            with contextlib.suppress(IopError):
                codec.encode_result(await do(adapter, PAUSE))
