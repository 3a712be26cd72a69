"""What vLLM is asked when its transcripts are recorded: control, what is open without a key, dialects."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from engines_rig import HELLO, WEATHER
from engines_talk import Talk, ending
from safetensors import safe_open
from safetensors.numpy import save_file
from trainer_handles import shared

from iop.adapters.device_handles import SharedWeights

METRICS: Final = (
    b"process_start_time_seconds",
    b"vllm:num_requests_running",
    b"vllm:num_requests_waiting",
    b"vllm:engine_sleep_state",
)
LAUNCH: Final = {
    "model_config": ("model", "enable_sleep_mode", "sleep_mode_backend"),
    "device_config": ("device",),
    "weight_transfer_config": ("backend",),
    "parallel_config": ("data_parallel_size", "enable_elastic_ep", "elastic_ep_max_dp_size"),
    "profiler_config": ("profiler", "torch_profiler_dir", "torch_profiler_with_memory"),
}
PERMISSIONS: Final = ("VLLM_ALLOW_INSECURE_SERIALIZATION",)
STREAM: Final = {"model": "endless", "messages": HELLO, "stream": True, "max_tokens": 30_000}
PROBE: Final = {"model": "endless", "prompt": "Hello", "max_tokens": 1, "temperature": 0}


def control(talk: Talk, models: Path, lora: Path) -> None:
    """Development mode, one model `endless`, LoRA and profiler on. Ends with what kills the engine."""
    _looks(talk)
    _pauses(talk)
    _sleeps(talk)
    _caches(talk)
    _profiles(talk)
    _weights(talk, models)
    _loras(talk, lora)
    _rest(talk)
    missing = {"method": "reload_weights", "kwargs": {"weights_path": str(models / "absent")}}
    talk.ask("reload from a missing directory", "POST", "/collective_rpc", missing)
    talk.ask("health after the failed reload", "GET", "/health")
    talk.ask("completion after the failed reload", "POST", "/v1/completions", PROBE)


def _looks(talk: Talk) -> None:
    talk.ask("health", "GET", "/health")
    talk.ask("version", "GET", "/version")
    talk.ask("models", "GET", "/v1/models")
    talk.ask("openapi, paths only", "GET", "/openapi.json", trim=_paths)
    talk.ask("server_info, trimmed", "GET", "/server_info?config_format=json", trim=_launch)
    talk.ask("metrics, trimmed", "GET", "/metrics", trim=_metrics)
    talk.ask(
        "weight_checker checksum, trimmed", "POST", "/weight_checker", {"action": "checksum"}, trim=_sums
    )
    talk.ask("unknown path", "GET", "/nosuch")
    talk.ask("one token", "POST", "/v1/completions", PROBE)


def _pauses(talk: Talk) -> None:
    talk.ask("is_paused", "GET", "/is_paused")
    for mode in ("abort", "wait", "keep"):
        talk.ask(f"pause {mode}", "POST", f"/pause?mode={mode}&clear_cache=false")
        talk.ask(f"is_paused after {mode}", "GET", "/is_paused")
        talk.ask(f"is_sleeping after {mode}", "GET", "/is_sleeping")
        talk.ask(f"health after {mode}", "GET", "/health")
        talk.ask(f"resume after {mode}", "POST", "/resume")
        talk.ask(f"is_paused after resume after {mode}", "GET", "/is_paused")
    talk.ask("resume while not paused", "POST", "/resume")
    talk.ask("pause bad mode", "POST", "/pause?mode=bogus")
    with talk.streaming("/v1/chat/completions", STREAM) as stream:
        talk.ask("metrics while a stream runs", "GET", "/metrics", trim=_metrics)
        talk.ask("reset_prefix_cache while a request runs", "POST", "/reset_prefix_cache")
        talk.ask("pause abort while a stream runs", "POST", "/pause?mode=abort&clear_cache=false")
        ended = ending(stream.rest())
        talk.note(
            "stream aborted by a pause",
            "POST",
            "/v1/chat/completions",
            STREAM,
            stream.status,
            stream.content_type,
            ended,
        )
    talk.tell("POST", "/resume")


def _sleeps(talk: Talk) -> None:
    talk.tell("POST", "/pause?mode=abort&clear_cache=false")
    talk.ask("sleep level 1", "POST", "/sleep?level=1&mode=abort")
    talk.ask("is_sleeping while asleep", "GET", "/is_sleeping")
    talk.ask("is_paused while asleep", "GET", "/is_paused")
    talk.ask("metrics while asleep", "GET", "/metrics", trim=_metrics)
    talk.ask("wake_up tags=weights", "POST", "/wake_up?tags=weights")
    talk.ask("wake_up", "POST", "/wake_up")
    talk.ask("is_paused after wake_up", "GET", "/is_paused")
    talk.ask("is_sleeping after wake_up", "GET", "/is_sleeping")
    talk.ask("sleep bad level", "POST", "/sleep?level=7")
    talk.ask("release_kv_cache_memory", "POST", "/release_kv_cache_memory")
    talk.tell("POST", "/pause?mode=abort&clear_cache=false")
    talk.ask("release_kv_cache_memory while paused", "POST", "/release_kv_cache_memory")
    talk.tell("POST", "/resume")


def _caches(talk: Talk) -> None:
    talk.ask("reset_prefix_cache", "POST", "/reset_prefix_cache?reset_running_requests=false")
    talk.ask("reset_mm_cache", "POST", "/reset_mm_cache")
    talk.ask("reset_encoder_cache", "POST", "/reset_encoder_cache")


def _profiles(talk: Talk) -> None:
    talk.ask("start_profile", "POST", "/start_profile", {"profile_prefix": "p1"})
    talk.ask("start_profile twice", "POST", "/start_profile", {"profile_prefix": "p2"})
    talk.ask("stop_profile", "POST", "/stop_profile")
    talk.ask("stop_profile twice", "POST", "/stop_profile")
    talk.ask("start_profile bad prefix", "POST", "/start_profile", {"profile_prefix": "../p"})


def _weights(talk: Talk, models: Path) -> None:
    talk.ask("weight_info", "GET", "/weight_info")
    for name in ("hill", "endless"):
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(models / name)}}
        talk.ask(f"reload from {name}", "POST", "/collective_rpc", body)
        checksum = {"action": "checksum"}
        talk.ask(f"weight_checker after {name}", "POST", "/weight_checker", checksum, trim=_sums)
    talk.ask("weight_info after a reload", "GET", "/weight_info")
    talk.ask("update_weight_version", "POST", "/update_weight_version", {"new_version": "v2"})
    talk.ask("weight_info after update_weight_version", "GET", "/weight_info")
    talk.tell("POST", "/update_weight_version", {"new_version": "default"})
    talk.ask("collective_rpc no method", "POST", "/collective_rpc", {})
    talk.ask("collective_rpc unknown method", "POST", "/collective_rpc", {"method": "no_such_method"})
    for include in ("true", "false"):
        talk.ask(f"get_world_size {include}", "GET", f"/get_world_size?include_dp={include}")
    talk.ask("get_world_size", "GET", "/get_world_size")


def transfer(talk: Talk, models: Path) -> None:
    """Development mode, one model `endless`, a weight-transfer engine. A group takes GPUs; sessions do not."""
    talk.ask("server_info, trimmed", "GET", "/server_info?config_format=json", trim=_launch)
    tensors = {"update_info": {"names": ["x"], "dtype_names": ["bfloat16"], "shapes": [[1]]}}
    finish = {"weight_version": None}
    talk.ask("update_weights out of a session", "POST", "/update_weights", tensors)
    talk.ask("finish_weight_update out of a session", "POST", "/finish_weight_update", finish)
    talk.ask("start_weight_update", "POST", "/start_weight_update")
    talk.ask("start_weight_update twice", "POST", "/start_weight_update")
    talk.ask("update_weights without a group", "POST", "/update_weights", tensors)
    talk.ask("finish_weight_update of a failed session", "POST", "/finish_weight_update", finish)
    talk.ask("update_weights without update_info", "POST", "/update_weights", {})
    talk.ask("shutdown_weight_transfer_engine", "POST", "/shutdown_weight_transfer_engine")
    half = {"init_info": {"master_address": "127.0.0.1", "master_port": 1}}
    talk.ask("init_weight_transfer_engine without ranks", "POST", "/init_weight_transfer_engine", half)
    # What an undo does after a broadcast that broke off.
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(models / "endless")}}
    talk.ask("reload after a failed session", "POST", "/collective_rpc", body)
    talk.ask("one token after a failed session", "POST", "/v1/completions", PROBE)


def handles(talk: Talk, models: Path) -> None:
    """Development mode, one model `endless`, `ipc`, no parser of tool calls.

    The handles are read, and opened on no GPU.
    """
    talk.ask("server_info, trimmed", "GET", "/server_info?config_format=json", trim=_launch)
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in (None, "auto", "required", named):
        body: dict[str, Any] = {"model": "endless", "messages": SEE, "max_tokens": 4, "tools": [WEATHER]}
        if choice is not None:
            body["tool_choice"] = choice
        name = "named" if choice is named else choice or "nothing said"
        talk.ask(f"tools without a parser, {name}", "POST", "/v1/chat/completions", body)
    weights = SharedWeights.read(shared("head", "one device"), ranks=1, current={})
    pickled = base64.b64encode(weights.by_device()).decode()
    tensors: dict[str, object] = {"names": ["head"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    talk.ask(
        "init_weight_transfer_engine",
        "POST",
        "/init_weight_transfer_engine",
        {"init_info": {"packed": False}},
    )
    talk.ask("start_weight_update", "POST", "/start_weight_update")
    update = {"update_info": {**tensors, "ipc_handles_pickled": pickled}}
    talk.ask("update_weights without a GPU", "POST", "/update_weights", update)
    talk.tell("POST", "/start_weight_update")
    talk.ask("update_weights without handles", "POST", "/update_weights", {"update_info": tensors})
    talk.ask("shutdown_weight_transfer_engine", "POST", "/shutdown_weight_transfer_engine")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(models / "endless")}}
    talk.ask("reload after a failed session", "POST", "/collective_rpc", reload)
    talk.ask("one token after a failed session", "POST", "/v1/completions", PROBE)


def _loras(talk: Talk, lora: Path) -> None:
    load = {"lora_name": "ad1", "lora_path": str(lora)}
    talk.ask("load_lora_adapter", "POST", "/v1/load_lora_adapter", load)
    talk.ask("models with a LoRA adapter", "GET", "/v1/models")
    talk.ask("load_lora_adapter twice", "POST", "/v1/load_lora_adapter", load)
    talk.ask("completion by the LoRA adapter", "POST", "/v1/completions", {**PROBE, "model": "ad1"})
    missing = {"lora_name": "ad2", "lora_path": str(lora / "absent")}
    talk.ask("load_lora_adapter missing path", "POST", "/v1/load_lora_adapter", missing)
    talk.ask("unload_lora_adapter", "POST", "/v1/unload_lora_adapter", {"lora_name": "ad1"})
    talk.ask("unload_lora_adapter twice", "POST", "/v1/unload_lora_adapter", {"lora_name": "ad1"})


def _rest(talk: Talk) -> None:
    talk.ask("abort_requests no body", "POST", "/abort_requests")
    talk.ask("abort_requests unknown id", "POST", "/abort_requests", {"request_ids": ["nobody"]})
    talk.ask("scale_elastic_ep no size", "POST", "/scale_elastic_ep", {})
    talk.ask("scale_elastic_ep", "POST", "/scale_elastic_ep", {"new_data_parallel_size": 2})
    talk.ask("is_scaling_elastic_ep", "POST", "/is_scaling_elastic_ep")


def without_a_key(talk: Talk) -> None:
    """No development mode, one model `sea`, an API key: what is asked without it."""
    chat = {"model": "sea", "messages": HELLO, "max_tokens": 4}
    for method, path, body in (
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("GET", "/version", None),
        ("GET", "/load", None),
        ("POST", "/tokenize", {"model": "sea", "prompt": "Hello"}),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/messages", chat),
        ("POST", "/invocations", chat),
        ("GET", "/is_paused", None),
        ("POST", "/pause", None),
        ("POST", "/sleep", None),
        ("GET", "/is_sleeping", None),
        ("POST", "/reset_prefix_cache", None),
        ("POST", "/start_profile", None),
        ("POST", "/collective_rpc", {"method": "x"}),
        ("POST", "/scale_elastic_ep", {}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        ("GET", "/server_info", None),
        ("POST", "/update_weights", {}),
        ("POST", "/abort_requests", {}),
    ):
        talk.ask(f"{method} {path} without a key", method, path, body, is_known=False)
    talk.ask("openapi, paths only", "GET", "/openapi.json", trim=_paths, is_known=False)
    talk.ask("models with the key", "GET", "/v1/models")
    talk.ask("chat with the key", "POST", "/v1/chat/completions", chat)


SEE: Final = [{"role": "user", "content": "What do you see?"}]
TOOL_USE: Final = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]
RESPONSE_TOOL: Final = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
CALLED: Final = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        }
    ],
}


def inference(talk: Talk) -> None:
    """Its dialects, with the model `sea`."""

    def chat(name: str, **more: object) -> None:
        body: dict[str, Any] = {"model": "sea", "messages": SEE, "max_tokens": 60, **more}
        talk.ask(name, "POST", "/v1/chat/completions", body)

    def message(name: str, **more: object) -> None:
        body: dict[str, Any] = {"model": "sea", "messages": SEE, "max_tokens": 60, **more}
        talk.ask(name, "POST", "/v1/messages", body)

    def response(name: str, **more: object) -> None:
        body: dict[str, Any] = {"model": "sea", "input": "What do you see?", "max_output_tokens": 60, **more}
        talk.ask(name, "POST", "/v1/responses", body)

    chat("chat")
    chat("chat stream", stream=True, stream_options={"include_usage": True})
    chat("cut by max_tokens", max_tokens=5)
    chat("stop string", stop=[" sky"])
    chat("tools, auto", tools=[WEATHER])
    chat("tools, auto, stream", tools=[WEATHER], stream=True)
    chat("tools, required", tools=[WEATHER], tool_choice="required")
    told = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    chat("after the tool result", messages=[*SEE, CALLED, told], tools=[WEATHER])
    chat("unknown model", model="nobody")
    chat("no messages", messages=[])
    chat("more tokens than fit", max_tokens=100_000)
    talk.ask("completions", "POST", "/v1/completions", {"model": "sea", "prompt": "x", "max_tokens": 40})
    message("Anthropic")
    message("Anthropic stream", stream=True)
    message("Anthropic tools", tools=[TOOL_USE])
    message("Anthropic tools stream", tools=[TOOL_USE], stream=True)
    message("Anthropic unknown model", model="nobody")
    count = {"model": "sea", "messages": SEE}
    talk.ask("Anthropic count_tokens", "POST", "/v1/messages/count_tokens", count)
    for name, more in (("", {}), (" with tools", {"tools": [WEATHER]})):
        asked = {"model": "sea", "messages": SEE, "add_generation_prompt": True, **more}
        talk.ask(f"tokenize a chat{name}", "POST", "/tokenize", asked)
    asked = {"model": "sea", "messages": [*SEE, CALLED, told], "add_generation_prompt": True}
    talk.ask("tokenize a chat with a tool's result", "POST", "/tokenize", {**asked, "tools": [WEATHER]})
    talk.ask("tokenize no messages", "POST", "/tokenize", {"model": "sea", "messages": []})
    response("Responses")
    response("Responses stream", stream=True)
    response("Responses tools", tools=[RESPONSE_TOOL])


def make_lora(directory: Path, model: Path) -> Path:
    """A LoRA adapter that adds nothing, in its place."""
    with safe_open(model / "model.safetensors", "np") as tensors:
        rows, columns = tensors.get_slice("model.layers.0.self_attn.q_proj.weight").get_shape()
    directory.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    zeros = {
        f"{stem}.lora_A.weight": np.zeros((8, columns), np.float32),
        f"{stem}.lora_B.weight": np.zeros((rows, 8), np.float32),
    }
    save_file(zeros, directory / "adapter_model.safetensors")
    return directory


def _paths(body: bytes) -> bytes:
    return json.dumps({"paths": {path: {} for path in sorted(json.loads(body)["paths"])}}).encode()


def _launch(body: bytes) -> bytes:
    config = json.loads(body)["vllm_config"]
    kept = {part: _section(config[part], keys) for part, keys in LAUNCH.items()}
    allowed = json.loads(body)["vllm_env"]
    return json.dumps(
        {"vllm_config": kept, "vllm_env": {name: allowed[name] for name in PERMISSIONS}}
    ).encode()


def _section(told: dict[str, Any] | None, keys: tuple[str, ...]) -> dict[str, Any] | None:
    return None if told is None else {key: told[key] for key in keys}


def _metrics(body: bytes) -> bytes:
    names = tuple(b"# %b %b" % (kind, name) for kind in (b"HELP", b"TYPE") for name in METRICS)
    return b"".join(line + b"\n" for line in body.split(b"\n") if line.startswith((*METRICS, *names)))


def _sums(body: bytes) -> bytes:
    """One that tells something, and one of a tensor that was repacked elsewhere."""
    sums = json.loads(body)["checksums"]
    kept = {name: told for name, told in sums.items() if "lm_head" in name or "o_proj" in name}
    return json.dumps({"checksums": kept}).encode()
