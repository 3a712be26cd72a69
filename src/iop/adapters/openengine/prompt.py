"""A run's input as an OpenEngine generation: chat JSON, completion JSON or plain text (EN-43).

OpenEngine generates from a prompt, not from messages. An engine that can render its own chat template says
so in ``ModelInfo.tokenizer_modes`` with ``chat_messages``; the messages then travel as JSON in ``prompt`` and
``extra["prompt_format"]`` says how to read them. A server that takes whole chats, as another Edge does, says
``openai_chat``: then everything of the body that the schema has no field for travels as it is, tools included. For any
other engine the conversation is written out as plain text with one role name per turn, which base models and most tuned
ones understand well enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec
from google.protobuf.message import DecodeError

from iop.adapters.chat_input import read_body, read_messages, read_parts, read_stops, read_text, read_tools
from iop.core.errors import InvalidRequest
from iop.pb.openengine.v1 import generation_pb2 as pb
from iop.wire import run_metadata
from iop.wire.messages import RunRequest

CHAT_FORMAT: Final = "chat_messages"
"""The name of the prompt format that an engine renders itself."""

OPENAI_FORMAT: Final = "openai_chat"
"""The name of the prompt format that is the body of a chat."""

SEQUENCES_MAX: Final = 128
"""Most outputs of one run: each costs an entry until the end."""

CANDIDATES_MAX: Final = 20
"""Most other tokens that are told at each place."""

_SAMPLING_FLOATS: Final = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)

_SPOKEN: Final = frozenset(
    {
        *_SAMPLING_FLOATS,
        "top_k",
        "seed",
        "n",
        "model",
        "stream",
        "stream_options",
        "stop",
        "stop_token_ids",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "ignore_eos",
        "logprobs",
        "top_logprobs",
    }
)
"""Fields of a body that the schema has its own words for, or that are the transport's."""

_NO_WORDS: Final = ("logit_bias", "echo", "suffix", "functions", "function_call", "modalities", "audio")
"""Fields that change the answer and that a prompt alone cannot say."""


def generate_request(run: RunRequest, *, formats: frozenset[str]) -> pb.GenerateRequest:
    """Build the request.

    Args:
        run: ``input`` is a JSON object with ``messages`` or ``prompt``, or else the prompt itself.
        formats: prompt formats that the engine renders itself.

    Raises:
        InvalidRequest: a field cannot be expressed; the message names it.
    """
    request = pb.GenerateRequest(request_id=run.run_id, model=run.target)
    body = read_body(run.input)
    if body is None:
        request.prompt = read_text(run.input)
        return request
    _fill_scores(request, body, is_read=run.metadata.get(run_metadata.SCORED_DELTAS) == "1")
    if "messages" in body and OPENAI_FORMAT in formats:
        read_messages(body)
        _fill_chat(request, body)
    else:
        if read_tools(body):
            raise InvalidRequest("tools: this engine takes no tools", reason="UNSUPPORTED_FIELD")
        for name in _NO_WORDS:
            if body.get(name):
                raise InvalidRequest(f"{name}: this engine cannot be told", reason="UNSUPPORTED_FIELD")
        _fill_prompt(request, body, formats)
        _fill_guide(request, body)
    _fill_sampling(request, body)
    _fill_stopping(request, body)
    return request


def passed_request(run: RunRequest) -> pb.GenerateRequest:
    """The request of a run that speaks OpenEngine from end to end, for this engine's model.

    Raises:
        InvalidRequest: the input is no such message.
    """
    try:
        request = pb.GenerateRequest.FromString(run.input)
    except DecodeError as exc:
        raise InvalidRequest("input: not an OpenEngine request", reason="BAD_INPUT") from exc
    request.request_id, request.model = run.run_id, run.target
    return request


def _fill_chat(request: pb.GenerateRequest, body: Mapping[str, Any]) -> None:
    """The chat as it is, less what the schema's own fields say."""
    chat = {name: value for name, value in body.items() if name not in _SPOKEN}
    request.prompt = msgspec.json.encode(chat).decode()
    request.extra.update({"prompt_format": OPENAI_FORMAT})


def _fill_prompt(request: pb.GenerateRequest, body: Mapping[str, Any], formats: frozenset[str]) -> None:
    if "messages" in body:
        turns = _turns(request, body)
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


def _turns(request: pb.GenerateRequest, body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Roles and texts in order; pictures go to the request's media in the same order."""
    turns: list[tuple[str, str]] = []
    for index, message in enumerate(read_messages(body)):
        text, images = read_parts(message.get("content"), f"messages[{index}]")
        for url in images:
            if url.startswith("data:"):
                request.media.add(modality=pb.MODALITY_IMAGE, data_uri=url)
            else:
                request.media.add(modality=pb.MODALITY_IMAGE, url=url)
        turns.append((message["role"], text))
    return turns


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
    for text in read_stops(body):
        stopping.conditions.add(stop_text=text)
    token_ids = body.get("stop_token_ids") or []
    if not isinstance(token_ids, list) or not all(_is_token(each) for each in token_ids):
        raise InvalidRequest("stop_token_ids: must be a list of token ids", reason="BAD_INPUT")
    for token_id in token_ids:
        stopping.conditions.add(stop_token_id=token_id)


def _fill_scores(request: pb.GenerateRequest, body: Mapping[str, Any], *, is_read: bool) -> None:
    """Scores of the answer's tokens, in the words of chats or of completions."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if "messages" in body:
        if wanted not in {None, True, False}:
            raise InvalidRequest("logprobs: must be true or false", reason="BAD_INPUT")
        if top and not wanted:
            raise InvalidRequest("top_logprobs: needs logprobs", reason="BAD_INPUT")
    else:
        wanted, top = wanted is not None and wanted is not False, wanted
    if not wanted:
        return
    if not is_read:
        raise InvalidRequest("logprobs: not carried by normalised runs", reason="UNSUPPORTED_FIELD")
    top = 0 if top is None or top is True else top
    if not isinstance(top, int) or not 0 <= top <= CANDIDATES_MAX:
        name = "top_logprobs" if "messages" in body else "logprobs"
        raise InvalidRequest(f"{name}: must be 0 to {CANDIDATES_MAX}", reason="BAD_INPUT")
    request.response.return_output_logprobs = True
    if top:
        request.response.output_candidates.top_n = top


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
