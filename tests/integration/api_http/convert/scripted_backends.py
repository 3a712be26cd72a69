"""Backends that understand a few questions, each in the one dialect that it speaks."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from iop.testing.stub_engine import StubCall, whole_answer

TOOLS = [{"city": "Paris"}, {"city": "Rome"}]
Answer = tuple[str, list[str], list[dict[str, Any]], str]
"""Reasoning, texts, arguments of calls, finish reason."""


def understand(
    messages: list[dict[str, Any]],
    *,
    has_tools: bool,
    images: int,
    limit: int | None,
    stops: list[str] | None = None,
) -> Answer:
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
    for stop in stops or ():
        return "", ["Héllo 🚀".partition(stop)[0]], [], "met"
    return "", ["Hé", "llo 🚀"], [], "stop"


def chat_understands(body: dict[str, Any]) -> Answer:
    messages = body["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    images = 0
    for message in messages:
        if isinstance(message["content"], list):
            images += sum(part["type"] == "image_url" for part in message["content"])
    stops = body.get("stop")
    return understand(
        messages,
        has_tools="tools" in body,
        images=images,
        limit=body.get("max_tokens"),
        stops=[stops] if isinstance(stops, str) else stops,
    )


async def chat_backend(call: StubCall) -> None:
    """Speaks chat completions alone. Its calls are numbered from 1 and skip, as some gateways do (P-11)."""
    if call.path != b"/v1/chat/completions":
        await call.write(whole_answer(b"no such page", status=b"404 Not Found", kind=b"text/plain"))
        return
    reasoning, texts, calls, finish = chat_understands(call.json)
    finish = "stop" if finish == "met" else finish
    count = call.json.get("n") or 1
    probable = {"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    logprobs = {"content": [probable], "refusal": None} if call.json.get("logprobs") else None
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
        choices = [
            {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}
            for index in range(count)
        ]
        answer = {"id": "x", "object": "chat.completion", "model": "real", "choices": choices}
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
    events = []
    for index in range(count):
        choice = {"index": index, "logprobs": logprobs, "finish_reason": None}
        events += [frame | {"choices": [choice | {"delta": delta}]} for delta in deltas]
        events.append(frame | {"choices": [choice | {"delta": {}, "finish_reason": finish}]})
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
        stops=body.get("stop_sequences"),
    )
    content: list[dict[str, Any]] = []
    if reasoning:
        content.append({"type": "thinking", "thinking": reasoning, "signature": "s"})
    content.append({"type": "text", "text": "".join(texts)})
    content += [
        {"type": "tool_use", "id": f"call_{n}", "name": "weather", "input": given}
        for n, given in enumerate(calls, 1)
    ]
    stop = {"stop": "end_turn", "met": "stop_sequence", "tool_calls": "tool_use", "length": "max_tokens"}[
        finish
    ]
    met = body["stop_sequences"][0] if finish == "met" else None
    head = {"id": "m", "type": "message", "role": "assistant", "model": "real"}
    if not body.get("stream"):
        answer = head | {"content": content, "stop_reason": stop, "stop_sequence": met}
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
        {
            "type": "message_delta",
            "delta": {"stop_reason": stop, "stop_sequence": met},
            "usage": {"output_tokens": 2},
        },
        {"type": "message_stop"},
    ]
    await call.start_events()
    for event in events:
        data = json.dumps(event, ensure_ascii=False).encode()
        await call.chunk(b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n")
    await call.end_chunks()


async def responses_backend(call: StubCall) -> None:
    """Speaks responses alone. Its reasoning comes as a summary, and a call's arguments in one piece."""
    if call.path != b"/v1/responses":
        await call.write(whole_answer(b"no such page", status=b"404 Not Found", kind=b"text/plain"))
        return
    body = call.json
    items = body["input"]
    assert body.get("instructions", items[0].get("content")) == "Be brief."
    told = []
    images = 0
    for item in items:
        if item.get("type") == "function_call_output":
            told.append({"role": "tool", "content": _text(item["output"])})
        elif item.get("role") == "user":
            content = item["content"]
            told.append({"role": "user", "content": _text(content)})
            images += sum(part["type"] == "input_image" for part in content if isinstance(part, dict))
    reasoning, texts, calls, finish = understand(
        told, has_tools="tools" in body, images=images, limit=body.get("max_output_tokens")
    )
    output: list[dict[str, Any]] = []
    if reasoning:
        summary = [{"type": "summary_text", "text": reasoning}]
        output.append({"type": "reasoning", "id": "rs", "summary": summary, "content": []})
    text: dict[str, Any] = {"type": "output_text", "text": "".join(texts), "annotations": []}
    scores = [{"token": "x", "logprob": -0.5, "bytes": [], "top_logprobs": []}]
    if "message.output_text.logprobs" not in (body.get("include") or ()):
        scores = []
    text["logprobs"] = scores
    output.append(
        {"type": "message", "id": "o", "role": "assistant", "status": "completed", "content": [text]}
    )
    output += [
        {
            "type": "function_call",
            "id": f"fc_{n}",
            "call_id": f"call_{n}",
            "name": "weather",
            "arguments": json.dumps(given),
            "status": "completed",
        }
        for n, given in enumerate(calls, 1)
    ]
    is_short = finish == "length"
    response = {
        "id": "r",
        "object": "response",
        "created_at": 1,
        "model": "real",
        "status": "incomplete" if is_short else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_short else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 3,
            "output_tokens": 2,
            "total_tokens": 5,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }
    if not body.get("stream"):
        await call.write(whole_answer(json.dumps(response).encode()))
        return
    begun = response | {"status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(output):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {
            "reasoning": {"summary": []},
            "message": {"content": []},
            "function_call": {"arguments": ""},
        }
        added = item | empty[item["type"]]
        events.append({"type": "response.output_item.added", "output_index": index, "item": added})
        if item["type"] == "reasoning":
            delta = {"type": "response.reasoning_summary_text.delta", "summary_index": 0, "delta": reasoning}
            events.append(place | delta)
        elif item["type"] == "message":
            part = {"content_index": 0, **place}
            events.append({"type": "response.content_part.added", **part, "part": text | {"text": ""}})
            events += [
                {"type": "response.output_text.delta", **part, "delta": piece, "logprobs": scores}
                for piece in texts
            ]
            events.append(
                {"type": "response.output_text.done", **part, "text": text["text"], "logprobs": scores}
            )
        else:
            done = {"type": "response.function_call_arguments.done", "arguments": item["arguments"]}
            events.append(place | done | {"name": item["name"]})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    await call.start_events()
    for number, event in enumerate(events):
        data = json.dumps(event | {"sequence_number": number}, ensure_ascii=False).encode()
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
        stops=(body.get("options") or {}).get("stop"),
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
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


BACKENDS: dict[str, Callable[[StubCall], Awaitable[None]]] = {
    "chat": chat_backend,
    "messages": messages_backend,
    "responses": responses_backend,
    "run": ollama_backend,
}
