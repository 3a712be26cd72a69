"""A run's input as an OpenEngine generation: chat JSON, completion JSON or plain text (EN-43).

OpenEngine generates from a prompt, not from messages. An engine that can render its own chat template says
so in ``ModelInfo.extra["prompt_formats"]`` with ``chat_messages``; the messages then travel as JSON in
``prompt`` and ``extra["prompt_format"]`` says how to read them. For any other engine the conversation is
written out as plain text with one role name per turn, which base models and most tuned ones understand well
enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from iop.core.errors import InvalidRequest
from iop.pb.openengine.v1 import generation_pb2 as pb
from iop.wire.messages import RunRequest

CHAT_FORMAT: Final = "chat_messages"
"""The name of the prompt format that an engine renders itself."""

JSON_BYTES_MAX: Final = 32 * 1024 * 1024
"""Largest chat body that is parsed; longer input is refused. Images ride in it, so it is not small."""

SEQUENCES_MAX: Final = 128
"""Most outputs of one run: each costs an entry until the end."""

_SAMPLING_FLOATS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_TEXT_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def generate_request(run: RunRequest, *, formats: frozenset[str]) -> pb.GenerateRequest:
    """Build the request.

    Args:
        run: ``input`` is a JSON object with ``messages`` or ``prompt``, or else the prompt itself.
        formats: prompt formats that the engine renders itself.

    Raises:
        InvalidRequest: a field cannot be expressed; the message names it.
    """
    request = pb.GenerateRequest(request_id=run.run_id, model=run.target)
    body = _json_object(run.input)
    if body is None:
        try:
            request.prompt = run.input.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise InvalidRequest("input: must be UTF-8 text", reason="BAD_INPUT") from exc
        return request
    _fill_prompt(request, body, formats)
    _fill_sampling(request, body)
    _fill_stopping(request, body)
    _fill_guide(request, body)
    if body.get("logprobs"):
        raise InvalidRequest("logprobs: not carried by normalised runs", reason="UNSUPPORTED_FIELD")
    if body.get("tools") and body.get("tool_choice") != "none":
        raise InvalidRequest("tools: this engine takes no tools", reason="UNSUPPORTED_FIELD")
    return request


def _json_object(data: bytes) -> dict[str, Any] | None:
    if data.lstrip()[:1] != b"{":
        return None
    if len(data) > JSON_BYTES_MAX:
        raise InvalidRequest(f"input: larger than {JSON_BYTES_MAX} bytes", reason="INPUT_TOO_LARGE")
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidRequest("input: not valid JSON", reason="BAD_INPUT") from exc
    return body if isinstance(body, dict) and ("messages" in body or "prompt" in body) else None


def _fill_prompt(request: pb.GenerateRequest, body: Mapping[str, Any], formats: frozenset[str]) -> None:
    if "messages" in body:
        turns = _turns(request, body["messages"])
        if CHAT_FORMAT in formats:
            request.prompt = msgspec.json.encode(
                [{"role": role, "content": content} for role, content in turns]
            ).decode()
            request.extra.update({"prompt_format": CHAT_FORMAT})
        else:
            request.prompt = "".join(f"{role}: {content}\n" for role, content in turns) + "assistant:"
        return
    prompt = body["prompt"]
    if isinstance(prompt, str):
        request.prompt = prompt
    elif isinstance(prompt, list) and prompt and all(_is_token(each) for each in prompt):
        request.token_ids.ids.extend(prompt)
    else:
        raise InvalidRequest("prompt: must be one text or one list of token ids", reason="BAD_INPUT")


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _turns(request: pb.GenerateRequest, messages: object) -> list[tuple[str, str]]:
    """Roles and texts in order; pictures and sounds go to the request's media in the same order."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages: must be a non-empty list", reason="BAD_INPUT")
    turns: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in _TEXT_ROLES:
            raise InvalidRequest(
                f"{where}.role: must be one of {', '.join(sorted(_TEXT_ROLES))}", reason="BAD_INPUT"
            )
        turns.append((message["role"], _content(request, message.get("content"), where)))
    return turns


def _content(request: pb.GenerateRequest, content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content: must be text or a list of parts", reason="BAD_INPUT")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in {"text", "input_text"} and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image_url" and isinstance(part.get("image_url"), dict):
            _add_image(request, part["image_url"].get("url"), where)
        else:
            raise InvalidRequest(
                f"{where}.content: parts must be text or image_url", reason="UNSUPPORTED_FIELD"
            )
    return "".join(texts)


def _add_image(request: pb.GenerateRequest, url: object, where: str) -> None:
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f"{where}.content: image_url.url must be text", reason="BAD_INPUT")
    if url.startswith("data:"):
        request.media.add(modality=pb.MODALITY_IMAGE, data_uri=url)
    else:
        request.media.add(modality=pb.MODALITY_IMAGE, url=url)


def _fill_sampling(request: pb.GenerateRequest, body: Mapping[str, Any]) -> None:
    sampling = request.sampling
    for name in _SAMPLING_FLOATS:
        _take(body, name, sampling, name, (int, float))
    _take(body, "top_k", sampling, "top_k", (int,))
    _take(body, "seed", sampling, "seed", (int,))
    _take(body, "n", sampling, "num_sequences", (int,))
    if sampling.num_sequences > SEQUENCES_MAX:
        raise InvalidRequest(f"n: at most {SEQUENCES_MAX}", reason="BAD_INPUT")


def _fill_stopping(request: pb.GenerateRequest, body: Mapping[str, Any]) -> None:
    stopping = request.stopping
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    _take(body, name, stopping, "max_tokens", (int,))
    _take(body, "min_tokens", stopping, "min_tokens", (int,))
    if isinstance(body.get("ignore_eos"), bool):
        stopping.ignore_eos = body["ignore_eos"]
    stops = body.get("stop")
    if isinstance(stops, str):
        stops = [stops]
    if stops is not None:
        if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
            raise InvalidRequest("stop: must be text or a list of non-empty texts", reason="BAD_INPUT")
        for text in stops:
            stopping.conditions.add(stop_text=text)


def _fill_guide(request: pb.GenerateRequest, body: Mapping[str, Any]) -> None:
    wanted = body.get("response_format")
    if wanted is None:
        return
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        request.guided.json_object.SetInParent()
    elif kind == "json_schema" and isinstance(wanted.get("json_schema"), dict):
        schema = wanted["json_schema"].get("schema", {})
        request.guided.json_schema = msgspec.json.encode(schema).decode()
    elif kind != "text":
        raise InvalidRequest("response_format: must be text, json_object or json_schema", reason="BAD_INPUT")


def _take(body: Mapping[str, Any], name: str, message: Any, field: str, types: tuple[type, ...]) -> None:
    """Copy one number, if it is said; whatever does not fit the wire's type is the caller's mistake."""
    value = body.get(name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, types):
        raise InvalidRequest(f"{name}: must be a number", reason="BAD_INPUT")
    try:
        setattr(message, field, float(cast("float", value)) if float in types else value)
    except (ValueError, OverflowError, TypeError) as exc:
        raise InvalidRequest(f"{name}: out of range", reason="BAD_INPUT") from exc
