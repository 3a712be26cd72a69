"""A generation as the request of one chosen provider: a completion, a chat, or a run (EN-54, EN-60). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from iop.api.grpc import ports
from iop.api.grpc.abilities import MESSAGES_FORMAT, OPENAI_FORMAT, Abilities
from iop.api.grpc.answer_stream import AnswerStream
from iop.api.grpc.completion_sink import CompletionSink
from iop.api.grpc.inference_codec import encode_generate
from iop.api.grpc.run_sink import EngineRunSink, RunSink
from iop.core.errors import InvalidRequest, Unsupported
from iop.edge.calls import Call, Route, RunCall, ServedTarget, TunnelCall
from iop.wire import run_metadata

__all__ = ["generation_of", "operation_of", "options_of", "provider_call"]

PROMPT_FORMAT: Final = "prompt_format"

_PATHS: Final = {"completions": "/v1/completions", "chat_completions": "/v1/chat/completions"}

_TAKES_RANKS: Final = frozenset({"vllm", "sglang"})
"""Kinds of provider with a header for the data-parallel rank; of others no Node tells any ranks."""

_SPELLINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "llamacpp": {"repetition_penalty": "repeat_penalty", "logprobs": "n_probs"},
}
"""Where a kind of provider has another word for an option."""


def format_of(call: ports.GenerateCall) -> str:
    """How the prompt is to be read; empty: as plain text or token ids."""
    value = call.extra.get(PROMPT_FORMAT, "")
    return value if value in {MESSAGES_FORMAT, OPENAI_FORMAT} else ""


def operation_of(call: ports.GenerateCall) -> str:
    """What a provider is asked for."""
    return "chat_completions" if format_of(call) else "completions"


def generation_of(call: ports.GenerateCall) -> str:
    """What dispatch is asked: nobody who would have to be asked in a dialect that is not written here."""
    return "generate_chat" if format_of(call) else "generate_text"


def options_of(call: ports.GenerateCall) -> dict[str, Any]:
    """What the caller said of sampling and stopping, by the names of `OPTION_NAMES`."""
    sampling, stopping = call.sampling, call.stopping
    said = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "max_tokens": stopping.max_tokens,
        "min_tokens": stopping.min_tokens,
        "stop": list(stopping.stop) or None,
        "stop_token_ids": list(stopping.stop_token_ids) or None,
        "ignore_eos": stopping.ignore_eos,
    }
    return {name: value for name, value in said.items() if value is not None}


def provider_call(
    call: ports.GenerateCall,
    target: ServedTarget,
    answer: AnswerStream,
    *,
    able: Abilities,
    request_id: str,
    session: str,
    priority: int | None,
) -> Call:
    """The provider's request and the sink of its answer, once it is known who that is.

    Args:
        able: what this one provider can do; less than was advertised where the pool has just changed.
        request_id: the one that the caller knows.
        session: affinity key; the routing key of the next hop.
        priority: as dispatched, for the next hop; None: it takes none.

    Raises:
        Unsupported: the provider would not understand an option.
        InvalidRequest: the prompt is not what its format says.
    """
    for feature in _missing(call, able):
        raise Unsupported(
            f"`{feature}` is not offered by the providers of {target.model!r}.",
            reason="UNSUPPORTED_FEATURE",
            details={"feature": feature},
        )
    outputs = call.sampling.num_sequences or 1
    if target.adapter_type == "openengine":
        metadata = {run_metadata.OPENENGINE_REQUEST: "1"}
        if priority is not None:
            metadata[run_metadata.PRIORITY] = str(priority)
        if call.hints.target_dp_rank is not None:
            metadata[run_metadata.TARGET_RANK] = str(call.hints.target_dp_rank)
        return RunCall(
            input=encode_generate(call),
            sink=EngineRunSink(answer, outputs=outputs),
            stream=True,
            metadata=metadata,
            session_id=session,
            traceparent=call.hints.traceparent,
            tracestate=call.hints.tracestate,
        )
    body = orjson.dumps(_body_of(call, target))
    if target.route is Route.RUN:
        return RunCall(
            input=body,
            sink=RunSink(answer, outputs=outputs),
            stream=True,
            session_id=session,
            traceparent=call.hints.traceparent,
            tracestate=call.hints.tracestate,
        )
    operation = operation_of(call)
    return TunnelCall(
        operation=operation if operation in target.operations else "",
        method="POST",
        path=_PATHS[operation],
        sink=CompletionSink(
            answer,
            outputs=outputs,
            is_chat=operation == "chat_completions",
            candidates=_candidates_of(call),
        ),
        headers=_headers_of(call, request_id, target.adapter_type),
        body=(body,),
        stream=True,
        session_id=session,
    )


def _missing(call: ports.GenerateCall, able: Abilities) -> Iterator[str]:
    """What was asked and this one provider cannot do."""
    yield from (name for name in options_of(call) if name not in able.options)
    if (wanted := format_of(call)) and wanted not in able.formats:
        yield f"extra.{PROMPT_FORMAT}"
    if not wanted and isinstance(call.prompt, str) and not able.takes_text:
        yield "prompt"
    if not isinstance(call.prompt, str) and not able.takes_token_ids:
        yield "token_ids"
    if (call.sampling.num_sequences or 1) > able.sequences_max:
        yield "sampling.num_sequences"
    if call.output_logprobs is not None and not able.output_logprobs.supported:
        yield "response.return_output_logprobs"
    if call.prompt_logprobs is not None and not able.prompt_logprobs.supported:
        yield "response.return_prompt_logprobs"
    if call.stopping.include_stop_in_output and not able.stop_in_output:
        yield "stopping.include_stop_in_output"
    if call.guide is not None and not able.guided.supported:
        yield f"guided.{call.guide.kind}"


def _headers_of(call: ports.GenerateCall, request_id: str, adapter_type: str) -> list[tuple[bytes, bytes]]:
    headers = [
        (b"content-type", b"application/json"),
        (b"accept", b"text/event-stream"),
        (b"x-request-id", request_id.encode("ascii", "replace")),
    ]
    if call.hints.target_dp_rank is not None and adapter_type in _TAKES_RANKS:
        headers.append((b"x-data-parallel-rank", b"%d" % call.hints.target_dp_rank))
    if call.hints.traceparent:
        headers.append((b"traceparent", call.hints.traceparent.encode("latin-1")))
    if call.hints.tracestate:
        headers.append((b"tracestate", call.hints.tracestate.encode("latin-1")))
    return headers


def _body_of(call: ports.GenerateCall, target: ServedTarget) -> dict[str, Any]:
    spellings = _SPELLINGS.get(target.adapter_type, {})
    body: dict[str, Any] = {**_prompt_of(call), "model": target.target}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {spellings.get(name, name): value for name, value in options_of(call).items()}
    if (call.sampling.num_sequences or 1) > 1:
        body["n"] = call.sampling.num_sequences
    if call.stopping.include_stop_in_output:
        body["include_stop_str_in_output"] = True
    if call.output_logprobs is not None:
        # Nought would mean no scores at all; the sink lets the candidate go that nobody asked for.
        wanted = max(1, _candidates_of(call))
        if format_of(call):
            body |= {"logprobs": True, "top_logprobs": wanted}
        else:
            body[spellings.get("logprobs", "logprobs")] = wanted
    if call.guide is not None:
        body["response_format"] = _response_format(call.guide)
    return body


def _candidates_of(call: ports.GenerateCall) -> int:
    wish = call.output_logprobs.candidates if call.output_logprobs is not None else None
    return wish.top_n if isinstance(wish, ports.TopCandidates) else 0


def _prompt_of(call: ports.GenerateCall) -> dict[str, Any]:
    """The part of the body that holds the prompt, by its format."""
    wanted = format_of(call)
    if not wanted:
        return {"prompt": call.prompt}
    try:
        value = orjson.loads(call.prompt if isinstance(call.prompt, str) else "")
    except orjson.JSONDecodeError:
        value = None
    if wanted == MESSAGES_FORMAT and isinstance(value, list):
        return {"messages": value}
    if wanted == OPENAI_FORMAT and isinstance(value, dict) and isinstance(value.get("messages"), list):
        return value
    raise InvalidRequest(
        "`prompt` must be a JSON list of messages."
        if wanted == MESSAGES_FORMAT
        else "`prompt` must be a JSON object with `messages`.",
        reason="BAD_PROMPT",
        details={"field": "prompt"},
    )


def _response_format(guide: ports.Guide) -> dict[str, Any]:
    """A guide in OpenAI's words.

    Raises:
        InvalidRequest: the schema is not JSON.
        Unsupported: no words for it.
    """
    if guide.kind == "json_object":
        return {"type": "json_object"}
    if guide.kind != "json_schema":
        raise Unsupported(
            f"`guided.{guide.kind}` is not offered by this provider.", reason="UNSUPPORTED_FEATURE"
        )
    try:
        schema = orjson.loads(guide.value if isinstance(guide.value, str) else "")
    except orjson.JSONDecodeError:
        raise InvalidRequest(
            "`guided.json_schema` must be JSON.",
            reason="INVALID_FIELD",
            details={"field": "guided.json_schema"},
        ) from None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
