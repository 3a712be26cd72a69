"""Tools by instruction, for backends that refuse the native tool API (EN-66).

The tools are described in words at the head of the conversation, and the model is asked to answer with one
JSON object when it wants to call one. The instruction goes into the *leading* system message, since strict
chat templates accept a system message only there. The adapter marks the run; only under that mark may the
Edge read calls from the answer's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

FALLBACK_MARK: Final = "openai_text_tool_fallback"
"""Run metadata that allows the Edge to turn text into tool calls; its value is ``true``."""

TOOL_CALLS_KEY: Final = "openai_tool_calls"
"""Run metadata with native tool calls as a JSON array (EN-65)."""

_INTRODUCTION: Final = (
    "You can call functions. To call them, answer with nothing but one JSON object of this form:\n"
    '{"tool_calls": [{"name": "FUNCTION", "arguments": {"PARAMETER": "VALUE"}}]}\n'
    "Otherwise answer as usual. The functions, with JSON Schemas of their parameters:\n"
)


def instruction(tools: Sequence[dict[str, Any]], tool_choice: object) -> str:
    """What the model is told about the tools."""
    lines = [
        msgspec.json.encode(
            {
                "name": tool["function"]["name"],
                "description": tool["function"].get("description", ""),
                "parameters": tool["function"].get("parameters", {}),
            }
        ).decode()
        for tool in tools
    ]
    text = _INTRODUCTION + "\n".join(lines)
    if tool_choice == "required":
        text += "\nYou must call one of them now."
    elif isinstance(tool_choice, dict) and isinstance(tool_choice.get("function"), dict):
        text += f"\nYou must call {tool_choice['function'].get('name', '')} now."
    return text


def with_instruction(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with the instruction merged into its leading system message, or one put before it.

    Earlier calls and their results, which the backend cannot take natively either, become plain turns.
    """
    plain = [_as_plain(message) for message in messages]
    if plain and plain[0].get("role") in {"system", "developer"}:
        first = plain[0]
        content = first.get("content")
        if isinstance(content, list):
            merged: Any = [*content, {"type": "text", "text": f"\n\n{text}"}]
        else:
            merged = f"{content}\n\n{text}" if content else text
        return [{**first, "role": "system", "content": merged}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _as_plain(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") in {"tool", "function"}:
        return {"role": "user", "content": f"Result of the function call:\n{message.get('content') or ''}"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    told = [
        {"name": call["function"].get("name"), "arguments": _object(call["function"].get("arguments"))}
        for call in calls
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]
    text = msgspec.json.encode({"tool_calls": told}).decode()
    content = message.get("content")
    return {
        "role": "assistant",
        "content": f"{content}\n{text}" if isinstance(content, str) and content else text,
    }


def _object(arguments: object) -> object:
    if isinstance(arguments, str):
        try:
            return msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return arguments
    return arguments
