"""What callers of the engine's OpenAI routes send, and its translation into a generation request."""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from iop.core.errors import InvalidRequest, Unsupported
from iop.engine import ChatMessage, GenerationRequest, Sampling, Stopping

__all__ = [
    "ChatBody",
    "CompletionBody",
    "StreamOptions",
    "TokenizeBody",
    "chat_messages",
    "chat_request",
    "completion_prompts",
    "completion_request",
    "decode",
]

PROMPTS_MAX: Final = 64
"""Prompts of one completions request; each becomes a request of its own in the engine's queue."""

COMPLETION_TOKENS_DEFAULT: Final = 16
"""What the completions route gives when nobody says how much; the value callers know from its first server.
"""

_AT: Final = re.compile(r" - at `\$\.?(.*?)`$")


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool = False


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; this engine reads text only."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One turn. Tool calls of earlier turns are not something this model was taught to read."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[Any] | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """What form the answer must have."""

    type: str


class _Common(msgspec.Struct, frozen=True):
    """Fields that both generating routes share; unknown fields are ignored."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    priority: int | None = None


class ChatBody(_Common, frozen=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None


class CompletionBody(_Common, frozen=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """Body of the counting routes: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None


B = TypeVar("B", bound=msgspec.Struct)


def decode(body: bytes, kind: type[B]) -> B:
    """Read a JSON body as ``kind``.

    Raises:
        InvalidRequest: not JSON (reason INVALID_JSON), or a field is missing or of the wrong kind; the
            field is named.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        where = _AT.search(message)
        field = where.group(1) if where else ""
        text = message[: where.start()] if where else message
        name = f"`{field}`: {text}." if field else f"{text}."
        raise InvalidRequest(name, details={"field": field} if field else None) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", reason="INVALID_JSON") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not UTF-8.", reason="INVALID_JSON") from None
    except ValueError:
        raise InvalidRequest("The body holds a number with too many digits.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", reason="JSON_TOO_DEEP") from None


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    """The conversation as the engine's template takes it.

    Raises:
        Unsupported: content that this engine cannot read; as HTTP 400, for it is the request that must
            change.
    """
    return [
        ChatMessage(role=message.role, content=_text(message, f"messages[{index}].content"))
        for index, message in enumerate(messages)
    ]


def _text(message: Message, field: str) -> str:
    content = message.content
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type not in ("text", "refusal", "input_text"):
            raise _unsupported(field, f"parts of type `{part.type}` are not read by this model; send text")
        texts.append(part.text or part.refusal or "")
    return "".join(texts)


def chat_request(body: ChatBody, *, request_id: str, prompt: tuple[int, ...]) -> GenerationRequest:
    """The generation request of a chat body."""
    if body.tools and body.tool_choice != "none":
        raise _unsupported(
            "tools", "this model does not call tools; leave it out or set `tool_choice` to `none`"
        )
    if body.response_format is not None and body.response_format.type != "text":
        raise _unsupported("response_format", "only `text` is offered")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs`: true.", details={"field": "top_logprobs"})
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _request(
        body,
        request_id=request_id,
        prompt=prompt,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
    )


def completion_prompts(body: CompletionBody) -> list[str | tuple[int, ...]]:
    """The prompts of a completions body: one text, texts, one list of ids, or lists of ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("`prompt` must not be empty.", details={"field": "prompt"})
    if all(isinstance(item, int) for item in prompt):
        return [tuple(item for item in prompt if isinstance(item, int))]
    if len(prompt) > PROMPTS_MAX:
        raise InvalidRequest(f"`prompt` may hold at most {PROMPTS_MAX}.", details={"field": "prompt"})
    prompts: list[str | tuple[int, ...]] = []
    for item in prompt:
        if isinstance(item, int):
            raise InvalidRequest("`prompt` mixes texts and token ids.", details={"field": "prompt"})
        prompts.append(item if isinstance(item, str) else tuple(item))
    return prompts


def completion_request(
    body: CompletionBody, *, request_id: str, prompt: str | tuple[int, ...]
) -> GenerationRequest:
    """The generation request of one prompt of a completions body."""
    if body.suffix:
        raise _unsupported("suffix", "this model does not fill in the middle")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise _unsupported("best_of", "candidates are not ranked here; use `n`")
    return _request(
        body,
        request_id=request_id,
        prompt=prompt,
        max_tokens=body.max_tokens if body.max_tokens is not None else COMPLETION_TOKENS_DEFAULT,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def _request(
    body: ChatBody | CompletionBody,
    *,
    request_id: str,
    prompt: str | tuple[int, ...],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> GenerationRequest:
    if body.logit_bias:
        raise _unsupported("logit_bias", "it is not offered by this engine")
    stop = body.stop if body.stop is not None else []
    top_k = body.top_k if body.top_k is not None else 0
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        sampling=Sampling(
            temperature=_or(body.temperature, 1.0),
            top_p=_or(body.top_p, 1.0),
            top_k=max(top_k, 0) if top_k == -1 else top_k,
            min_p=_or(body.min_p, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            seed=body.seed,
        ),
        stopping=Stopping(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            include_stop_in_output=bool(body.include_stop_str_in_output),
        ),
        n=body.n if body.n is not None else 1,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        priority=body.priority or 0,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _unsupported(field: str, rule: str) -> Unsupported:
    return Unsupported(f"`{field}`: {rule}.", reason="UNSUPPORTED_FIELD", details={"field": field})
