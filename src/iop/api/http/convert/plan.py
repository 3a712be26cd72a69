"""Which dialect a request is converted to, and the request in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

from iop.api.http.bulk import CONVERTED_BYTES_MAX, BulkFields
from iop.api.http.convert.answers import AnswerConverter
from iop.api.http.convert.chat_to_messages import chat_to_messages
from iop.api.http.convert.chat_to_responses import chat_to_responses
from iop.api.http.convert.losses import Losses
from iop.api.http.convert.messages_to_chat import messages_to_chat
from iop.api.http.convert.messages_writer import MessagesWriter
from iop.api.http.convert.numbers import load_request
from iop.api.http.convert.readers import ChatReader, MessagesReader, Reader
from iop.api.http.convert.responses_reader import ResponsesReader
from iop.api.http.convert.responses_to_chat import response_echo, responses_to_chat
from iop.api.http.convert.responses_writer import ResponsesWriter
from iop.api.http.convert.writers import AnswerTerms, ChatWriter, Writer
from iop.api.http.errors import Dialect
from iop.api.http.rewrite import rewrite_chat
from iop.api.http.splice import RequestFields
from iop.core.errors import InvalidRequest
from iop.edge.calls import CONVERSIONS

__all__ = ["Plan", "conversion_for", "plan_request"]

_DIALECTS: Final[Mapping[str, Dialect]] = {
    "chat_completions": Dialect.CHAT,
    "messages": Dialect.MESSAGES,
    "responses": Dialect.RESPONSES,
}

_NAMES: Final[Mapping[str, str]] = {
    "chat_completions": "chat completions",
    "messages": "messages",
    "responses": "responses",
}

_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "messages": {
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "user": "metadata.user_id",
    },
    "responses": {
        "verbosity": "text.verbosity",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "logprobs": "include",
    },
}
"""What a caller calls the fields of the chat that its request became on the way to a third dialect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One request, ready for a provider of another dialect.

    Attributes:
        operation: what the provider is asked.
        dialect: its dialect.
        parts: the request in it, the model's name included; what was long in the caller's is not copied.
        made_bytes: what was made for it and is held besides the caller's bytes.
        dropped: fields that were let go.
        echo: what the answer repeats of the caller's request.
        has_one_call: whether the caller wants one tool call at most.
        has_scores: whether it wants log probabilities.
        names: what the caller calls fields of the request that was made, where it is another name.
        has_usage: whether the caller asked for a usage chunk.
    """

    source: str
    operation: str
    dialect: Dialect
    parts: Sequence[bytes]
    made_bytes: int
    has_tools: bool
    has_one_call: bool
    has_scores: bool
    names: Mapping[str, str]
    is_stream: bool
    dropped: tuple[str, ...]
    echo: Mapping[str, Any]
    has_usage: bool

    @property
    def body(self) -> bytes:
        """The request in one piece."""
        return b"".join(self.parts)

    def converter(self, terms: AnswerTerms) -> AnswerConverter:
        """What turns the provider's answer into the caller's dialect."""
        reader: Reader
        if self.dialect is Dialect.MESSAGES:
            reader = MessagesReader()
        elif self.dialect is Dialect.RESPONSES:
            reader = ResponsesReader()
        else:
            reader = ChatReader(id_base=terms.request_id)
        return AnswerConverter(reader, _WRITERS[self.source](terms))


def conversion_for(operation: str, offered: AbstractSet[str]) -> str | None:
    """What to ask a provider that offers only ``offered``: None where the operation itself, or nothing known."""
    if not offered or operation in offered:
        return None
    return next((other for other in CONVERSIONS.get(operation, ()) if other in offered), None)


def plan_request(
    source: str,
    target: str,
    fields: RequestFields | bytes,
    *,
    model: str,
    allowed: frozenset[str] = frozenset(),
    rewrites: frozenset[str] = frozenset(),
) -> Plan:
    """Convert a request body.

    Args:
        source: the caller's operation.
        target: the provider's, one of ``CONVERSIONS[source]``.
        fields: the caller's body; a valid JSON object.
        model: the provider's name for the model.
        allowed: fields that may be let go.
        rewrites: the model's rules (SF-15); they are about chats, so they count where it becomes one.

    Raises:
        InvalidRequest: something in it cannot be said there; the field is named.
    """
    raw = fields if isinstance(fields, bytes) else fields.body
    strings = fields.strings if isinstance(fields, BulkFields) else None
    if not raw:
        raise InvalidRequest(
            f"To be converted for a provider that does not offer {source}, a body may have "
            f"{CONVERTED_BYTES_MAX} bytes besides its long strings.",
            reason="BODY_TOO_LARGE",
            details={"limit_bytes": str(CONVERTED_BYTES_MAX)},
        )
    # The plain decoder keeps large integers; numbers of schemas and vendor fields stay what they are.
    body = load_request(raw)
    if strings is not None:
        body = strings.restore(body, "arguments")  # JSON within JSON is looked into
    options = body.get("stream_options")
    has_usage = isinstance(options, dict) and options.get("include_usage") is True
    losses = Losses(_NAMES[target], allowed)
    made = body
    try:
        if source == "messages":
            made = messages_to_chat(made, losses)
        elif source == "responses":
            made = responses_to_chat(made, losses)
        losses.names = _names_of(source, body)
        if target == "messages":
            made = chat_to_messages(made, losses)
        elif target == "responses":
            made = chat_to_responses(made, losses)
    except RecursionError:
        raise InvalidRequest("The body nests too deeply to be converted.", reason="JSON_TOO_DEEP") from None
    made["model"] = model
    text = _encode(made)
    if rewrites and target == "chat_completions":
        text = rewrite_chat(text, rewrites, is_stream=False)  # streams are asked for their usage anyway
    echo = response_echo(body) if source == "responses" else {}
    return Plan(
        source=source,
        operation=target,
        dialect=_DIALECTS[target],
        parts=[text] if strings is None else strings.expand(text),
        made_bytes=len(text) + (0 if strings is None else len(raw)),
        has_tools="tools" in made,
        has_one_call=made.get("parallel_tool_calls") is False,
        has_scores=bool(made.get("logprobs")),
        names=losses.names,
        is_stream=made.get("stream") is True,
        dropped=tuple(losses.dropped),
        echo=echo if strings is None else strings.restore(echo),
        has_usage=has_usage,
    )


def _names_of(source: str, body: Mapping[str, Any]) -> Mapping[str, str]:
    names = _FIELDS.get(source, {})
    if source == "responses" and not body.get("include"):
        return {**names, "logprobs": "top_logprobs"}  # what asked for them
    return names


def _encode(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a character, which only escapes can say
        return json.dumps(value, separators=(",", ":")).encode()


_WRITERS: Final[Mapping[str, Callable[[AnswerTerms], Writer]]] = {
    "chat_completions": ChatWriter,
    "messages": MessagesWriter,
    "responses": ResponsesWriter,
}
