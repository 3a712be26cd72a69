"""A chat completions request as an OpenAI responses request (SF-01, SF-10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from iop.api.http.convert.losses import Losses, invalid, items_of, object_of, text_of
from iop.api.http.convert.scores import RESPONSES_INCLUDE

__all__ = ["chat_to_responses"]

_SAME: Final = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "stream",
        "parallel_tool_calls",
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    }
)
_REFUSED: Final[Mapping[str, Any]] = {
    "n": 1,
    "stop": [],
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "seed": None,
    "audio": None,
    "prediction": None,
    "functions": None,
    "function_call": None,
    "web_search_options": None,
    "modalities": ["text"],
}
"""What responses cannot say, each with the value that says what is so anyway."""


def chat_to_responses(body: Mapping[str, Any], losses: Losses) -> dict[str, Any]:
    """Convert a body. Members that chats do not know pass as they are: the provider judges.

    Raises:
        InvalidRequest: a field is of the wrong kind, or responses cannot say it; it is named.
    """
    out: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in ("messages", "max_tokens", "max_completion_tokens"):
            continue
        if name in _SAME:
            out[name] = value
        elif name in _REFUSED:
            if value != _REFUSED[name]:
                losses.refuse(name)
        elif name in _MEMBERS:
            _MEMBERS[name](value, out, losses)
        else:
            out[name] = value
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    if limit is not None:
        out["max_output_tokens"] = limit
    out.setdefault("store", False)  # a chat is not kept unless it asks for that; a response would be
    items: list[dict[str, Any]] = []
    for index, message in enumerate(items_of(body.get("messages"), "messages")):
        where = f"messages[{index}]"
        _message(object_of(message, where), where, items, losses)
    out["input"] = items
    return out


def _message(message: Mapping[str, Any], where: str, items: list[dict[str, Any]], losses: Losses) -> None:
    match message.get("role"):
        case "system" | "developer" | "user" as role:
            content = _content(message.get("content"), f"{where}.content", losses)
            items.append({"type": "message", "role": role, "content": content})
        case "assistant":
            _assistant(message, where, items, losses)
        case "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": text_of(message.get("tool_call_id"), f"{where}.tool_call_id"),
                    "output": _content(message.get("content"), f"{where}.content", losses),
                }
            )
        case "function":
            losses.refuse(f"{where}.role")
        case _:
            raise invalid(f"{where}.role", "must be system, developer, user, assistant or tool")


def _assistant(message: Mapping[str, Any], where: str, items: list[dict[str, Any]], losses: Losses) -> None:
    """Its reasoning, its text and its calls: items of their own, in this order."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought:
        part = {"type": "reasoning_text", "text": text_of(thought, f"{where}.reasoning_content")}
        items.append({"type": "reasoning", "id": f"rs_{len(items)}", "summary": [], "content": [part]})
    if message.get("audio") is not None:
        losses.refuse(f"{where}.audio")
    if message.get("function_call") is not None:
        losses.refuse(f"{where}.function_call")
    content = _content(message.get("content"), f"{where}.content", losses)
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    if refusal := message.get("refusal"):
        text += text_of(refusal, f"{where}.refusal")
    if text:
        items.append({"type": "message", "role": "assistant", "content": text})
    calls = message.get("tool_calls")
    for number, call in enumerate(items_of(calls, f"{where}.tool_calls") if calls is not None else ()):
        here = f"{where}.tool_calls[{number}]"
        function = object_of(object_of(call, here).get("function"), f"{here}.function")
        items.append(
            {
                "type": "function_call",
                "call_id": text_of(call.get("id"), f"{here}.id"),
                "name": text_of(function.get("name"), f"{here}.function.name"),
                "arguments": text_of(function.get("arguments"), f"{here}.function.arguments") or "{}",
            }
        )


def _content(content: Any, where: str, losses: Losses) -> Any:
    """Content as text, or as a list of parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for number, given in enumerate(items_of(content, where)):
        here = f"{where}[{number}]"
        part = object_of(given, here)
        match part.get("type"):
            case "text":
                parts.append({"type": "input_text", "text": text_of(part.get("text"), f"{here}.text")})
            case "refusal":
                parts.append({"type": "input_text", "text": text_of(part.get("refusal"), f"{here}.refusal")})
            case "image_url":
                image = object_of(part.get("image_url"), f"{here}.image_url")
                url = text_of(image.get("url"), f"{here}.image_url.url")
                parts.append(
                    {"type": "input_image", "image_url": url, "detail": image.get("detail") or "auto"}
                )
            case "file":
                file = object_of(part.get("file"), f"{here}.file")
                parts.append({"type": "input_file", **file})
            case kind:
                losses.refuse(f"{here}.type", str(kind)[:100])
    return parts


# ---- members ----


def _tools(value: Any, out: dict[str, Any], losses: Losses) -> None:
    tools = []
    for index, given in enumerate(items_of(value, "tools")):
        where = f"tools[{index}]"
        tool = object_of(given, where)
        if tool.get("type") != "function":
            losses.refuse(f"{where}.type", str(tool.get("type"))[:100])
            continue
        function = object_of(tool.get("function"), f"{where}.function")
        made: dict[str, Any] = {
            "type": "function",
            "name": text_of(function.get("name"), f"{where}.function.name"),
            # Chats are loose unless they say otherwise; responses are strict.
            "strict": function.get("strict") or False,
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        }
        if function.get("description") is not None:
            made["description"] = function["description"]
        tools.append(made)
    if tools:
        out["tools"] = tools


def _tool_choice(value: Any, out: dict[str, Any], losses: Losses) -> None:
    if isinstance(value, str):
        out["tool_choice"] = value
        return
    choice = object_of(value, "tool_choice")
    if choice.get("type") != "function":
        losses.refuse("tool_choice.type", str(choice.get("type"))[:100])
        return
    function = object_of(choice.get("function"), "tool_choice.function")
    name = text_of(function.get("name"), "tool_choice.function.name")
    out["tool_choice"] = {"type": "function", "name": name}


def _effort(value: Any, out: dict[str, Any], _losses: Losses) -> None:
    out["reasoning"] = {"effort": value}


def _verbosity(value: Any, out: dict[str, Any], _losses: Losses) -> None:
    out.setdefault("text", {})["verbosity"] = value


def _format(value: Any, out: dict[str, Any], _losses: Losses) -> None:
    wanted = object_of(value, "response_format")
    made = dict(wanted)
    if wanted.get("type") == "json_schema":
        schema = object_of(wanted.get("json_schema"), "response_format.json_schema")
        made = {"type": "json_schema", **schema}
    out.setdefault("text", {})["format"] = made


def _stream_options(value: Any, _out: dict[str, Any], losses: Losses) -> None:
    """The usage chunk is made here: a response always tells its counts."""
    for name in object_of(value, "stream_options"):
        if name != "include_usage":
            losses.note(f"stream_options.{name}")


def _logprobs(value: Any, out: dict[str, Any], _losses: Losses) -> None:
    if value is not False:
        out["include"] = [RESPONSES_INCLUDE]


def _top_logprobs(value: Any, out: dict[str, Any], _losses: Losses) -> None:
    if value != 0:
        out["top_logprobs"] = value


_MEMBERS: Final = {
    "tools": _tools,
    "tool_choice": _tool_choice,
    "reasoning_effort": _effort,
    "verbosity": _verbosity,
    "response_format": _format,
    "stream_options": _stream_options,
    "logprobs": _logprobs,
    "top_logprobs": _top_logprobs,
}
