"""vLLM's inference routes as they were recorded, beside its control."""

from __future__ import annotations

from replay_engine import Answer, Asked, Recordings
from vllm_replay import VllmReplay

SAID = Recordings("vllm-inference")


class VllmChatReplay(VllmReplay):
    """Answers chats, whole and streamed, with and without tools; counts them in `chats`."""

    def __init__(self) -> None:
        super().__init__()
        self.chats = 0
        self.routes["POST /v1/chat/completions"] = self._chat
        self.routes["POST /v1/messages"] = self._message
        del self.routes["POST /v1/completions"]
        self.recorded = SAID
        self.routes["POST /v1/responses"] = self._response

    def _chat(self, asked: Asked) -> Answer:
        self.chats += 1
        if known := SAID.to(asked.method, asked.path, asked.body):
            return known
        is_stream, has_tools = asked.body.get("stream"), asked.body.get("tools")
        if has_tools:
            return SAID["tools, auto, stream" if is_stream else "tools, auto"]
        return SAID["chat stream" if is_stream else "chat"]

    def _message(self, asked: Asked) -> Answer:
        self.chats += 1
        if known := SAID.to(asked.method, asked.path, asked.body):
            return known
        return SAID["Anthropic tools" if asked.body.get("tools") else "Anthropic"]

    def _response(self, asked: Asked) -> Answer:
        return SAID.to(asked.method, asked.path, asked.body) or SAID["Responses"]
