"""An engine that speaks every dialect, whole and streamed, and takes any request: it is not what is judged."""

from __future__ import annotations

import json
from typing import Any

from iop.testing.stub_engine import StubCall, whole_answer

CHAT = {"id": "c", "object": "chat.completion", "created": 1, "model": "real"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "real"}
RESPONSE = {"id": "r", "object": "response", "created_at": 1, "model": "real"}

WHOLE: dict[bytes, dict[str, Any]] = {
    b"/v1/chat/completions": CHAT
    | {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": USAGE,
    },
    b"/v1/completions": CHAT
    | {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    },
    b"/v1/embeddings": {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
        "model": "real",
    },
    b"/v1/responses": RESPONSE
    | {
        "status": "completed",
        "output": [
            {
                "type": "message",
                "id": "o",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "hi", "annotations": []}],
            }
        ],
        "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
    },
    b"/v1/messages": MESSAGE
    | {
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 3, "output_tokens": 2},
    },
    b"/v1/messages/count_tokens": {"input_tokens": 3},
}

_CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "real"}

STREAMED: dict[bytes, list[dict[str, Any]]] = {
    b"/v1/chat/completions": [
        _CHUNK | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "hi"}}]},
        _CHUNK | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ],
    b"/v1/completions": [
        _CHUNK | {"object": "text_completion", "choices": [{"index": 0, "text": "hi"}]},
        _CHUNK
        | {"object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]},
    ],
    b"/v1/responses": [
        {"type": "response.created", "response": RESPONSE | {"status": "in_progress", "output": []}},
        {"type": "response.completed", "response": WHOLE[b"/v1/responses"]},
    ],
    b"/v1/messages": [
        {
            "type": "message_start",
            "message": MESSAGE
            | {"content": [], "stop_reason": None, "usage": {"input_tokens": 3, "output_tokens": 0}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ],
}


async def speak_all(call: StubCall) -> None:
    """Answer in the dialect of the path."""
    path = call.path.partition(b"?")[0]
    body = call.json
    if isinstance(body, dict) and body.get("stream") is True and path in STREAMED:
        await call.start_events()
        for event in STREAMED[path]:
            name = b"event: " + event["type"].encode() + b"\n" if "type" in event else b""
            await call.chunk(name + b"data: " + json.dumps(event).encode() + b"\n\n")
        if b"completions" in path:
            await call.chunk(b"data: [DONE]\n\n")
        await call.end_chunks()
        return
    await call.write(whole_answer(json.dumps(WHOLE[path]).encode()))


async def speak_ollama(call: StubCall) -> None:
    """Answer a normalised run."""
    lines: list[dict[str, Any]] = [
        {"message": {"role": "assistant", "content": "hi"}, "done": False},
        {"done": True, "done_reason": "stop", "prompt_eval_count": 3, "eval_count": 2},
    ]
    await call.write(
        whole_answer(b"".join(json.dumps({"model": "real"} | line).encode() + b"\n" for line in lines))
    )
