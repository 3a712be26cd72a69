"""An Anthropic messages request as a chat completions request (SF-01, SF-10)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from iop.api.http.convert.losses import Losses, invalid, items_of, object_of, text_of

__all__ = ["messages_to_chat"]

_SAME: Final = frozenset({"model", "max_tokens", "temperature", "top_p", "stream"})
_HINTS: Final = frozenset({"betas", "cache_control"})
"""Top-level members that change cost or speed and never the answer."""

_REFUSED: Final = frozenset({"container", "mcp_servers", "context_management", "inference_geo"})


def messages_to_chat(body: Mapping[str, Any], losses: Losses) -> dict[str, Any]:
    """Convert a body. Members that the messages dialect does not know pass as they are: the provider judges.

    Raises:
        InvalidRequest: a field is of the wrong kind, or chats cannot say it; it is named.
    """
    chat: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in _SAME:
            chat[name] = value
        elif name in _HINTS:
            losses.note(name)
        elif name in _REFUSED:
            losses.refuse(name)
        elif name in _MEMBERS:
            _MEMBERS[name](value, chat, losses)
        elif name not in ("system", "messages"):
            chat[name] = value
    messages: list[dict[str, Any]] = []
    system = _system(body.get("system"), losses)
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(items_of(body.get("messages"), "messages")):
        where = f"messages[{index}]"
        _message(object_of(message, where), where, messages, losses)
    chat["messages"] = messages
    if chat.get("stream") is True:
        # A Messages stream always ends with its counts; chats tell them only when asked.
        chat["stream_options"] = {"include_usage": True}
    return chat


def _system(value: Any, losses: Losses) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    texts = []
    for index, given in enumerate(items_of(value, "system")):
        where = f"system[{index}]"
        block = object_of(given, where)
        _hints(block, where, losses)
        if block.get("type") != "text":
            raise invalid(f"{where}.type", "must be `text`")
        texts.append(text_of(block.get("text"), f"{where}.text"))
    return "\n\n".join(texts)


# ---- messages ----


def _message(message: Mapping[str, Any], where: str, out: list[dict[str, Any]], losses: Losses) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", "must be `user` or `assistant`")
    if isinstance(content, str):
        out.append({"role": role, "content": content})
        return
    blocks = [
        object_of(block, f"{where}.content[{number}]")
        for number, block in enumerate(items_of(content, f"{where}.content"))
    ]
    for number, block in enumerate(blocks):
        _hints(block, f"{where}.content[{number}]", losses)
    if role == "assistant":
        out.append(_assistant(blocks, where, losses))
    else:
        _user(str(role), blocks, where, out, losses)


def _assistant(blocks: list[Mapping[str, Any]], where: str, losses: Losses) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        here = f"{where}.content[{number}]"
        match block.get("type"):
            case "text":
                texts.append(text_of(block.get("text"), f"{here}.text"))
            case "thinking":
                thoughts.append(text_of(block.get("thinking"), f"{here}.thinking"))
                if block.get("signature"):
                    losses.note("messages.content.signature")
            case "tool_use":
                function = {
                    "name": text_of(block.get("name"), f"{here}.name"),
                    "arguments": json.dumps(object_of(block.get("input"), f"{here}.input")),
                }
                call_id = text_of(block.get("id"), f"{here}.id")
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                losses.refuse(f"{here}.type", str(block.get("type"))[:100])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    if not texts and not calls:
        message["content"] = ""
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(
    role: str, blocks: list[Mapping[str, Any]], where: str, out: list[dict[str, Any]], losses: Losses
) -> None:
    """Tool results become messages of their own; the pictures among them follow in the user's turn, since a
    chat's tool messages hold text only.
    """
    parts: list[dict[str, Any]] = []
    has_results = False
    for number, block in enumerate(blocks):
        here = f"{where}.content[{number}]"
        if block.get("type") == "tool_result":
            has_results = True
            out.append(_tool_result(block, here, parts, losses))
        else:
            _part(block, here, parts, losses)
    if len(parts) == 1 and parts[0]["type"] == "text":
        out.append({"role": role, "content": parts[0]["text"]})
    elif parts or not has_results:
        out.append({"role": role, "content": parts})


def _tool_result(
    block: Mapping[str, Any], where: str, images: list[dict[str, Any]], losses: Losses
) -> dict[str, Any]:
    content = block.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    else:
        parts: list[dict[str, Any]] = []
        for number, inner in enumerate(items_of(content, f"{where}.content")):
            here = f"{where}.content[{number}]"
            _hints(object_of(inner, here), here, losses)
            _part(inner, here, parts, losses)
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        images += [part for part in parts if part["type"] != "text"]
    if block.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}"  # a chat's tool message has no flag for it, so words say it
    call_id = text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _part(block: Mapping[str, Any], where: str, parts: list[dict[str, Any]], losses: Losses) -> None:
    match block.get("type"):
        case "text":
            parts.append({"type": "text", "text": text_of(block.get("text"), f"{where}.text")})
            if block.get("citations"):
                losses.refuse(f"{where}.citations")
        case "image":
            source = object_of(block.get("source"), f"{where}.source")
            if source.get("type") == "base64":
                kind = text_of(source.get("media_type"), f"{where}.source.media_type")
                url = f"data:{kind};base64,{text_of(source.get('data'), f'{where}.source.data')}"
            elif source.get("type") == "url":
                url = text_of(source.get("url"), f"{where}.source.url")
            else:
                losses.refuse(f"{where}.source.type", str(source.get("type"))[:100])
                return
            parts.append({"type": "image_url", "image_url": {"url": url}})
        case kind:
            losses.refuse(f"{where}.type", str(kind)[:100])


def _hints(block: Mapping[str, Any], where: str, losses: Losses) -> None:
    if block.get("cache_control") is not None:
        losses.note(f"{where}.cache_control")


# ---- members ----


def _stop(value: Any, chat: dict[str, Any], _losses: Losses) -> None:
    if items_of(value, "stop_sequences"):
        chat["stop"] = value


def _tools(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    tools = []
    for index, given in enumerate(items_of(value, "tools")):
        where = f"tools[{index}]"
        tool = object_of(given, where)
        if tool.get("type") not in (None, "custom"):
            losses.refuse(f"{where}.type", str(tool.get("type"))[:100])
            continue
        _hints(tool, where, losses)
        function: dict[str, Any] = {"name": text_of(tool.get("name"), f"{where}.name")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        function["parameters"] = object_of(tool.get("input_schema"), f"{where}.input_schema")
        if tool.get("strict") is not None:
            function["strict"] = tool["strict"]
        for hint in ("defer_loading", "eager_input_streaming", "input_examples", "allowed_callers"):
            if tool.get(hint):
                losses.note(f"{where}.{hint}")
        tools.append({"type": "function", "function": function})
    if tools:
        chat["tools"] = tools


def _tool_choice(value: Any, chat: dict[str, Any], _losses: Losses) -> None:
    choice = object_of(value, "tool_choice")
    match choice.get("type"):
        case "auto":
            chat["tool_choice"] = "auto"
        case "any":
            chat["tool_choice"] = "required"
        case "none":
            chat["tool_choice"] = "none"
        case "tool":
            name = text_of(choice.get("name"), "tool_choice.name")
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        case _:
            raise invalid("tool_choice.type", "must be auto, any, tool or none")
    if choice.get("disable_parallel_tool_use") is not None:
        chat["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]


def _metadata(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    for name, member in object_of(value, "metadata").items():
        if name == "user_id" and member is not None:
            chat["user"] = member
        elif member is not None:
            losses.refuse(f"metadata.{name}")


def _thinking(value: Any, _chat: dict[str, Any], losses: Losses) -> None:
    match object_of(value, "thinking").get("type"):
        case "disabled":
            pass
        case "adaptive":
            losses.note("thinking")  # the model decides, as it does without being told
        case _:
            losses.refuse("thinking", "a budget has no counterpart; `output_config.effort` has")


def _output_config(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    for name, member in object_of(value, "output_config").items():
        if member is None:
            continue
        if name == "effort":
            chat["reasoning_effort"] = member
        elif name == "format":
            _output_format(member, chat, losses)
        else:
            losses.refuse(f"output_config.{name}")


def _output_format(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    wanted = object_of(value, "output_format")
    if wanted.get("type") != "json_schema":
        losses.refuse("output_format.type", str(wanted.get("type"))[:100])
        return
    schema = object_of(wanted.get("schema"), "output_format.schema")
    chat["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def _service_tier(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    if value == "auto":
        chat["service_tier"] = value
    else:
        losses.refuse("service_tier")


def _speed(_value: Any, _chat: dict[str, Any], losses: Losses) -> None:
    losses.note("speed")


_MEMBERS: Final = {
    "stop_sequences": _stop,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "metadata": _metadata,
    "thinking": _thinking,
    "output_config": _output_config,
    "output_format": _output_format,
    "service_tier": _service_tier,
    "speed": _speed,
}
