"""A run as an Ollama chat request, and Ollama's answer lines as run events. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from iop.adapters import text_tools
from iop.adapters.chat_input import (
    read_body,
    read_messages,
    read_number,
    read_parts,
    read_stops,
    read_text,
    read_tools,
)
from iop.core.errors import InvalidRequest, RemoteProtocolError
from iop.wire.messages import RunEvent, RunEventType, RunRequest, StreamError, StreamErrorCode, Usage

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Longest answer line; the last one of a large answer with tool calls is some kilobytes."""

_OPTIONS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
}
_WHOLE_OPTIONS: Final = {"top_k": "top_k", "seed": "seed"}
"""Sampling only. Options that concern loading (context size, threads, GPU layers) reload the model for
everybody when they differ, so they are never taken from a caller."""

_UNSUPPORTED: Final = (
    "logprobs",
    "logit_bias",
    "functions",
    "function_call",
    "audio",
    "echo",
    "suffix",
    "web_search_options",
)
"""Fields that change the answer and that this backend has no words for."""


def chat_request(run: RunRequest, *, keep_alive: str, is_fallback: bool) -> bytes:
    """The body of ``POST /api/chat``.

    Args:
        run: its input is a chat body or plain text.
        keep_alive: how long the model stays loaded; empty: the server's own.
        is_fallback: tell the tools in words, since the model refused them (EN-66).

    Raises:
        InvalidRequest: a field cannot be said to this backend.
    """
    body = read_body(run.input)
    if body is None:
        body = {"messages": [{"role": "user", "content": read_text(run.input)}]}
    elif "messages" not in body:
        prompt = body["prompt"]
        if not isinstance(prompt, str):
            raise InvalidRequest("prompt: this backend takes one text", reason="UNSUPPORTED_FIELD")
        body = {**body, "messages": [{"role": "user", "content": prompt}]}
    for name in _UNSUPPORTED:
        if body.get(name):
            raise InvalidRequest(f"{name}: not offered by this backend", reason="UNSUPPORTED_FIELD")
    for name in ("n", "best_of"):
        if read_number(body, name, whole=True) not in {None, 1}:
            raise InvalidRequest(f"{name}: this backend gives one choice", reason="UNSUPPORTED_FIELD")
    if body.get("modalities") not in (None, [], ["text"]):
        raise InvalidRequest("modalities: this backend answers in text", reason="UNSUPPORTED_FIELD")
    messages = read_messages(body)
    tools = read_tools(body)
    request: dict[str, Any] = {"model": run.target, "stream": True, "options": _options(body)}
    if tools and is_fallback:
        messages = text_tools.with_instruction(
            messages, text_tools.instruction(tools, body.get("tool_choice"))
        )
    elif tools:
        if body.get("tool_choice") not in (None, "auto"):
            raise InvalidRequest(
                "tool_choice: this backend lets the model choose", reason="UNSUPPORTED_FIELD"
            )
        request["tools"] = tools
    request["messages"] = _messages(messages)
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_object":
        request["format"] = "json"
    elif isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        request["format"] = (wanted.get("json_schema") or {}).get("schema") or {}
    if keep_alive:
        request["keep_alive"] = int(keep_alive) if keep_alive.lstrip("-").isdigit() else keep_alive
    return msgspec.json.encode(request)


def has_tools(run: RunRequest) -> bool:
    """Whether the run offers tools at all. Raises InvalidRequest."""
    body = read_body(run.input)
    return body is not None and bool(read_tools(body))


