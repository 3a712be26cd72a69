"""Stand-ins for engines answer as the engines did; so does the llama.cpp that the tests bring along.

The same questions in the same order that recorded a transcript are put to its stand-in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import talks_llamacpp
import talks_vllm
from engines_models import Engine
from engines_talk import Stream, Talk
from engines_transcript import DATA, Cleaner, Transcript
from llamacpp_replay import ROUTER, SINGLE, Router, Single
from replay_engine import ReplayEngine
from vllm_chat_replay import VllmChatReplay
from vllm_replay import DEV, HANDLES, TRANSFER, VllmReplay

MODELS = Path("models")
TRANSCRIPTS = sorted(path.stem for path in DATA.glob("*.json"))


class Recorded(Stream):
    """A stream that was recorded."""

    def __init__(self, body: bytes) -> None:
        self.status, self.content_type, self._body = 200, "text/event-stream; charset=utf-8", body

    def rest(self) -> bytes:
        return self._body


class StandInTalk(Talk):
    """With a stand-in, which has no streams that run on: it is told that one does."""

    def __init__(self, endpoint: str, busy: Callable[[bool], None]) -> None:
        super().__init__("a stand-in", endpoint, Cleaner({}))
        self._busy = busy

    @contextlib.contextmanager
    def streaming(self, path: str, body: Mapping[str, object]) -> Iterator[Stream]:
        self._busy(True)
        end = DEV["stream aborted by a pause"].body
        yield Recorded(
            end.replace(b'"finish_reason":"abort"', b'"delta":{"content":" wide"},"finish_reason":"abort"')
        )
        self._busy(False)


async def differences(
    name: str,
    engine: ReplayEngine,
    converse: Callable[[Talk], None],
    busy: Callable[[bool], None] = lambda _: None,
) -> list[str]:
    async with engine.upstream().serving() as upstream:
        talk = StandInTalk(upstream.endpoint, busy)
        await asyncio.to_thread(converse, talk)
    return Transcript.load(name).differences(talk.transcript)


@pytest.mark.clause("AD-15", "AD-37")
async def test_the_stand_in_of_vllms_control_answers_as_vllm_did() -> None:
    engine = VllmReplay(profile_dir=Path("profiles"))
    engine.recorded = DEV

    def busy(is_busy: bool) -> None:
        engine.running = int(is_busy)

    def converse(talk: Talk) -> None:
        talks_vllm.control(talk, MODELS, Path("loras/ad1"))

    assert await differences("vllm-dev", engine, converse, busy) == []


@pytest.mark.clause("AD-45")
async def test_the_stand_in_of_vllms_weight_transfer_goes_through_sessions_as_vllm_did() -> None:
    engine = VllmReplay(profile_dir=Path("profiles"), transfer="nccl")
    engine.recorded = TRANSFER

    def converse(talk: Talk) -> None:
        talks_vllm.transfer(talk, MODELS)

    assert await differences("vllm-transfer", engine, converse) == []


@pytest.mark.clause("AD-45")
async def test_the_stand_in_of_a_vllm_that_takes_handles_answers_as_vllm_did() -> None:
    engine = VllmReplay(profile_dir=Path("profiles"), transfer="ipc")
    engine.recorded = HANDLES
    engine.routes["POST /update_weights"] = lambda asked: (
        HANDLES.to("POST", "/update_weights", asked.body) or (engine.unknown)
    )

    def converse(talk: Talk) -> None:
        talks_vllm.handles(talk, MODELS)

    assert await differences("vllm-handles", engine, converse) == []


async def test_the_stand_in_of_vllms_dialects_answers_as_vllm_did() -> None:
    assert await differences("vllm-inference", VllmChatReplay(), talks_vllm.inference) == []


@pytest.mark.clause("AD-15", "AD-37")
async def test_the_stand_in_of_llama_cpp_answers_as_the_server_did() -> None:
    engine = Single()
    engine.recorded = SINGLE

    def busy(is_busy: bool) -> None:
        engine.busy = {1} if is_busy else set()

    assert await differences("llamacpp-single", engine, talks_llamacpp.single, busy) == []


@pytest.mark.clause("AD-15", "AD-37")
async def test_the_stand_in_of_a_router_answers_as_the_router_did() -> None:
    engine = Router()
    engine.status["sea"] = "unloaded"
    engine.recorded = ROUTER
    assert await differences("llamacpp-router", engine, talks_llamacpp.router) == []


async def test_the_llama_cpp_of_these_tests_answers_as_the_program_did(
    llamacpp: Engine, models: Path
) -> None:
    talk = Talk("xllamacpp", llamacpp.endpoint, Cleaner({str(models): "models"}))
    await asyncio.to_thread(talks_llamacpp.single, talk)
    assert Transcript.load("llamacpp-single").differences(talk.transcript) == []


async def test_a_stand_in_that_answers_otherwise_is_found() -> None:
    engine = Router()
    engine.status["sea"] = "unloaded"
    engine.recorded = ROUTER
    engine.routes["POST /models/load"] = ROUTER["unload unknown"]
    engine.routes["GET /props"] = SINGLE["props, trimmed"]
    engine.coming = [("sea", "loaded")]
    found = await differences("llamacpp-router", engine, talks_llamacpp.router)
    assert {line.partition(":")[0] for line in found} >= {"load", "props"}


@pytest.mark.clause("EN-04")
@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcripts_hold_no_credentials_and_nothing_of_a_machine(name: str) -> None:
    text = (DATA / f"{name}.json").read_text(encoding="utf-8")
    assert "Bearer" not in text
    assert "authorization" not in text.lower()
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", text)) <= {"8080"}
    for exchange in Transcript.load(name).answers:
        told = f"{exchange.path} {json.dumps(exchange.request)} {exchange.body}"
        assert re.search(r"/(tmp|home|root|work|var|usr)/", told) is None, exchange.name
