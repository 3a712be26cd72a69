"""Generations as protobuf: the request in, the events out (SF-20)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, assert_never

from google.protobuf.json_format import MessageToDict

from iop.admin.codec import RecordCodec
from iop.api.grpc.ports import (
    Candidate,
    EveryCandidate,
    GenerateCall,
    GenerationEvent,
    Guide,
    LogprobWish,
    MediaItem,
    OutputFinish,
    OutputFinished,
    OutputTokens,
    PromptScored,
    RequestFailed,
    RoutingHints,
    SamplingParams,
    ScoredToken,
    StopMatch,
    Stopping,
    TheseCandidates,
    TopCandidates,
    Usage,
)
from iop.core.errors import InvalidRequest, RemoteProtocolError
from iop.pb.openengine.v1 import error_pb2
from iop.pb.openengine.v1 import generation_pb2 as pb

__all__ = ["decode_event", "decode_generate", "encode_event", "encode_generate"]

REQUEST_ID_CHARS_MAX: Final = 128
"""Longest request id; it stands in every message of the answer and in every log line."""

ERROR_CHARS_MAX: Final = 512
"""Most of another server's words in an error that is passed on."""

_FINISHES: Final = frozenset(int(reason) for reason in OutputFinish)

_CODEC: Final = RecordCodec(error=InvalidRequest)


def decode_generate(
    request: pb.GenerateRequest, *, request_id: str, hints: RoutingHints, caller: str
) -> GenerateCall:
    """Read a request; `request_id` is used where it has none of its own.

    Raises:
        InvalidRequest: a required part is missing or malformed, by field.
    """
    if len(request.request_id) > REQUEST_ID_CHARS_MAX or not request.request_id.isprintable():
        raise _bad("request_id", f"must be at most {REQUEST_ID_CHARS_MAX} printable characters")
    sampling = _CODEC.decode(request.sampling, SamplingParams, path="sampling.")
    response = request.response
    return GenerateCall(
        request_id=request.request_id or request_id,
        model=request.model,
        prompt=_prompt_of(request),
        sampling=sampling,
        stopping=_stopping_of(request.stopping),
        prompt_logprobs=_wish_of(
            is_wanted=response.return_prompt_logprobs,
            selection=response.prompt_candidates,
            field="response.prompt_candidates",
            start=response.prompt_logprob_start,
            is_start_said=response.HasField("prompt_logprob_start"),
        ),
        output_logprobs=_wish_of(
            is_wanted=response.return_output_logprobs,
            selection=response.output_candidates,
            field="response.output_candidates",
        ),
        guide=_guide_of(request),
        media=tuple(_media_of(item, f"media[{index}]") for index, item in enumerate(request.media)),
        lora_name=request.lora_name,
        cache_salt=request.kv.cache_salt if request.kv.HasField("cache_salt") else None,
        bypass_prefix_cache=request.kv.bypass_prefix_cache,
        kv_session=request.kv.session.SerializeToString() if request.kv.HasField("session") else None,
        extra=MessageToDict(request.extra) if request.HasField("extra") else {},
        hints=hints,
        caller=caller,
        message=request,
    )


def encode_generate(call: GenerateCall) -> bytes:
    """A request for another OpenEngine server, as it came; who sends it on sets the id and the model."""
    assert isinstance(call.message, pb.GenerateRequest), "it came as one"
    return call.message.SerializeToString()


def _prompt_of(request: pb.GenerateRequest) -> str | tuple[int, ...]:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "token_ids":
            return tuple(request.token_ids.ids)
        case _:
            raise _bad("input", "must be prompt or token_ids")


def _stopping_of(message: pb.StoppingOptions) -> Stopping:
    texts: list[str] = []
    token_ids: list[int] = []
    for index, condition in enumerate(message.conditions):
        match condition.WhichOneof("condition"):
            case "stop_text":
                texts.append(condition.stop_text)
            case "stop_token_id":
                token_ids.append(condition.stop_token_id)
            case _:
                raise _bad(f"stopping.conditions[{index}]", "must be stop_text or stop_token_id")
    return Stopping(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        stop=tuple(texts),
        stop_token_ids=tuple(token_ids),
        ignore_eos=message.ignore_eos if message.HasField("ignore_eos") else None,
        include_stop_in_output=(
            message.include_stop_in_output if message.HasField("include_stop_in_output") else None
        ),
    )


def _wish_of(
    *,
    is_wanted: bool,
    selection: pb.CandidateTokenSelection,
    field: str,
    start: int = 0,
    is_start_said: bool = False,
) -> LogprobWish | None:
    chosen = selection.WhichOneof("selection")
    if not is_wanted:
        if is_start_said:
            raise _bad("response.prompt_logprob_start", "needs response.return_prompt_logprobs")
        if chosen is not None:
            raise _bad(field, "needs the log probabilities themselves to be asked for")
        return None
    match chosen:
        case "top_n":
            return LogprobWish(candidates=TopCandidates(top_n=selection.top_n), start=start)
        case "token_ids":
            token_ids = tuple(selection.token_ids.ids)
            return LogprobWish(candidates=TheseCandidates(token_ids=token_ids), start=start)
        case "all":
            return LogprobWish(candidates=EveryCandidate(), start=start)
        case _:
            return LogprobWish(start=start)


