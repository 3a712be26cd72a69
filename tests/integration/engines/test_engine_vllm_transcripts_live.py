"""Real vLLM still answers as its transcripts say; with ENGINES_RECORD=1 they are written anew."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import talks_vllm
from engines_talk import Talk, judge
from engines_transcript import RECORDS, Cleaner
from trainer_handles import FILE
from vllm_server import DEVELOPMENT, HANDLES, LORA, TRANSFER, UNPICKLING, profiling, serving_vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

KEY = "sk-of-the-engine"


def test_its_control_answers_as_recorded_until_the_reload_that_kills_it(models: Path, tmp_path: Path) -> None:
    lora = talks_vllm.make_lora(tmp_path / "ad1", models / "endless")
    profiles = tmp_path / "profiles"
    cleaner = Cleaner({str(models): "models", str(lora): "loras/ad1", str(profiles): "profiles"})
    options = (*profiling(profiles), *LORA)
    with serving_vllm(models / "endless", tmp_path, *options, environment=DEVELOPMENT) as engine:
        talk = Talk("vLLM 0.32.0 on CPU, development mode", engine.endpoint, cleaner)
        talks_vllm.control(talk, models, lora)
    judge("vllm-dev", talk.transcript)


def test_its_weight_transfer_sessions_go_as_recorded_and_weights_come_back_from_disk_after_a_failed_one(
    models: Path, tmp_path: Path
) -> None:
    cleaner = Cleaner({str(models): "models", str(tmp_path / "profiles"): "profiles"})
    options = (*profiling(tmp_path / "profiles"), *TRANSFER)
    with serving_vllm(models / "endless", tmp_path, *options, environment=DEVELOPMENT) as engine:
        talk = Talk("vLLM 0.32.0 on CPU, --weight-transfer-config", engine.endpoint, cleaner)
        talks_vllm.transfer(talk, models)
    judge("vllm-transfer", talk.transcript)


def test_it_takes_handles_as_far_as_it_can_without_a_gpu_and_no_tools_without_a_parser(
    models: Path, tmp_path: Path
) -> None:
    cleaner = Cleaner({str(models): "models", str(tmp_path / "profiles"): "profiles"})
    options = (*profiling(tmp_path / "profiles"), *HANDLES)
    environment = {**DEVELOPMENT, **UNPICKLING}
    with serving_vllm(
        models / "endless", tmp_path, *options, environment=environment, has_tools=False
    ) as engine:
        name = "vLLM 0.32.0 on CPU, --weight-transfer-config ipc, insecure serialization, no tool parser"
        talk = Talk(name, engine.endpoint, cleaner)
        talks_vllm.handles(talk, models)
    judge("vllm-handles", talk.transcript)


def test_pytorch_makes_handles_as_recorded() -> None:
    python = os.environ.get("ENGINES_VLLM_PYTHON", "")
    if not python:
        pytest.skip("PyTorch comes with vLLM: make engines-test")
    script = Path(__file__).parent / "record_handles.py"
    made = subprocess.check_output([python, script], text=True, timeout=120)
    if RECORDS:
        FILE.write_text(made + "\n", encoding="utf-8")
    assert json.loads(made) == json.loads(FILE.read_text(encoding="utf-8"))


def test_what_it_leaves_open_and_its_dialects_are_as_recorded(models: Path, tmp_path: Path) -> None:
    cleaner = Cleaner({str(models): "models"})
    with serving_vllm(models / "sea", tmp_path, "--api-key", KEY, context=1024) as engine:
        plain = Talk("vLLM 0.32.0 on CPU, --api-key, no development mode", engine.endpoint, cleaner, key=KEY)
        talks_vllm.without_a_key(plain)
        said = Talk("vLLM 0.32.0 on CPU, scripted model", engine.endpoint, cleaner, key=KEY)
        talks_vllm.inference(said)
    judge("vllm-plain", plain.transcript)
    judge("vllm-inference", said.transcript)
