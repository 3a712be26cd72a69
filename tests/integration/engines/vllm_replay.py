"""vLLM as its recordings and its documented states say: paused, asleep, labelled."""

from __future__ import annotations

import json
from pathlib import Path

from replay_engine import Answer, Asked, Recordings, ReplayEngine

DEV = Recordings("vllm-dev")
PLAIN = Recordings("vllm-plain")
TRANSFER = Recordings("vllm-transfer")
HANDLES = Recordings("vllm-handles")
NOT_FOUND = DEV["unknown path"]


class VllmReplay(ReplayEngine):
    """Development mode, nothing running. Attributes may be changed by a test.

    Args:
        transfer: as started with `--weight-transfer-config` naming this backend, on a GPU. None formed a group or
            opened a handle there: the answers of those that succeed follow the server's source.
        data_parallel_max: as started with `--enable-elastic-ep`, up to this size; by the server's source.
        sleep_mode: as started with `--enable-sleep-mode`; such an engine was not recorded, its states follow the
            documentation of the server.
        model_root: where `/v1/models` says the weights are.
    """

    def __init__(
        self,
        *,
        sleep_mode: bool = False,
        model_root: str = "models/endless",
        profile_dir: Path | None = None,
        transfer: str = "",
        data_parallel_max: int = 0,
    ) -> None:
        super().__init__(unknown=NOT_FOUND)
        self.is_paused = False
        self.sleep = "awake"
        self.label = "default"
        self.sleep_mode = sleep_mode
        self.is_profiling = False
        self.running = 0
        self.waiting = 0
        self.start_time = "1.79600631478e+09"
        info = json.loads(DEV["server_info, trimmed"].body)
        info["vllm_config"]["model_config"]["enable_sleep_mode"] = sleep_mode
        if transfer:
            recorded = HANDLES if transfer == "ipc" else TRANSFER
            info = json.loads(recorded["server_info, trimmed"].body)
            info["vllm_config"]["device_config"]["device"] = "cuda"
        if data_parallel_max:
            parallel = {"enable_elastic_ep": True, "elastic_ep_max_dp_size": data_parallel_max}
            info["vllm_config"]["parallel_config"].update(parallel)
        self.info = info
        if profile_dir is not None:
            info["vllm_config"]["profiler_config"]["torch_profiler_dir"] = str(profile_dir)
        self.loras: dict[str, str] = {}
        self.is_broken = False
        self.group: dict[str, object] | None = None
        self.is_session = False
        self.ranks = 1
        self.data_parallel = 1
        self.received: list[str] = []
        self._root = model_root
        self.routes = {
            "GET /health": DEV["health"],
            "GET /version": DEV["version"],
            "GET /openapi.json": DEV["openapi, paths only"],
            "GET /server_info": lambda _: Answer.of(self.info),
            "GET /v1/models": self._models,
            "GET /metrics": self._metrics,
            "GET /is_paused": lambda _: Answer.of({"is_paused": self.is_paused}),
            "GET /is_sleeping": lambda _: Answer.of({"is_sleeping": self.is_paused or self.sleep != "awake"}),
            "GET /weight_info": lambda _: Answer.of({"weight_version": self.label}),
            "POST /pause": self._pause,
            "POST /resume": self._resume,
            "POST /sleep": self._sleep,
            "POST /wake_up": self._wake_up,
            "POST /release_kv_cache_memory": self._release_kv,
            "POST /reset_prefix_cache": self._reset_prefix,
            "POST /reset_mm_cache": DEV["reset_mm_cache"],
            "POST /reset_encoder_cache": DEV["reset_encoder_cache"],
            "POST /collective_rpc": self._rpc,
            "POST /weight_checker": DEV["weight_checker checksum, trimmed"],
            "POST /update_weight_version": self._relabel,
            "POST /start_profile": self._start_profile,
            "POST /stop_profile": self._stop_profile,
            "POST /v1/completions": self._complete,
            "POST /is_scaling_elastic_ep": DEV["is_scaling_elastic_ep"],
            "GET /get_world_size": self._world_size,
            "POST /init_weight_transfer_engine": self._join,
            "POST /start_weight_update": self._start_update,
            "POST /update_weights": self._update,
            "POST /finish_weight_update": self._finish_update,
            "POST /shutdown_weight_transfer_engine": self._leave,
            "POST /scale_elastic_ep": self._scale,
            "POST /v1/load_lora_adapter": self._load_lora,
            "POST /v1/unload_lora_adapter": self._unload_lora,
        }

    def _models(self, _: Asked) -> Answer:
        base = json.loads(DEV["models"].body)
        base["data"][0]["root"] = self._root
        (adapter,) = json.loads(DEV["models with a LoRA adapter"].body)["data"][1:]
        base["data"] += [{**adapter, "id": name, "root": path} for name, path in self.loras.items()]
        return Answer.of(base)

    def _complete(self, asked: Asked) -> Answer:
        if self.is_broken:
            return DEV["completion after the failed reload"]
        return DEV["one token" if asked.body["model"] == "endless" else "completion by the LoRA adapter"]

    def _rpc(self, asked: Asked) -> Answer:
        if "method" not in asked.body:
            return DEV["collective_rpc no method"]
        if asked.body["method"] != "reload_weights":
            return DEV["collective_rpc unknown method"]
        if asked.body["kwargs"]["weights_path"].endswith("absent"):
            # Healthy to the eye, and dead at the next request.
            self.is_broken = True
            return DEV["reload from a missing directory"]
        return DEV["reload from hill"]

    def _world_size(self, asked: Asked) -> Answer:
        with_engines = asked.query.get("include_dp") != "false"
        return Answer.of({"world_size": self.ranks * (self.data_parallel if with_engines else 1)})

    def _scale(self, asked: Asked) -> Answer:
        size = asked.body.get("new_data_parallel_size")
        if size is None:
            return DEV["scale_elastic_ep no size"]
        if not self.info["vllm_config"]["parallel_config"]["enable_elastic_ep"]:
            return DEV["scale_elastic_ep"]
        self.data_parallel = size
        return Answer.of({"message": f"Scaled to {size} data parallel engines"})

    def _join(self, asked: Asked) -> Answer:
        if self.info["vllm_config"]["weight_transfer_config"]["backend"] == "ipc":
            self.group = asked.body["init_info"]
            return HANDLES["init_weight_transfer_engine"]
        if not {"rank_offset", "world_size"} <= asked.body["init_info"].keys():
            return TRANSFER["init_weight_transfer_engine without ranks"]
        self.group = asked.body["init_info"]
        # No real one formed a group here: the form of the answer follows the server's source.
        return Answer.of({"message": "Weight transfer initialized"})

    def _start_update(self, _: Asked) -> Answer:
        was_open, self.is_session = self.is_session, True
        return TRANSFER["start_weight_update twice" if was_open else "start_weight_update"]

    def _update(self, asked: Asked) -> Answer:
        if "update_info" not in asked.body:
            return TRANSFER["update_weights without update_info"]
        if not self.is_session:
            return TRANSFER["update_weights out of a session"]
        if self.group == {"packed": False} and "ipc_handles_pickled" not in asked.body["update_info"]:
            return HANDLES["update_weights without handles"]
        if self.group is None:
            self.is_session = False
            return TRANSFER["update_weights without a group"]
        self.received = asked.body["update_info"]["names"]
        return Answer.of({"message": "Weights updated"})

    def _finish_update(self, asked: Asked) -> Answer:
        assert asked.body == {"weight_version": None}, "the label is published last"
        if not self.is_session:
            return TRANSFER["finish_weight_update out of a session"]
        self.is_session = False
        return Answer.of({"message": "Weight update finished"})

    def _leave(self, _: Asked) -> Answer:
        self.group = None
        return TRANSFER["shutdown_weight_transfer_engine"]

    def _load_lora(self, asked: Asked) -> Answer:
        name, path = asked.body["lora_name"], asked.body["lora_path"]
        if name in self.loras:
            return DEV["load_lora_adapter twice"]
        if path.endswith("absent"):
            return DEV["load_lora_adapter missing path"]
        self.loras[name] = path
        return DEV["load_lora_adapter"]

    def _unload_lora(self, asked: Asked) -> Answer:
        known = self.loras.pop(asked.body["lora_name"], None)
        return DEV["unload_lora_adapter twice" if known is None else "unload_lora_adapter"]

    def _metrics(self, _: Asked) -> Answer:
        text = DEV["metrics, trimmed"].body.decode()
        text = text.replace("1.79600631478e+09", self.start_time)
        text = text.replace(
            'running{engine="0",model_name="endless"} 0.0',
            f'running{{engine="0",model_name="endless"}} {self.running}.0',
        )
        text = text.replace(
            'waiting{engine="0",model_name="endless"} 0.0',
            f'waiting{{engine="0",model_name="endless"}} {self.waiting}.0',
        )
        text = text.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
        text = text.replace(f'sleep_state="{self.sleep}"}} 0.0', f'sleep_state="{self.sleep}"}} 1.0')
        return Answer(200, text.encode(), "text/plain")

    def _pause(self, asked: Asked) -> Answer:
        if asked.query.get("mode") not in {"abort", "wait", "keep"}:
            return DEV["pause bad mode"]
        self.is_paused = True
        if asked.query["mode"] == "abort":
            self.running = 0
        return DEV["pause abort"]

    def _resume(self, _: Asked) -> Answer:
        self.is_paused = False
        return DEV["resume after abort"]

    def _reset_prefix(self, _: Asked) -> Answer:
        return DEV["reset_prefix_cache while a request runs" if self.running else "reset_prefix_cache"]

    def _start_profile(self, asked: Asked) -> Answer:
        if "/" in asked.body["profile_prefix"]:
            return DEV["start_profile bad prefix"]
        if self.is_profiling:
            return DEV["start_profile twice"]
        self.is_profiling = True
        return DEV["start_profile"]

    def _stop_profile(self, _: Asked) -> Answer:
        self.is_profiling = False
        return DEV["stop_profile"]

    def _sleep(self, asked: Asked) -> Answer:
        if asked.query["level"] not in {"0", "1", "2"}:
            return DEV["sleep bad level"]
        self.is_paused = True
        self.sleep = "discard_all" if asked.query.get("level") == "2" else "weights_offloaded"
        return DEV["sleep level 1"]

    def _wake_up(self, asked: Asked) -> Answer:
        if "tags" in asked.query:
            return DEV["wake_up tags=weights"]
        self.sleep = "awake"
        self.is_paused = False
        return DEV["wake_up"]

    def _release_kv(self, _: Asked) -> Answer:
        if not self.is_paused:
            return DEV["release_kv_cache_memory"]
        if not self.sleep_mode:
            return DEV["release_kv_cache_memory while paused"]
        self.sleep = "weights_offloaded"
        return Answer.of({"status": "kv_cache_released"})

    def _relabel(self, asked: Asked) -> Answer:
        self.label = asked.body["new_version"]
        return Answer.of({"success": True, "new_version": self.label})
