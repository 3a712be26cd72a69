"""SGLang as its documentation and source say it is: never compared with a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from replay_engine import Answer, Asked, ReplayEngine

ROUTES: Final = (
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/start_profile",
    "/stop_profile",
    "/weights_checker",
    "/flush_cache",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
)


class Sglang(ReplayEngine):
    """Dies, as the real one does, of a release while busy and of restoring what was not released."""

    def __init__(self, **info: object) -> None:
        super().__init__(unknown=Answer(404, b'{"detail":"Not Found"}'))
        self.mode = ""
        self.running = 0
        self.version = "default"
        self.path = "model-a"
        self.released: set[str] = set()
        self.is_dead = False
        self.content = self.path
        self.group = ""
        self.is_open = False
        self.has_bracket = True
        self.broadcast_fails = False
        self.profiling: tuple[Path, str] | None = None
        told = {"version": "0.5.23", "enable_memory_saver": True, "dp_size": 1, **info}
        self.routes = {
            "GET /v1/models": lambda _: Answer.of({"data": [{"id": self.path, "owned_by": "sglang"}]}),
            "GET /model_info": self._model_info,
            "GET /openapi.json": Answer.of({"paths": {route: {} for route in ROUTES}}),
            "GET /server_info": Answer.of({**told, "internal_states": [], "launch_command": ""}),
            "GET /ready": lambda _: Answer(503 if self.mode else 200, b""),
            "GET /ping": Answer(200, b""),
            "GET /v1/loads": self._loads,
            "POST /pause_generation": self._pause,
            "POST /continue_generation": self._continue,
            "POST /flush_cache": self._flush,
            "POST /release_memory_occupation": self._release,
            "POST /resume_memory_occupation": self._restore,
            "POST /update_weights_from_disk": self._update,
            "POST /update_weight_version": self._relabel,
            "POST /init_weights_update_group": self._join,
            "POST /begin_weight_update": self._begin,
            "POST /update_weights_from_distributed": self._receive,
            "POST /update_weights_from_tensor": self._take,
            "POST /end_weight_update": self._end,
            "POST /destroy_weights_update_group": self._leave,
            "POST /start_profile": self._start_profile,
            "POST /stop_profile": self._stop_profile,
            "POST /weights_checker": lambda _: Answer.of(
                {"success": True, "message": "", "per_engine_checksum": f"sum of {self.content}"}
            ),
        }

    def _model_info(self, _: Asked) -> Answer:
        assert not self.is_dead
        return Answer.of(
            {"model_path": self.path, "served_model_name": self.path, "weight_version": self.version}
        )

    def _loads(self, asked: Asked) -> Answer:
        assert asked.query == {"include": "core"}
        return Answer.of({"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0}]})

    def _pause(self, asked: Asked) -> Answer:
        assert not self.mode, "another mode over a pause never returns"
        self.mode = asked.body["mode"]
        if self.mode == "abort":
            self.running = 0
        return Answer.of({"message": "", "status": "ok"})

    def _continue(self, asked: Asked) -> Answer:
        assert asked.body is not None
        self.mode = ""
        return Answer.of({"message": "", "status": "ok"})

    def _flush(self, _: Asked) -> Answer:
        if self.running and self.mode != "retract":
            return Answer(400, b"Flush cache failed: requests are running.", "text/plain")
        return Answer(200, b"Cache flushed.", "text/plain")

    def _release(self, asked: Asked) -> Answer:
        self.is_dead = bool(self.running) or bool(self.released & set(asked.body["tags"]))
        self.released |= set(asked.body["tags"])
        return Answer(200, b"null")

    def _restore(self, asked: Asked) -> Answer:
        self.is_dead = not set(asked.body["tags"]) <= self.released
        self.released -= set(asked.body["tags"])
        return Answer(200, b"null")

    def _update(self, asked: Asked) -> Answer:
        assert asked.body["abort_all_requests"] is False
        self.path = self.content = asked.body["model_path"]
        return Answer.of({"success": True, "message": "", "num_paused_requests": 0})

    def _relabel(self, asked: Asked) -> Answer:
        assert asked.body["abort_all_requests"] is False, "a label must not abort every request"
        self.version = asked.body["new_version"]
        return Answer.of({"success": True})

    def _join(self, asked: Asked) -> Answer:
        assert not self.group
        self.group = asked.body["group_name"]
        return Answer.of({"success": True, "message": "Succeeded to initialize the group."})

    def _begin(self, asked: Asked) -> Answer:
        if not self.has_bracket:
            return self.unknown
        assert asked.body == {"selector": "target"}
        if self.is_open:
            return Answer.of({"success": False, "message": "a weight update is in progress"}, 400)
        self.is_open = True
        return Answer.of({"success": True, "message": ""})

    def _receive(self, asked: Asked) -> Answer:
        if self.has_bracket and not self.is_open:
            return Answer.of({"success": False, "message": "begin_weight_update must be called first"}, 400)
        assert asked.body["group_name"] == self.group
        assert asked.body["abort_all_requests"] is False
        self.content = f"broadcast of {asked.body['names']}"
        if self.broadcast_fails:
            return Answer.of({"success": False, "message": "Failed to update: connection closed"}, 400)
        return Answer.of({"success": True, "message": ""})

    def _take(self, asked: Asked) -> Answer:
        if self.has_bracket and not self.is_open:
            return Answer.of({"success": False, "message": "begin_weight_update must be called first"}, 400)
        assert len(asked.body["serialized_named_tensors"]) == 1, "one text a rank"
        self.content = "a trainer's memory"
        return Answer.of({"success": True, "message": ""})

    def _end(self, _: Asked) -> Answer:
        if not self.has_bracket:
            return self.unknown
        was_open, self.is_open = self.is_open, False
        return Answer.of({"success": was_open, "message": ""}, 200 if was_open else 400)

    def _leave(self, asked: Asked) -> Answer:
        assert asked.body == {"group_name": self.group}
        self.group = ""
        return Answer.of({"success": True, "message": ""})

    def _start_profile(self, asked: Asked) -> Answer:
        if self.profiling is not None:
            return Answer(500, b"Profiling is already in progress. Call /stop_profile first.", "text/plain")
        self.profiling = (Path(asked.body["output_dir"]), asked.body["profile_id"])
        return Answer(200, b"Start profiling.", "text/plain")

    def _stop_profile(self, _: Asked) -> Answer:
        if self.profiling is None:
            return Answer(500, b"Profiling is not in progress. Call /start_profile first.", "text/plain")
        directory, profile_id = self.profiling
        self.profiling = None
        for rank in range(2):
            (directory / f"{profile_id}-TP-{rank}.trace.json.gz").write_bytes(b"trace %d" % rank)
        return Answer(200, b"Stop profiling. This will take some time.", "text/plain")
