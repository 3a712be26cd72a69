"""The real `llama-server` still answers as its transcripts say; with ENGINES_RECORD=1 they are written anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import talks_llamacpp
from engines_models import ANSWER
from engines_talk import Talk, judge
from engines_transcript import Cleaner
from llama_server import llama_server

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]

BUILD = "llama-server build 11434"


def test_with_one_model_it_answers_as_recorded(models: Path, tmp_path: Path) -> None:
    (tmp_path / "slots").mkdir()
    arguments = ("-m", str(models / "endless.gguf"), "--alias", "endless", "-c", "131072")
    cleaner = Cleaner({str(models): "models", str(tmp_path): "run"})
    with llama_server(*arguments, "--slot-save-path", f"{tmp_path}/slots/", log=tmp_path / "log") as server:
        talk = Talk(f"{BUILD}, one model", server.endpoint, cleaner)
        talks_llamacpp.single(talk)
    judge("llamacpp-single", talk.transcript)


def test_with_nothing_switched_on_it_refuses_as_recorded(models: Path, tmp_path: Path) -> None:
    arguments = ("-m", str(models / "endless.gguf"), "--no-slots", "-c", "4096")
    with llama_server(*arguments, log=tmp_path / "log", switches=()) as server:
        talk = Talk(f"{BUILD}, nothing switched on", server.endpoint, Cleaner({str(models): "models"}))
        talks_llamacpp.bare(talk)
    judge("llamacpp-bare", talk.transcript)


def test_as_a_router_it_answers_as_recorded(models: Path, tmp_path: Path) -> None:
    directory = tmp_path / "models"
    directory.mkdir()
    for name in ("sea", "hill"):
        (directory / f"{name}.gguf").symlink_to(models / f"{name}.gguf")
    (tmp_path / "slots").mkdir()
    cleaner = Cleaner({str(directory): "models", str(tmp_path): "run"})
    arguments = ("--models-dir", str(directory), "--models-max", "1", "-c", "32768")
    with llama_server(*arguments, "--slot-save-path", f"{tmp_path}/slots/", log=tmp_path / "log") as server:
        talk = Talk(f"{BUILD}, router mode", server.endpoint, cleaner)
        talks_llamacpp.router(talk)
    judge("llamacpp-router", talk.transcript)


def test_its_lora_scales_change_the_answer_as_recorded(models: Path, tmp_path: Path) -> None:
    file = talks_llamacpp.make_lora(tmp_path / "one_word.gguf", models / "sea")
    arguments = ("-m", str(models / "sea.gguf"), "--lora", str(file), "-c", "4096")
    cleaner = Cleaner({str(models): "models", str(tmp_path): "run"})
    with llama_server(*arguments, log=tmp_path / "log") as server:
        talk = Talk(f"{BUILD}, with a LoRA adapter", server.endpoint, cleaner)
        talks_llamacpp.lora(talk)
    said = {each.name: each.body for each in talk.transcript.answers}
    assert '"The"' in said["chat with the adapter"]
    assert ANSWER in said["chat with scale 0"]
    judge("llamacpp-lora", talk.transcript)
