"""What llama.cpp's server is asked when its transcripts are recorded: with one model, bare, and as a router."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from engines_rig import HELLO, WEATHER
from engines_talk import Talk, last_events

STREAM: Final = {"model": "endless", "messages": HELLO, "stream": True, "max_tokens": -1}
SLOT: Final = ("id", "n_ctx", "is_processing")
MODEL: Final = ("id", "object", "owned_by", "status")
CHANGES_WITHIN_S: Final = 30.0


def single(talk: Talk) -> None:
    """One model `endless`, two slots; metrics, slots and a place for them switched on."""
    talk.ask("health", "GET", "/health")
    talk.ask("props, trimmed", "GET", "/props", trim=_props)
    talk.ask("slots, trimmed", "GET", "/slots", trim=_slots)
    talk.ask("metrics, types only", "GET", "/metrics", trim=_types)
    talk.ask("models, trimmed", "GET", "/v1/models", trim=_models)
    talk.ask("slot bad action", "POST", "/slots/0?action=none", {})
    talk.ask("slot erase, non numeric", "POST", "/slots/x?action=erase", {})
    canary = {"prompt": "a0 " * 40, "n_predict": 1, "cache_prompt": True}
    talk.ask("canary, trimmed", "POST", "/completion", canary, trim=_timings)
    for slot in (0, 1):
        talk.tell("POST", f"/slots/{slot}?action=erase", {})
    talk.tell("POST", "/completion", {**canary, "id_slot": 0})
    talk.ask("slot erase", "POST", "/slots/0?action=erase", {})
    talk.ask("slot erase again", "POST", "/slots/0?action=erase", {})
    talk.ask("slot erase, an id that is not there", "POST", "/slots/99?action=erase", {})
    talk.ask("unknown path", "GET", "/nosuch")
    talk.ask("another engine's pause", "POST", "/pause", {})
    talk.ask("models/load in single-model mode", "POST", "/models/load", {"model": "endless"})
    talk.ask("lora-adapters, none", "GET", "/lora-adapters")
    talk.ask("lora-adapters, not a list", "POST", "/lora-adapters", {"id": 0, "scale": 1.0})
    talk.ask("lora-adapters, unknown id", "POST", "/lora-adapters", [{"id": 7, "scale": 1.0}])
    with talk.streaming("/v1/chat/completions", STREAM):
        talk.ask("slots while a stream runs, trimmed", "GET", "/slots", trim=_slots)
    _until(talk, "/slots", lambda told: not any(slot["is_processing"] for slot in told))
    chat = {"messages": HELLO, "max_tokens": 4, "temperature": 0}
    talk.ask("chat, the name of another model", "POST", "/v1/chat/completions", {**chat, "model": "nobody"})
    talk.ask("chat stream", "POST", "/v1/chat/completions", {**chat, "stream": True}, trim=last_events)
    talk.ask("chat without messages", "POST", "/v1/chat/completions", {})
    talk.ask("Anthropic", "POST", "/v1/messages", {**chat, "model": "endless"})
    talk.ask("Anthropic count_tokens", "POST", "/v1/messages/count_tokens", {"messages": HELLO})
    response: dict[str, Any] = {"model": "endless", "input": "Hello", "max_output_tokens": 4}
    talk.ask("Responses", "POST", "/v1/responses", response)
    talk.ask("tools", "POST", "/v1/chat/completions", {**chat, "tools": [WEATHER], "max_tokens": 60})


def bare(talk: Talk) -> None:
    """One model, and nothing switched on."""
    talk.ask("metrics not enabled", "GET", "/metrics")
    talk.ask("slots with --no-slots", "GET", "/slots")
    talk.ask("slot erase without --slot-save-path", "POST", "/slots/0?action=erase", {})
    talk.ask("POST /props not enabled", "POST", "/props", {})
    talk.ask("embeddings not enabled", "POST", "/v1/embeddings", {"input": "x"})


def router(talk: Talk) -> None:
    """Models `hill` and `sea`, of which it keeps one."""
    talk.ask("health, nothing loaded", "GET", "/health")
    talk.ask("props", "GET", "/props", trim=_router_props)
    talk.ask("models, nothing loaded", "GET", "/v1/models", trim=_models)
    talk.ask("slots of a model not loaded", "GET", "/slots?model=sea&autoload=false")
    talk.ask("load", "POST", "/models/load", {"model": "sea"})
    talk.ask("models just after load", "GET", "/v1/models", trim=_models)
    _until_status(talk, sea="loaded")
    talk.ask("models, one loaded", "GET", "/v1/models", trim=_models)
    talk.ask("load twice", "POST", "/models/load", {"model": "sea"})
    talk.ask("load unknown", "POST", "/models/load", {"model": "nobody"})
    talk.ask("load without a name", "POST", "/models/load", {})
    talk.ask("slots", "GET", "/slots?model=sea&autoload=false", trim=_slots)
    talk.ask("slots without a model", "GET", "/slots")
    talk.ask("slot bad action", "POST", "/slots/0?action=none&autoload=false", {"model": "sea"})
    chat = {"messages": HELLO, "max_tokens": 4, "temperature": 0}
    talk.ask("chat", "POST", "/v1/chat/completions", {**chat, "model": "sea"})
    talk.ask("chat with an unknown model", "POST", "/v1/chat/completions", {**chat, "model": "nobody"})
    talk.ask("chat that loads another", "POST", "/v1/chat/completions", {**chat, "model": "hill"})
    talk.ask("models, the other loaded", "GET", "/v1/models", trim=_models)
    talk.ask("unload", "POST", "/models/unload", {"model": "hill"})
    _until_status(talk, hill="unloaded")
    talk.ask("models, all unloaded", "GET", "/v1/models", trim=_models)
    talk.ask("unload again", "POST", "/models/unload", {"model": "hill"})
    talk.ask("unload unknown", "POST", "/models/unload", {"model": "nobody"})


def lora(talk: Talk) -> None:
    """One model `sea` with an adapter of `make_lora`, under which it says one word."""
    chat = {"messages": HELLO, "max_tokens": 40, "temperature": 0, "cache_prompt": False}

    def says(name: str, **more: object) -> None:
        talk.ask(name, "POST", "/v1/chat/completions", {**chat, **more}, trim=_message)

    talk.ask("lora-adapters", "GET", "/lora-adapters")
    says("chat with the adapter")
    talk.ask("lora-adapters, scale 0", "POST", "/lora-adapters", [{"id": 0, "scale": 0.0}])
    talk.ask("lora-adapters after scale 0", "GET", "/lora-adapters")
    says("chat with scale 0")
    says("chat with a scale of its own", lora=[{"id": 0, "scale": 1.0}])
    talk.ask("lora-adapters, scale 1", "POST", "/lora-adapters", [{"id": 0, "scale": 1.0}])
    says("chat with scale 1")
    talk.ask("lora-adapters, empty list", "POST", "/lora-adapters", [])
    says("chat after the empty list")


def make_lora(file: Path, model: Path) -> Path:
    """A LoRA adapter for the file of a scripted model: the answer ends behind its first word.

    Args:
        model: its directory, for the numbers of its words.
    """
    words = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    width = json.loads((model / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    down, up = np.zeros((1, width), np.float32), np.zeros((width, 1), np.float32)
    down[0, words["The"]] = 1.0
    up[words["<|im_end|>"], 0] = 8.0
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    writer.add_tensor("output.weight.lora_a", down)
    writer.add_tensor("output.weight.lora_b", up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _message(body: bytes) -> bytes:
    """With what it says as the finish reason's neighbour, since that is what an adapter changes."""
    (choice,) = json.loads(body)["choices"]
    told = {"finish_reason": choice["finish_reason"], "value": choice["message"]["content"]}
    return json.dumps({"choices": [told]}).encode()


