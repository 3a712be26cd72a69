"""Backends that understand a few questions, each in the one dialect that it speaks."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from iop.testing.stub_engine import StubCall, whole_answer

TOOLS = [{"city": "Paris"}, {"city": "Rome"}]
Answer = tuple[str, list[str], list[dict[str, Any]], str]
"""Reasoning, texts, arguments of calls, finish reason."""


def understand(messages: list[dict[str, Any]], *, has_tools: bool, images: int, limit: int | None) -> Answer:
    last = messages[-1]
    if last["role"] == "tool":
        results = [message["content"] for message in messages if message["role"] == "tool"]
        return "", ["It is ", " and ".join(results)], [], "stop"
    if has_tools:
        return "", ["Let me see. "], TOOLS, "tool_calls"
    text = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
    if images:
        return "", [f"{images} picture"], [], "stop"
    if "think" in text:
        return "Hm, six by seven.", ["42"], [], "stop"
    if limit == 1:
        return "", ["Hé"], [], "length"
    return "", ["Hé", "llo 🚀"], [], "stop"


def chat_understands(body: dict[str, Any]) -> Answer:
    messages = body["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    images = 0
    for message in messages:
        if isinstance(message["content"], list):
            images += sum(part["type"] == "image_url" for part in message["content"])
    return understand(messages, has_tools="tools" in body, images=images, limit=body.get("max_tokens"))


async def chat_backend(call: StubCall) -> None:
    """Speaks chat completions alone. Its calls are numbered from 1 and skip, as some gateways do (P-11)."""
    if call.path != b"/v1/chat/completions":
        await call.write(whole_answer(b"no such page", status=b"404 Not Found", kind=b"text/plain"))
        return
    reasoning, texts, calls, finish = chat_understands(call.json)
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    made = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "weather", "arguments": json.dumps(a)}}
        for n, a in enumerate(calls, 1)
    ]
    if not call.json.get("stream"):
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if reasoning:
            message["reasoning_content"] = reasoning
        if made:
            message["tool_calls"] = made
        choice = {"index": 0, "message": message, "finish_reason": finish}
        answer = {"id": "x", "object": "chat.completion", "model": "real", "choices": [choice]}
        await call.write(whole_answer(json.dumps(answer | {"created": 1, "usage": usage}).encode()))
        return
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if reasoning:
        deltas.append({"reasoning": reasoning})
    deltas += [{"content": text} for text in texts]
    for number, one in enumerate(made):
        arguments = one["function"]["arguments"]  # type: ignore[index]
        index = 2 * number + 1
        deltas.append(
            {"tool_calls": [one | {"index": index, "function": {"name": "weather", "arguments": ""}}]}
        )
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": letter}}]} for letter in arguments
        ]
    frame = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "real"}
    events = [frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append(frame | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if (call.json.get("stream_options") or {}).get("include_usage"):
        events.append(frame | {"choices": [], "usage": usage})
    await call.start_events()
    for event in events:
        await call.chunk(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")
    await call.chunk(b"data: [DONE]\n\n")
    await call.end_chunks()


async def messages_backend(call: StubCall) -> None:
    """Speaks messages alone."""
    if call.path != b"/v1/messages":
        await call.write(whole_answer(b"no such page", status=b"404 Not Found", kind=b"text/plain"))
        return
    body = call.json
    assert body["system"] in ("Be brief.", [{"type": "text", "text": "Be brief."}])
    assert call.headers[b"anthropic-version"]
    blocks = body["messages"][-1]["content"]
    if blocks[0]["type"] == "tool_result":
        told = [{"role": "tool", "content": _text(block["content"])} for block in blocks]
    else:
        told = [{"role": "user", "content": blocks[0]["text"]}]
    reasoning, texts, calls, finish = understand(
        told,
        has_tools="tools" in body,
        images=sum(block["type"] == "image" for block in blocks),
        limit=body["max_tokens"],
    )
    content: list[dict[str, Any]] = []
    if reasoning:
        content.append({"type": "thinking", "thinking": reasoning, "signature": "s"})
    content.append({"type": "text", "text": "".join(texts)})
    content += [
        {"type": "tool_use", "id": f"call_{n}", "name": "weather", "input": given}
        for n, given in enumerate(calls, 1)
    ]
    stop = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}[finish]
    head = {"id": "m", "type": "message", "role": "assistant", "model": "real"}
    if not body.get("stream"):
        answer = head | {"content": content, "stop_reason": stop, "stop_sequence": None}
        usage = {"input_tokens": 3, "output_tokens": 2}
        await call.write(whole_answer(json.dumps(answer | {"usage": usage}).encode()))
        return
    start = head | {"content": [], "stop_reason": None, "usage": {"input_tokens": 3, "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for index, block in enumerate(content):
        key = {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
        empty = block | {key: {} if key == "input" else ""}
        kind = "input_json" if key == "input" else key
        delta = {
            "type": f"{kind}_delta",
            "partial_json" if key == "input" else key: json.dumps(block["input"])
            if key == "input"
            else block[key],
        }
        events += [
            {"type": "content_block_start", "index": index, "content_block": empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    events += [
        {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]
    await call.start_events()
    for event in events:
        data = json.dumps(event, ensure_ascii=False).encode()
        await call.chunk(b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n")
    await call.end_chunks()


async def ollama_backend(call: StubCall) -> None:
    """Speaks Ollama's own chat, by way of normalised runs."""
    body = call.json
    messages = body["messages"]
    assert messages[0]["content"] == "Be brief."
    reasoning, texts, calls, finish = understand(
        messages,
        has_tools=bool(body.get("tools")),
        images=sum(len(message.get("images") or ()) for message in messages),
        limit=(body.get("options") or {}).get("num_predict"),
    )
    lines: list[dict[str, Any]] = []
    if reasoning:
        lines.append({"message": {"role": "assistant", "content": "", "thinking": reasoning}})
    lines += [{"message": {"role": "assistant", "content": text}} for text in texts]
    if calls:
        made = [{"function": {"name": "weather", "arguments": given}} for given in calls]
        lines.append({"message": {"role": "assistant", "content": "", "tool_calls": made}})
    reason = "length" if finish == "length" else "stop"
    lines.append({"done": True, "done_reason": reason, "prompt_eval_count": 3, "eval_count": 2})
    await call.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for line in lines:
        await call.chunk(json.dumps({"model": "real", "done": False} | line).encode() + b"\n")
    await call.end_chunks()


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


BACKENDS: dict[str, Callable[[StubCall], Awaitable[None]]] = {
    "chat": chat_backend,
    "messages": messages_backend,
    "run": ollama_backend,
}
