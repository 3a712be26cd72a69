"""Reading a run's input: the body of an OpenAI chat or completion request, or else plain text (EN-43).

What the Edge puts into ``RunRequest.input`` for a chat is the caller's body as JSON; adapters take from it
what their engine can say and refuse, naming the field, what it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from iop.core.errors import InvalidRequest

JSON_BYTES_MAX: Final = 32 * 1024 * 1024
"""Largest body that is parsed; longer input is refused. Images ride in it, so it is not small."""

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles of chat messages."""


def read_body(data: bytes) -> dict[str, Any] | None:
    """The JSON body with `messages` or `prompt`; `None` when the input is plain text.

    Raises:
        InvalidRequest: it begins like a body and is none, or is too large.
    """
    if data.lstrip()[:1] != b"{":
        return None
    if len(data) > JSON_BYTES_MAX:
        raise InvalidRequest(f"input: larger than {JSON_BYTES_MAX} bytes", reason="INPUT_TOO_LARGE")
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidRequest("input: not valid JSON", reason="BAD_INPUT") from exc
    return body if isinstance(body, dict) and ("messages" in body or "prompt" in body) else None


def read_text(data: bytes) -> str:
    """Plain text input. Raises InvalidRequest when it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequest("input: must be UTF-8 text", reason="BAD_INPUT") from exc


def read_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat body, each an object with a known role. Raises InvalidRequest."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: must be a non-empty list", reason="BAD_INPUT")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role: must be one of {', '.join(sorted(ROLES))}", reason="BAD_INPUT"
            )
    return messages


def read_parts(content: object, where: str) -> tuple[str, list[str]]:
    """Text and image URLs of a message's content, in order. Raises InvalidRequest."""
    if content is None:
        return "", []
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content: must be text or a list of parts", reason="BAD_INPUT")
    texts: list[str] = []
    images: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in {"text", "input_text"} and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image_url" and isinstance(part.get("image_url"), dict):
            url = part["image_url"].get("url")
            if not isinstance(url, str) or not url:
                raise InvalidRequest(f"{where}.content: image_url.url must be text", reason="BAD_INPUT")
            images.append(url)
        else:
            raise InvalidRequest(
                f"{where}.content: parts must be text or image_url", reason="UNSUPPORTED_FIELD"
            )
    return "".join(texts), images


def read_number(body: Mapping[str, Any], name: str, *, whole: bool = False) -> float | int | None:
    """A number of the body; `None` when it is not said. Raises InvalidRequest."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise InvalidRequest(f"{name}: must be a {'whole number' if whole else 'number'}", reason="BAD_INPUT")
    return value


def read_stops(body: Mapping[str, Any]) -> list[str]:
    """Stop texts. Raises InvalidRequest."""
    stops = body.get("stop")
    if isinstance(stops, str):
        stops = [stops]
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise InvalidRequest("stop: must be text or a list of non-empty texts", reason="BAD_INPUT")
    return stops


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Function tools that may be called; none when `tool_choice` is `none`. Raises InvalidRequest."""
    tools = body.get("tools")
    if tools is None or body.get("tool_choice") == "none":
        return []
    if not isinstance(tools, list):
        raise InvalidRequest("tools: must be a list", reason="BAD_INPUT")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                f"tools[{index}]: must be a function with a name", reason="UNSUPPORTED_FIELD"
            )
    return tools