def _until(talk: Talk, path: str, is_so: Any) -> None:
    deadline = time.monotonic() + CHANGES_WITHIN_S
    while not is_so(json.loads(talk.tell("GET", path)[1])):
        assert time.monotonic() < deadline, f"{path} did not change in time"
        time.sleep(0.02)


def _until_status(talk: Talk, **wanted: str) -> None:
    def is_so(told: Any) -> bool:
        statuses = {each["id"]: each["status"]["value"] for each in told["data"]}
        return all(statuses[name] == status for name, status in wanted.items())

    _until(talk, "/v1/models", is_so)


def _picked(told: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: told[key] for key in keys if key in told}


def _props(body: bytes) -> bytes:
    return json.dumps(
        _picked(json.loads(body), ("total_slots", "model_alias", "model_path", "build_info", "is_sleeping"))
    ).encode()


def _router_props(body: bytes) -> bytes:
    keys = ("role", "max_instances", "models_autoload", "model_alias", "model_path", "build_info")
    return json.dumps(_picked(json.loads(body), keys)).encode()


def _slots(body: bytes) -> bytes:
    return json.dumps([_picked(slot, SLOT) for slot in json.loads(body)]).encode()


def _types(body: bytes) -> bytes:
    return b"".join(line + b"\n" for line in body.split(b"\n") if line.startswith(b"# TYPE"))


def _timings(body: bytes) -> bytes:
    timings = json.loads(body)["timings"]
    return json.dumps({"timings": _picked(timings, ("cache_n", "prompt_n", "predicted_n"))}).encode()


def _models(body: bytes) -> bytes:
    """How a router starts its models is of interest for the file only."""
    listed = []
    for model in json.loads(body)["data"]:
        kept = _picked(model, MODEL)
        if "args" in (status := kept.get("status", {})):
            at = status["args"].index("--model")
            kept["status"] = {"value": status["value"], "args": status["args"][at : at + 2]}
        listed.append(kept)
    return json.dumps({"object": "list", "data": sorted(listed, key=lambda each: str(each["id"]))}).encode()