def refuses_tools(status: int, text: str) -> bool:
    """Whether an error answer says that this model takes no tools."""
    return status == 400 and "does not support tools" in text


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, theirs in _OPTIONS.items():
        value = read_number(body, name)
        if value is not None:
            options[theirs] = value
    for name, theirs in _WHOLE_OPTIONS.items():
        value = read_number(body, name, whole=True)
        if value is not None:
            options[theirs] = value
    limit = read_number(body, "max_completion_tokens", whole=True)
    limit = limit if limit is not None else read_number(body, "max_tokens", whole=True)
    if limit is not None:
        if not 0 < limit < 2**31:
            raise InvalidRequest("max_tokens: out of range", reason="BAD_INPUT")
        options["num_predict"] = limit
    stops = read_stops(body)
    if stops:
        options["stop"] = stops
    return options


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages in Ollama's form: text and images apart, arguments as objects, results by function
    name.
    """
    names: dict[str, str] = {}
    told: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        text, images = read_parts(message.get("content"), f"messages[{index}]")
        role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
        one: dict[str, Any] = {"role": role, "content": text}
        if images:
            one["images"] = [_image(url, index) for url in images]
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            one["tool_calls"] = [_call(call, names) for call in calls]
        if role == "tool":
            call_id = message.get("tool_call_id")
            name = message.get("name") or names.get(call_id if isinstance(call_id, str) else "")
            if name:
                one["tool_name"] = name
        told.append(one)
    return told


def _call(call: object, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise InvalidRequest("messages: a tool call must name its function", reason="BAD_INPUT")
    if isinstance(call.get("id"), str):
        names[call["id"]] = function["name"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise InvalidRequest(
                "messages: a tool call's arguments are not JSON", reason="BAD_INPUT"
            ) from exc
    return {"function": {"name": function["name"], "arguments": arguments}}


def _image(url: str, index: int) -> str:
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise InvalidRequest(
            f"messages[{index}].content: this backend takes images as base64 data URLs",
            reason="UNSUPPORTED_FIELD",
        )
    return data


# ---- the answer ----


class _Function(msgspec.Struct):
    name: str = ""
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    content: str = ""
    thinking: str = ""
    tool_calls: list[_ToolCall] = []


class _Line(msgspec.Struct):
    message: _Message | None = None
    done: bool = False
    done_reason: str = ""
    error: str = ""
    prompt_eval_count: int | None = None
    eval_count: int | None = None


_DECODER: Final = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class AnswerReader:
    """Cuts an answer into lines and turns them into events; the terminal one is its last.

    Attributes:
        is_fallback: tools were told in words; the completing event says so.
    """

    is_fallback: bool
    is_over: bool = False
    _rest: bytes = b""
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def feed(self, data: bytes) -> list[RunEvent]:
        """Take bytes as they come. Raises RemoteProtocolError on what is no answer."""
        events: list[RunEvent] = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise RemoteProtocolError("the backend sent an endless line", reason="LINE_TOO_LONG")
        for line in lines:
            if line.strip() and not self.is_over:
                events += self._read(line)
        return events

    def finish(self) -> list[RunEvent]:
        """The answer's bytes are all here: what is missing makes it truncated."""
        events = self._read(self._rest) if self._rest.strip() and not self.is_over else []
        if not self.is_over:
            self.is_over = True
            error = StreamError(
                code=StreamErrorCode.UPSTREAM_TRUNCATED,
                message="the backend ended without finishing its answer",
            )
            events.append(RunEvent(type=RunEventType.ERROR, error=error))
        return events

    def _read(self, raw: bytes) -> list[RunEvent]:
        try:
            line = _DECODER.decode(raw)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as exc:
            raise RemoteProtocolError(
                "the backend's answer is not a line of JSON", reason="BAD_LINE"
            ) from exc
        if line.error:
            self.is_over = True
            error = StreamError(code=StreamErrorCode.UPSTREAM_ERROR, message=f"engine: {line.error[:512]}")
            return [RunEvent(type=RunEventType.ERROR, error=error)]
        events: list[RunEvent] = []
        message = line.message
        if message is not None:
            if message.content or message.thinking:
                events.append(
                    RunEvent(type=RunEventType.DELTA, delta=message.content, reasoning_delta=message.thinking)
                )
            for call in message.tool_calls:
                self._calls.append(self._openai_call(call))
        if line.done:
            self.is_over = True
            events.append(self._complete(line))
        return events

    def _openai_call(self, call: _ToolCall) -> dict[str, Any]:
        arguments = call.function.arguments
        return {
            "id": call.id or f"call_{len(self._calls)}",
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": arguments
                if isinstance(arguments, str)
                else msgspec.json.encode(arguments or {}).decode(),
            },
        }

    def _complete(self, line: _Line) -> RunEvent:
        metadata: dict[str, str] = {}
        if self._calls:
            metadata[text_tools.TOOL_CALLS_KEY] = msgspec.json.encode(self._calls).decode()
        if self.is_fallback:
            metadata[text_tools.FALLBACK_MARK] = "true"
        reason = "tool_calls" if self._calls else "length" if line.done_reason == "length" else "stop"
        return RunEvent(
            type=RunEventType.COMPLETE,
            metadata=metadata,
            finish_reasons=(reason,),
            usage=Usage(prompt_tokens=line.prompt_eval_count, completion_tokens=line.eval_count),
        )