def _guide_of(request: pb.GenerateRequest) -> Guide | None:
    if not request.HasField("guided"):
        return None
    guided = request.guided
    kind = guided.WhichOneof("guide")
    match kind:
        case None:
            raise _bad("guided", "must name a guide")
        case "choice":
            return Guide(kind=kind, value=tuple(guided.choice.choices), backend=guided.backend)
        case "json_object":
            return Guide(kind=kind, backend=guided.backend)
        case _:
            return Guide(kind=kind, value=str(getattr(guided, kind)), backend=guided.backend)


def _media_of(item: pb.MediaItem, field: str) -> MediaItem:
    source = item.WhichOneof("source")
    if source is None:
        raise _bad(field, "must have a url, data_uri or raw_bytes")
    if item.modality not in pb.Modality.values() or item.modality == pb.MODALITY_UNSPECIFIED:
        raise _bad(f"{field}.modality", "must be image, video or audio")
    modality = pb.Modality.Name(item.modality).removeprefix("MODALITY_").lower()
    return MediaItem(
        modality=modality,
        source=source,
        value=getattr(item, source),
        mime_type=item.mime_type,
        uuid=item.uuid,
    )


def encode_event(request_id: str, event: GenerationEvent, usage: Usage | None) -> pb.GenerateResponse:
    """One message of the answer; `usage` only with the last one (SF-20)."""
    message = pb.GenerateResponse(request_id=request_id)
    match event:
        case OutputTokens():
            token = message.token
            token.output_index = event.output_index
            token.text = event.text
            _add_tokens(token.tokens, event.tokens)
        case OutputFinished():
            _encode_finished(event, message.finished)
        case PromptScored():
            message.prompt.SetInParent()
            _add_tokens(message.prompt.tokens, event.tokens)
        case RequestFailed():
            message.error.code = error_pb2.ErrorCode.Value(f"ERROR_CODE_{event.code}")
            message.error.message = event.message
            message.error.retryable = event.retryable
        case _:
            assert_never(event)
    if usage is not None:
        _encode_usage(usage, message.usage)
    return message


def decode_event(message: pb.GenerateResponse) -> GenerationEvent | None:
    """The event of another server's message; None for what has no meaning to us, or none of its own.

    Raises:
        RemoteProtocolError: it is none that may come here.
    """
    match message.WhichOneof("event"):
        case "token":
            token = message.token
            return OutputTokens(
                output_index=token.output_index, tokens=_scored(token.tokens), text=token.text
            )
        case "prompt":
            return PromptScored(tokens=_scored(message.prompt.tokens))
        case "finished":
            told = message.finished
            if told.reason not in _FINISHES:
                raise RemoteProtocolError("An output ended for no reason.", reason="NO_FINISH_REASON")
            match = told.stop_match.WhichOneof("match")
            return OutputFinished(
                output_index=told.output_index,
                reason=OutputFinish(told.reason),
                message=told.message,
                stop_match=None if match is None else StopMatch(**{match: getattr(told.stop_match, match)}),
            )
        case "error":
            error = message.error
            known = error.code in error_pb2.ErrorCode.values() and error.code
            name = error_pb2.ErrorCode.Name(error.code) if known else "ERROR_CODE_INTERNAL"
            return RequestFailed(
                code=name.removeprefix("ERROR_CODE_"),
                message=error.message[:ERROR_CHARS_MAX],
                retryable=error.retryable,
            )
        case "prefill_ready":
            raise RemoteProtocolError("The engine only prefills.", reason="PREFILL_ONLY")
        case _:
            return None


def _scored(tokens: Iterable[pb.TokenInfo]) -> tuple[ScoredToken, ...]:
    # Per token on the hot path, as in `_add_tokens`.
    return tuple(
        ScoredToken(
            token_id=token.token_id,
            token=token.token,
            logprob=token.logprob if token.HasField("logprob") else None,
            rank=token.rank if token.HasField("rank") else None,
            candidates=tuple(
                Candidate(
                    token_id=other.token_id,
                    logprob=other.logprob,
                    token=other.token,
                    rank=other.rank if other.HasField("rank") else None,
                )
                for other in token.candidates
            ),
        )
        for token in tokens
    )


def _encode_finished(event: OutputFinished, message: pb.GenerationFinished) -> None:
    message.output_index = event.output_index
    message.reason = pb.FinishReason.Value(f"FINISH_REASON_{event.reason.name}")
    message.message = event.message
    if event.stop_match is not None:
        _CODEC.encode(event.stop_match, message.stop_match)


def _encode_usage(usage: Usage, message: pb.Usage) -> None:
    _CODEC.encode(usage, message)
    message.total_tokens = usage.prompt_tokens + usage.completion_tokens


def _add_tokens(repeated: Any, tokens: Iterable[ScoredToken]) -> None:
    # Per token on the hot path: written out, not walked by the record codec.
    for token in tokens:
        message = repeated.add(token_id=token.token_id, token=token.token)
        if token.logprob is not None:
            message.logprob = token.logprob
        if token.rank is not None:
            message.rank = token.rank
        for candidate in token.candidates:
            _CODEC.encode(candidate, message.candidates.add())


def _bad(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"`{field}` {rule}.", reason="INVALID_FIELD", details={"field": field})
