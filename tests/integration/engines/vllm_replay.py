"""vLLM as its recordings and its documented states say: paused, asleep, labelled."""

from __future__ import annotations

import json
from pathlib import Path

from replay_engine import Answer, Asked, Recordings, ReplayEngine

DEV = Recordings("vllm-dev")
PLAIN = Recordings("vllm-plain")
NOT_FOUND = Answer(404, b'{"detail":"Not Found"}')


class VllmReplay(ReplayEngine):
    """Development mode, nothing running. Attributes may be changed by a test.

    Args:
        sleep_mode: as started with `--enable-sleep-mode`; such an engine was not recorded, its states follow the
            documentation of the server.
        model_root: where `/v1/models` says the weights are.
    """

    def __init__(
        self, *, sleep_mode: bool = False, model_root: str = "models/tiny-a", profile_dir: Path | None = None
    ) -> None:
        super().__init__(unknown=NOT_FOUND)
        self.is_paused = False
        self.sleep = "awake"
        self.label = "default"
        self.running = 0
        self.start_time = "1.79600631478e+09"
        info = json.loads(DEV["server_info, trimmed"].body)
        info["vllm_config"]["model_config"]["enable_sleep_mode"] = sleep_mode
        if profile_dir is not None:
            info["vllm_config"]["profiler_config"]["torch_profiler_dir"] = str(profile_dir)
        models = json.loads(DEV["models"].body)
        models["data"][0]["root"] = model_root
        self.routes = {
            "GET /health": DEV["health"],
            "GET /version": DEV["version"],
            "GET /openapi.json": DEV["openapi, paths only"],
            "GET /server_info": Answer.of(info),
            "GET /v1/models": Answer.of(models),
            "GET /metrics": self._metrics,
            "GET /is_paused": lambda _: Answer.of({"is_paused": self.is_paused}),
            "GET /is_sleeping": lambda _: Answer.of({"is_sleeping": self.sleep != "awake"}),
            "GET /weight_info": lambda _: Answer.of({"weight_version": self.label}),
            "POST /pause": self._pause,
            "POST /resume": self._resume,
            "POST /sleep": self._sleep,
            "POST /wake_up": self._wake_up,
            "POST /release_kv_cache_memory": self._release_kv,
            "POST /reset_prefix_cache": DEV["reset_prefix_cache"],
            "POST /reset_mm_cache": DEV["reset_mm_cache"],
            "POST /reset_encoder_cache": DEV["reset_encoder_cache"],
            "POST /collective_rpc": DEV["reload from another directory (weights B)"],
            "POST /weight_checker": DEV["weight_checker checksum, trimmed"],
            "POST /update_weight_version": self._relabel,
            "POST /start_profile": DEV["start_profile"],
            "POST /stop_profile": DEV["stop_profile"],
            "POST /v1/completions": Answer.of({"choices": [{"text": " a", "finish_reason": "length"}]}),
        }

    def _metrics(self, _: Asked) -> Answer:
        text = DEV["metrics"].body.decode()
        text = text.replace("1.79600631478e+09", self.start_time)
        text = text.replace(
            'running{engine="0",model_name="endless"} 0.0', f'running{{engine="0"}} {self.running}'
        )
        text = text.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
        text = text.replace(f'sleep_state="{self.sleep}"}} 0.0', f'sleep_state="{self.sleep}"}} 1.0')
        return Answer(200, text.encode(), "text/plain")

    def _pause(self, asked: Asked) -> Answer:
        if asked.query.get("mode") not in {"abort", "wait", "keep"}:
            return DEV["pause bad mode"]
        self.is_paused = True
        return DEV["pause default (abort)"]

    def _resume(self, _: Asked) -> Answer:
        self.is_paused = False
        return DEV["resume"]

    def _sleep(self, asked: Asked) -> Answer:
        self.sleep = "discard_all" if asked.query.get("level") == "2" else "weights_offloaded"
        return DEV["sleep level 1"]

    def _wake_up(self, asked: Asked) -> Answer:
        if "tags" in asked.query:
            return DEV["wake_up tags=weights"]
        self.sleep = "awake"
        self.is_paused = False
        return DEV["wake_up"]

    def _release_kv(self, _: Asked) -> Answer:
        self.sleep = "weights_offloaded"
        return Answer.of({"status": "kv_cache_released"})

    def _relabel(self, asked: Asked) -> Answer:
        self.label = asked.body["new_version"]
        return Answer.of({"success": True, "new_version": self.label})
