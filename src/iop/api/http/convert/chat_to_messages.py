"""A chat completions request as an Anthropic messages request (SF-01, SF-10, P-17)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from iop.api.http.convert.losses import Losses, invalid, items_of, object_of, text_of
from iop.api.http.convert.numbers import load_text

__all__ = ["MAX_TOKENS_DEFAULT", "chat_to_messages"]

MAX_TOKENS_DEFAULT: Final = 4096
"""The messages dialect demands a limit; chats that name none get this one."""

_DATA_URL: Final = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)
_SAME: Final = frozenset({"model", "top_p", "stream"})
_HINTS: Final = frozenset(
    {"stream_options", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
)
_REFUSED: Final = frozenset(
    {
        "n",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "audio",
        "prediction",
        "store",
        "functions",
        "function_call",
        "web_search_options",
        "verbosity",
        "metadata",
    }
)
_NEUTRAL: Final[Mapping[str, Any]] = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "store": False,
    "metadata": {},
}
"""Values that say what is so anyway."""


def chat_to_messages(body: Mapping[str, Any], losses: Losses) -> dict[str, Any]:
    """Convert a body. Members that chats do not know pass as they are: the provider judges.

    Raises:
        InvalidRequest: a field is of the wrong kind, or messages cannot say it; it is named.
    """
    out: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in _SAME:
            out[name] = value
        elif name in _HINTS:
            if name != "stream_options":  # its usage chunk is made here
                losses.note(name)
        elif name in _REFUSED:
            if name not in _NEUTRAL or value != _NEUTRAL[name]:
                losses.refuse(name)
        elif name in _MEMBERS:
            _MEMBERS[name](value, out, losses)
        elif name not in ("messages", "max_tokens", "max_completion_tokens", "parallel_tool_calls"):
            out[name] = value
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    out["max_tokens"] = MAX_TOKENS_DEFAULT if limit is None else limit
    if body.get("parallel_tool_calls") is False and "tools" in out:
        out.setdefault("tool_choice", {"type": "auto"})["disable_parallel_tool_use"] = True
    system: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(items_of(body.get("messages"), "messages")):
        where = f"messages[{index}]"
        _message(object_of(message, where), where, system, messages, losses)
    if system:
        out["system"] = system
    out["messages"] = messages
    return out


def _message(
    message: Mapping[str, Any],
    where: str,
    system: list[dict[str, Any]],
    out: list[dict[str, Any]],
    losses: Losses,
) -> None:
    match message.get("role"):
        case "system" | "developer":
            if out:
                losses.refuse(f"{where}.role", "a system message after the first turn")
            for part in _parts(message.get("content"), f"{where}.content", losses):
                if part["type"] != "text":
                    losses.refuse(f"{where}.content")
                    continue
                system.append(part)
        case "user":
            parts = _parts(message.get("content"), f"{where}.content", losses)
            if not parts:
                raise invalid(f"{where}.content", "is empty, which this model's provider cannot be told")
            if out and out[-1]["role"] == "user" and out[-1]["content"][-1]["type"] == "tool_result":
                out[-1]["content"] += parts  # one turn: the results, then what the user adds
            else:
                out.append({"role": "user", "content": parts})
        case "assistant":
            if blocks := _assistant(message, where, losses):
                out.append({"role": "assistant", "content": blocks})
        case "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": text_of(message.get("tool_call_id"), f"{where}.tool_call_id"),
                "content": _parts(message.get("content"), f"{where}.content", losses),
            }
            last = out[-1] if out else None
            if last is not None and last["role"] == "user" and last["content"][-1]["type"] == "tool_result":
                last["content"].append(result)
            else:
                out.append({"role": "user", "content": [result]})
        case "function":
            losses.refuse(f"{where}.role")
        case _:
            raise invalid(f"{where}.role", "must be system, developer, user, assistant or tool")


def _assistant(message: Mapping[str, Any], where: str, losses: Losses) -> list[dict[str, Any]]:
    blocks = _parts(message.get("content"), f"{where}.content", losses)
    if message.get("reasoning_content") or message.get("reasoning"):
        losses.note("messages.reasoning_content")  # it would need a signature, which chats do not carry
    if refusal := message.get("refusal"):
        blocks.append({"type": "text", "text": text_of(refusal, f"{where}.refusal")})
    if message.get("audio") is not None:
        losses.refuse(f"{where}.audio")
    if message.get("function_call") is not None:
        losses.refuse(f"{where}.function_call")
    calls = message.get("tool_calls")
    for number, call in enumerate(items_of(calls, f"{where}.tool_calls") if calls is not None else ()):
        here = f"{where}.tool_calls[{number}]"
        function = object_of(object_of(call, here).get("function"), f"{here}.function")
        arguments = text_of(function.get("arguments"), f"{here}.function.arguments")
        try:
            given = load_text(arguments or "{}")
        except ValueError:
            raise invalid(f"{here}.function.arguments", "must be JSON") from None
        blocks.append(
            {
                "type": "tool_use",
                "id": text_of(call.get("id"), f"{here}.id"),
                "name": text_of(function.get("name"), f"{here}.function.name"),
                "input": object_of(given, f"{here}.function.arguments"),
            }
        )
    return blocks


def _parts(content: Any, where: str, losses: Losses) -> list[dict[str, Any]]:
    """Content as blocks; empty texts and null are no blocks."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks: list[dict[str, Any]] = []
    for number, given in enumerate(items_of(content, where)):
        here = f"{where}[{number}]"
        part = object_of(given, here)
        match part.get("type"):
            case "text":
                if text := text_of(part.get("text"), f"{here}.text"):
                    blocks.append({"type": "text", "text": text})
            case "refusal":
                if text := text_of(part.get("refusal"), f"{here}.refusal"):
                    blocks.append({"type": "text", "text": text})
            case "image_url":
                image = object_of(part.get("image_url"), f"{here}.image_url")
                if image.get("detail") not in (None, "auto"):
                    losses.note(f"{here}.image_url.detail")
                blocks.append(_image(text_of(image.get("url"), f"{here}.image_url.url")))
            case kind:
                losses.refuse(f"{here}.type", str(kind)[:100])
    return blocks


