"""The three official ways to talk, behind one face: what is asked, and what was made of the answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anthropic
import openai

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@dataclass
class Ask:
    """One question in no dialect's words."""

    text: str
    with_tools: bool = False
    with_image: bool = False
    results: tuple[str, ...] = ()
    """Answers to the two calls of the turn before."""
    max_tokens: int = 64


@dataclass
class Said:
    """One answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stop: str = ""
    tokens: tuple[int, int] | None = None
    model: str = ""
    request_id: str | None = None


CALLS = [("call_1", {"city": "Paris"}), ("call_2", {"city": "Rome"})]


class Chat:
    """Chat completions by ``openai``."""

    errors = openai

    def clients(self, url: str, **more: Any) -> tuple[openai.OpenAI, openai.AsyncOpenAI]:
        options: dict[str, Any] = {"base_url": url, "api_key": "k", "max_retries": 0, **more}
        return openai.OpenAI(**options), openai.AsyncOpenAI(**options)

    def client(self, url: str, *, is_sync: bool) -> Any:
        return (openai.OpenAI if is_sync else openai.AsyncOpenAI)(base_url=url, api_key="k", max_retries=0)

    def call(self, client: Any) -> Any:
        return client.chat.completions.create

    def params(self, ask: Ask) -> dict[str, Any]:
        content: Any = ask.text
        if ask.with_image:
            image = {"url": f"data:image/png;base64,{PIXEL}"}
            content = [{"type": "text", "text": ask.text}, {"type": "image_url", "image_url": image}]
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": content},
        ]
        if ask.results:
            calls = [
                {"id": i, "type": "function", "function": {"name": "weather", "arguments": json.dumps(a)}}
                for i, a in CALLS
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": i, "content": r}
                for (i, _), r in zip(CALLS, ask.results, strict=True)
            ]
        params: dict[str, Any] = {"model": "fast", "messages": messages, "max_tokens": ask.max_tokens}
        if ask.with_tools:
            function = {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}
            params["tools"] = [{"type": "function", "function": function}]
        return params

    def stream_params(self) -> dict[str, Any]:
        return {"stream": True, "stream_options": {"include_usage": True}}

    def whole(self, answer: Any) -> Said:
        choice = answer.choices[0]
        return Said(
            text=choice.message.content or "",
            reasoning=(choice.message.model_extra or {}).get("reasoning_content", ""),
            calls=[
                (c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or ()
            ],
            stop=choice.finish_reason,
            tokens=answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens),
            model=answer.model,
        )

    def streamed(self, events: list[Any]) -> Said:
        said = Said()
        calls: dict[int, list[str]] = {}
        for chunk in events:
            said.model = chunk.model
            if chunk.usage is not None:
                assert chunk.choices == []
                said.tokens = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
            for choice in chunk.choices:
                said.text += choice.delta.content or ""
                said.reasoning += (choice.delta.model_extra or {}).get("reasoning_content", "")
                for call in choice.delta.tool_calls or ():
                    if call.index not in calls:
                        calls[call.index] = [call.function.name, ""]
                    calls[call.index][1] += call.function.arguments or ""
                said.stop = choice.finish_reason or said.stop
        said.calls = [(name, json.loads(arguments)) for name, arguments in calls.values()]
        return said


class Responses:
    """Responses by ``openai``."""

    errors = openai
    clients = Chat.clients
    client = Chat.client

    def call(self, client: Any) -> Any:
        return client.responses.create

    def params(self, ask: Ask) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "input_text", "text": ask.text}]
        if ask.with_image:
            content.append({"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"})
        items: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if ask.results:
            items += [
                {"type": "function_call", "call_id": i, "name": "weather", "arguments": json.dumps(a)}
                for i, a in CALLS
            ]
            items += [
                {"type": "function_call_output", "call_id": i, "output": r}
                for (i, _), r in zip(CALLS, ask.results, strict=True)
            ]
        params: dict[str, Any] = {
            "model": "fast",
            "instructions": "Be brief.",
            "input": items,
            "max_output_tokens": ask.max_tokens,
        }
        if ask.with_tools:
            params["tools"] = [
                {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
            ]
        return params

    def stream_params(self) -> dict[str, Any]:
        return {"stream": True}

    def whole(self, answer: Any) -> Said:
        said = Said(text=answer.output_text, model=answer.model)
        for item in answer.output:
            if item.type == "function_call":
                said.calls.append((item.name, json.loads(item.arguments)))
            elif item.type == "reasoning":
                said.reasoning += "".join(part.text for part in item.content or item.summary)
        said.stop = "tool_calls" if said.calls else "stop"
        if answer.status == "incomplete":
            assert answer.incomplete_details.reason == "max_output_tokens"
            said.stop = "length"
        said.tokens = answer.usage and (answer.usage.input_tokens, answer.usage.output_tokens)
        return said

    def streamed(self, events: list[Any]) -> Said:
        assert [event.sequence_number for event in events] == list(range(len(events)))
        said = self.whole(events[-1].response)
        deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert deltas == said.text
        return said


class Messages:
    """Messages by ``anthropic``."""

    errors = anthropic

    def clients(self, url: str, **more: Any) -> tuple[anthropic.Anthropic, anthropic.AsyncAnthropic]:
        options: dict[str, Any] = {
            "base_url": url.removesuffix("/v1"),
            "api_key": "k",
            "max_retries": 0,
            **more,
        }
        return anthropic.Anthropic(**options), anthropic.AsyncAnthropic(**options)

    def client(self, url: str, *, is_sync: bool) -> Any:
        kind = anthropic.Anthropic if is_sync else anthropic.AsyncAnthropic
        return kind(base_url=url.removesuffix("/v1"), api_key="k", max_retries=0)

    def call(self, client: Any) -> Any:
        return client.messages.create

    def params(self, ask: Ask) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": ask.text}]
        if ask.with_image:
            source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
            content.append({"type": "image", "source": source})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if ask.results:
            uses = [{"type": "tool_use", "id": i, "name": "weather", "input": a} for i, a in CALLS]
            messages.append({"role": "assistant", "content": uses})
            results = [
                {"type": "tool_result", "tool_use_id": i, "content": r}
                for (i, _), r in zip(CALLS, ask.results, strict=True)
            ]
            messages.append({"role": "user", "content": results})
        params: dict[str, Any] = {
            "model": "fast",
            "system": "Be brief.",
            "messages": messages,
            "max_tokens": ask.max_tokens,
        }
        if ask.with_tools:
            params["tools"] = [{"name": "weather", "input_schema": PARAMETERS}]
        return params

    def stream_params(self) -> dict[str, Any]:
        return {"stream": True}

    STOPS: ClassVar = {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "tool_use": "tool_calls",
        "max_tokens": "length",
    }

    def whole(self, answer: Any) -> Said:
        said = Said(model=answer.model, stop=self.STOPS[answer.stop_reason])
        for block in answer.content:
            if block.type == "text":
                said.text += block.text
            elif block.type == "thinking":
                said.reasoning += block.thinking
            else:
                said.calls.append((block.name, block.input))
        said.tokens = (answer.usage.input_tokens, answer.usage.output_tokens)
        return said

    def streamed(self, events: list[Any]) -> Said:
        said = Said()
        inputs: dict[int, list[str]] = {}
        for event in events:
            if event.type == "message_start":
                said.model = event.message.model
                said.tokens = (event.message.usage.input_tokens, 0)
            elif event.type == "content_block_start" and event.content_block.type == "tool_use":
                inputs[event.index] = [event.content_block.name, ""]
            elif event.type == "content_block_delta":
                match event.delta.type:
                    case "text_delta":
                        said.text += event.delta.text
                    case "thinking_delta":
                        said.reasoning += event.delta.thinking
                    case "input_json_delta":
                        inputs[event.index][1] += event.delta.partial_json
            elif event.type == "message_delta":
                said.stop = self.STOPS[event.delta.stop_reason]
                prompt = said.tokens[0] if event.usage.input_tokens is None else event.usage.input_tokens
                said.tokens = (prompt, event.usage.output_tokens)
        assert events[-1].type == "message_stop"
        said.calls = [(name, json.loads(text)) for name, text in inputs.values()]
        return said


TALKS: dict[str, Any] = {"chat": Chat(), "responses": Responses(), "messages": Messages()}


async def say(talk: Any, url: str, ask: Ask, *, is_stream: bool, is_sync: bool) -> Said:
    """Ask by the official client; what it gives back, in no dialect's words."""
    sync_client, async_client = talk.clients(url)
    params = talk.params(ask) | (talk.stream_params() if is_stream else {})
    if is_sync:

        def run() -> Any:
            answer = talk.call(sync_client)(**params)
            return list(answer) if is_stream else answer

        try:
            answer = await asyncio.to_thread(run)
        finally:
            sync_client.close()
            await async_client.close()
    else:
        sync_client.close()
        async with async_client:
            answer = await talk.call(async_client)(**params)
            if is_stream:
                answer = [event async for event in answer]
    return talk.streamed(answer) if is_stream else talk.whole(answer)
