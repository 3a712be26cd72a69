"""An OpenAI responses request as a chat completions request (SF-01, SF-10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from iop.api.http.convert.losses import Losses, invalid, items_of, object_of, text_of
from iop.api.http.convert.scores import RESPONSES_INCLUDE

__all__ = ["response_echo", "responses_to_chat"]

_SAME: Final = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "stream",
        "parallel_tool_calls",
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "service_tier",
    }
)
_HINTS: Final = frozenset({"stream_options", "prompt_cache_retention"})
_REFUSED: Final = frozenset(
    {
        "previous_response_id",
        "conversation",
        "prompt",
        "max_tool_calls",
        "context_management",
    }
)
_ECHOED: Final = frozenset(
    {
        "instructions",
        "max_output_tokens",
        "metadata",
        "parallel_tool_calls",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
    }
)


def response_echo(body: Mapping[str, Any]) -> dict[str, Any]:
    """Members of the request that the answer repeats."""
    echo = {name: value for name, value in body.items() if name in _ECHOED and value is not None}
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict):
        echo["reasoning"] = {"effort": reasoning.get("effort"), "summary": None}
    return echo


def responses_to_chat(body: Mapping[str, Any], losses: Losses) -> dict[str, Any]:
    """Convert a body. Members that the responses dialect does not know pass as they are: the provider judges.

    Raises:
        InvalidRequest: a field is of the wrong kind, or chats cannot say it; it is named.
    """
    chat: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in ("input", "instructions", "metadata"):
            continue  # metadata is for the answer to repeat
        if name in _SAME:
            chat[name] = value
        elif name in _HINTS:
            losses.note(name)
        elif name in _REFUSED:
            if value != 0:
                losses.refuse(name)
        elif name in _MEMBERS:
            _MEMBERS[name](value, chat, losses)
        else:
            chat[name] = value
    messages: list[dict[str, Any]] = []
    if (instructions := body.get("instructions")) is not None:
        messages.append({"role": "system", "content": text_of(instructions, "instructions")})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        _Items(messages, losses).add(items_of(given, "input"))
    chat["messages"] = messages
    if chat.get("stream") is True:
        chat["stream_options"] = {"include_usage": True}
    return chat


class _Items:
    """Turns input items into messages. Calls and reasoning join the assistant message that they belong to."""

    def __init__(self, messages: list[dict[str, Any]], losses: Losses) -> None:
        self._messages = messages
        self._losses = losses
        self._thoughts: list[str] = []
        self._is_joining = False  # whether the last message is an assistant's that may still grow

    def add(self, items: list[Any]) -> None:
        """Convert all items."""
        for index, given in enumerate(items):
            where = f"input[{index}]"
            item = object_of(given, where)
            kind = item.get("type", "message")
            match kind:
                case "message":
                    self._message(item, where)
                case "reasoning":
                    self._reasoning(item, where)
                case "function_call":
                    self._call(item, where)
                case "function_call_output":
                    self._result(item, where)
                case _:
                    self._losses.refuse(f"{where}.type", str(kind)[:100])
        self._flush()

    def _flush(self) -> None:
        """Whatever comes next belongs to another turn."""
        if self._thoughts:
            self._assistant()["content"] = ""
        self._is_joining = False

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise invalid(f"{where}.role", "must be user, assistant, system or developer")
        content = item.get("content")
        if role != "assistant":
            self._flush()
            self._messages.append({"role": role, "content": self._content(content, f"{where}.content")})
            return
        parts = self._content(content, f"{where}.content")
        text = parts if isinstance(parts, str) else "".join(part.get("text", "") for part in parts)
        if self._is_joining and self._messages[-1].get("content") is None and not self._thoughts:
            self._messages[-1]["content"] = text
        else:
            self._assistant()["content"] = text

    def _assistant(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
            self._thoughts = []
        self._messages.append(message)
        self._is_joining = True
        return message

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        told = item.get("content") or item.get("summary") or []
        for number, part in enumerate(items_of(told, f"{where}.content")):
            here = f"{where}.content[{number}]"
            self._thoughts.append(text_of(object_of(part, here).get("text"), f"{here}.text"))
        if item.get("encrypted_content"):
            self._losses.note("input.encrypted_content")

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        message = self._messages[-1] if self._is_joining and not self._thoughts else self._assistant()
        message.setdefault("tool_calls", []).append(
            {
                "id": text_of(item.get("call_id"), f"{where}.call_id"),
                "type": "function",
                "function": {
                    "name": text_of(item.get("name"), f"{where}.name"),
                    "arguments": text_of(item.get("arguments"), f"{where}.arguments"),
                },
            }
        )

    def _result(self, item: Mapping[str, Any], where: str) -> None:
        self._flush()
        output = self._content(item.get("output"), f"{where}.output")
        images: list[dict[str, Any]] = []
        if not isinstance(output, str):
            images = [part for part in output if part["type"] != "text"]
            output = "".join(part["text"] for part in output if part["type"] == "text")
        call_id = text_of(item.get("call_id"), f"{where}.call_id")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        if images:  # a chat's tool messages hold text only
            self._losses.refuse(f"{where}.output.type", "pictures in a tool's output")

    def _content(self, value: Any, where: str) -> Any:
        if isinstance(value, str):
            return value
        parts: list[dict[str, Any]] = []
        for number, given in enumerate(items_of(value, where)):
            here = f"{where}[{number}]"
            part = object_of(given, here)
            match part.get("type"):
                case "input_text" | "output_text" | "text":
                    parts.append({"type": "text", "text": text_of(part.get("text"), f"{here}.text")})
                case "refusal":
                    parts.append({"type": "text", "text": text_of(part.get("refusal"), f"{here}.refusal")})
                case "input_image" if isinstance(part.get("image_url"), str):
                    image = {"url": part["image_url"]}
                    if part.get("detail") is not None:
                        image["detail"] = part["detail"]
                    parts.append({"type": "image_url", "image_url": image})
                case kind:
                    self._losses.refuse(f"{here}.type", str(kind)[:100])
        if len(parts) == 1 and parts[0]["type"] == "text":
            return parts[0]["text"]
        return parts


# ---- members ----


def _tools(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    tools = []
    for index, given in enumerate(items_of(value, "tools")):
        where = f"tools[{index}]"
        tool = object_of(given, where)
        if tool.get("type") != "function":
            losses.refuse(f"{where}.type", str(tool.get("type"))[:100])
            continue
        function: dict[str, Any] = {"name": text_of(tool.get("name"), f"{where}.name")}
        for name in ("description", "parameters", "strict"):
            if tool.get(name) is not None:
                function[name] = tool[name]
        tools.append({"type": "function", "function": function})
    if tools:
        chat["tools"] = tools


def _tool_choice(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    if isinstance(value, str):
        chat["tool_choice"] = value
        return
    choice = object_of(value, "tool_choice")
    if choice.get("type") == "function":
        name = text_of(choice.get("name"), "tool_choice.name")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        losses.refuse("tool_choice.type", str(choice.get("type"))[:100])


def _max_output_tokens(value: Any, chat: dict[str, Any], _losses: Losses) -> None:
    chat["max_tokens"] = value


def _reasoning(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    for name, member in object_of(value, "reasoning").items():
        if member is None:
            continue
        if name == "effort":
            chat["reasoning_effort"] = member
        elif name in ("summary", "generate_summary"):
            losses.note(f"reasoning.{name}")  # reasoning is shown in full where the provider tells it
        else:
            losses.refuse(f"reasoning.{name}")


def _text(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    for name, member in object_of(value, "text").items():
        if member is None:
            continue
        if name == "verbosity":
            chat["verbosity"] = member
        elif name == "format":
            wanted = object_of(member, "text.format")
            if wanted.get("type") == "json_schema":
                schema = {key: each for key, each in wanted.items() if key != "type"}
                chat["response_format"] = {"type": "json_schema", "json_schema": schema}
            elif wanted.get("type") != "text":
                chat["response_format"] = dict(wanted)
        else:
            losses.refuse(f"text.{name}")


def _store(value: Any, _chat: dict[str, Any], losses: Losses) -> None:
    if value is not False:
        losses.refuse("store", "answers are not kept here")


def _background(value: Any, _chat: dict[str, Any], losses: Losses) -> None:
    if value is not False:
        losses.refuse("background")


def _truncation(value: Any, _chat: dict[str, Any], losses: Losses) -> None:
    if value != "disabled":
        losses.refuse("truncation")


def _top_logprobs(value: Any, chat: dict[str, Any], _losses: Losses) -> None:
    if value != 0:
        chat["top_logprobs"] = value
        chat["logprobs"] = True  # which chats must say besides


def _include(value: Any, chat: dict[str, Any], losses: Losses) -> None:
    for index, name in enumerate(items_of(value, "include")):
        if name == "reasoning.encrypted_content":
            losses.note("include")  # reasoning comes in clear text, there is nothing to encrypt
        elif name == RESPONSES_INCLUDE:
            chat["logprobs"] = True
        else:
            losses.refuse(f"include[{index}]", str(name)[:100])


_MEMBERS: Final = {
    "tools": _tools,
    "tool_choice": _tool_choice,
    "max_output_tokens": _max_output_tokens,
    "reasoning": _reasoning,
    "text": _text,
    "store": _store,
    "background": _background,
    "truncation": _truncation,
    "include": _include,
    "top_logprobs": _top_logprobs,
}