def _image(url: str) -> dict[str, Any]:
    match = _DATA_URL.fullmatch(url)
    if match is None:
        return {"type": "image", "source": {"type": "url", "url": url}}
    source = {"type": "base64", "media_type": match[1], "data": match[2]}
    return {"type": "image", "source": source}


# ---- members ----


def _temperature(value: Any, out: dict[str, Any], losses: Losses) -> None:
    if isinstance(value, (int, float)) and value > 1:
        losses.refuse("temperature", "it may be at most 1 there")
    else:
        out["temperature"] = value


def _stop(value: Any, out: dict[str, Any], _losses: Losses) -> None:
    stops = [value] if isinstance(value, str) else items_of(value, "stop")
    if stops:
        out["stop_sequences"] = stops


def _user(value: Any, out: dict[str, Any], _losses: Losses) -> None:
    out["metadata"] = {"user_id": value}


def _tools(value: Any, out: dict[str, Any], losses: Losses) -> None:
    tools = []
    for index, tool in enumerate(items_of(value, "tools")):
        where = f"tools[{index}]"
        if object_of(tool, where).get("type") != "function":
            losses.refuse(f"{where}.type", str(tool.get("type"))[:100])
            continue
        function = object_of(tool.get("function"), f"{where}.function")
        made: dict[str, Any] = {"name": text_of(function.get("name"), f"{where}.function.name")}
        for name in ("description", "strict"):
            if function.get(name) is not None:
                made[name] = function[name]
        parameters = function.get("parameters")
        made["input_schema"] = {"type": "object", "properties": {}} if parameters is None else parameters
        tools.append(made)
    if tools:
        out["tools"] = tools


def _tool_choice(value: Any, out: dict[str, Any], losses: Losses) -> None:
    if isinstance(value, str):
        known = {"auto": "auto", "required": "any", "none": "none"}
        if value not in known:
            raise invalid("tool_choice", "must be auto, required, none or a function")
        out["tool_choice"] = {"type": known[value]}
        return
    choice = object_of(value, "tool_choice")
    if choice.get("type") != "function":
        losses.refuse("tool_choice.type", str(choice.get("type"))[:100])
        return
    function = object_of(choice.get("function"), "tool_choice.function")
    name = text_of(function.get("name"), "tool_choice.function.name")
    out["tool_choice"] = {"type": "tool", "name": name}


def _effort(value: Any, out: dict[str, Any], losses: Losses) -> None:
    if value in ("low", "medium", "high", "max"):
        out.setdefault("output_config", {})["effort"] = value
    else:
        losses.refuse("reasoning_effort")


def _format(value: Any, out: dict[str, Any], losses: Losses) -> None:
    wanted = object_of(value, "response_format")
    if wanted.get("type") == "text":
        return
    if wanted.get("type") != "json_schema":
        losses.refuse("response_format.type", str(wanted.get("type"))[:100])
        return
    schema = object_of(wanted.get("json_schema"), "response_format.json_schema").get("schema")
    made = {"type": "json_schema", "schema": object_of(schema, "response_format.json_schema.schema")}
    out.setdefault("output_config", {})["format"] = made


def _modalities(value: Any, _out: dict[str, Any], losses: Losses) -> None:
    if value != ["text"]:
        losses.refuse("modalities")


def _tier(value: Any, _out: dict[str, Any], losses: Losses) -> None:
    if value != "auto":
        losses.refuse("service_tier")


_MEMBERS: Final = {
    "temperature": _temperature,
    "stop": _stop,
    "user": _user,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "reasoning_effort": _effort,
    "response_format": _format,
    "modalities": _modalities,
    "service_tier": _tier,
}
