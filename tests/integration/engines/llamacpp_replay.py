"""llama.cpp's server as its transcripts say: a router of two models, and a server of one."""

from __future__ import annotations

import json

from replay_engine import Answer, Asked, Recordings, ReplayEngine

ROUTER = Recordings("llamacpp-router")
SINGLE = Recordings("llamacpp-single")
BARE = Recordings("llamacpp-bare")


class Router(ReplayEngine):
    """Two models, `sea` loaded; loading and unloading show some questions later, as they really do."""

    def __init__(self) -> None:
        super().__init__(unknown=SINGLE["unknown path"])
        self.status = {"sea": "loaded", "hill": "unloaded"}
        self.coming: list[tuple[str, str]] = []
        self.fails_to_load = False
        self.routes = {
            "GET /health": ROUTER["health, nothing loaded"],
            "GET /props": ROUTER["props"],
            "GET /v1/models": self._models,
            "GET /slots": self._slots,
            "POST /slots/0": ROUTER["slot bad action"],
            "POST /models/unload": self._unload,
            "POST /models/load": self._load,
            "POST /v1/chat/completions": self._chat,
        }

    def _models(self, _: Asked) -> Answer:
        listing = json.loads(ROUTER["models, nothing loaded"].body)
        for model in listing["data"]:
            model["status"]["value"] = self.status[model["id"]]
        if self.coming:
            name, value = self.coming.pop(0)
            self.status[name] = value
        return Answer.of(listing)

    def _slots(self, asked: Asked) -> Answer:
        name = asked.query.get("model")
        if not name:
            return ROUTER["slots without a model"]
        if self.status[name] != "loaded":
            if asked.query.get("autoload") == "false":
                return ROUTER["slots of a model not loaded"]
            self.status[name] = "loaded"
        return ROUTER["slots"]

    def _unload(self, asked: Asked) -> Answer:
        name = asked.body["model"]
        if name not in self.status:
            return ROUTER["unload unknown"]
        if self.status[name] == "unloaded":
            return ROUTER["unload again"]
        self.coming = [(name, "loaded"), (name, "unloaded")]
        return ROUTER["unload"]

    def _load(self, asked: Asked) -> Answer:
        name = asked.body.get("model")
        if name not in self.status:
            return ROUTER["load unknown"]
        if self.status[name] in {"loading", "loaded"}:
            return ROUTER["load twice"]
        self.status[name] = "loading"
        self.coming = [(name, "loading"), (name, "failed" if self.fails_to_load else "loaded")]
        return ROUTER["load"]

    def _chat(self, asked: Asked) -> Answer:
        name = asked.body["model"]
        if name not in self.status:
            return ROUTER["chat with an unknown model"]
        # It keeps one.
        self.status = dict.fromkeys(self.status, "unloaded") | {name: "loaded"}
        return ROUTER["chat" if name == "sea" else "chat that loads another"]


class Single(ReplayEngine):
    """One model, two slots with tokens in them, everything switched on.

    Attributes:
        held: tokens, by slot.
        busy: slots at work.
    """

    def __init__(self) -> None:
        super().__init__(unknown=SINGLE["unknown path"])
        self.held = {0: 12, 1: 12}
        self.busy: set[int] = set()
        self.routes = {
            "GET /props": SINGLE["props, trimmed"],
            "GET /slots": self._slots,
            "GET /metrics": SINGLE["metrics, types only"],
            "POST /slots/0": self._act,
            "POST /slots/1": self._act,
            "POST /slots/99": self._act,
            "POST /completion": self._complete,
        }

    def _slots(self, _: Asked) -> Answer:
        slots = json.loads(SINGLE["slots, trimmed"].body)
        for slot in slots:
            slot["is_processing"] = slot["id"] in self.busy
        return Answer.of(slots)

    def _act(self, asked: Asked) -> Answer:
        if asked.query["action"] != "erase":
            return SINGLE["slot bad action"]
        named = int(asked.path.rpartition("/")[2])
        # Ids wrap around, and the answer does not tell.
        slot = named % len(self.held)
        erased, self.held[slot] = self.held[slot], 0
        return Answer.of({**json.loads(SINGLE["slot erase"].body), "id_slot": named, "n_erased": erased})

    def _complete(self, asked: Asked) -> Answer:
        self.held[asked.body.get("id_slot", 0)] = 120
        return SINGLE["canary, trimmed"]
