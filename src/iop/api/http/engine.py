"""The reference engine's own OpenAI routes: what a provider looks like to the fleet, and to anybody directly.

A request is decoded, rendered and offered to the engine; the engine's acceptance decides between an HTTP
error and an answer. An accepted request lives in one task: when the caller leaves, the task is cancelled
and with it the generation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import orjson

from iop.api.http.engine_answers import (
    AnswerShape,
    ChatShape,
    ChoiceState,
    CompletionShape,
    echo_prompt,
    sse_data,
)
from iop.api.http.engine_requests import (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    chat_messages,
    chat_request,
    completion_prompts,
    completion_request,
    decode,
)
from iop.api.http.errors import Dialect, error_body, error_event, error_headers, error_status
from iop.api.http.exchange import Exchange
from iop.api.http.head import HeaderList, check_body_coding
from iop.api.http.headers import request_id_of
from iop.api.http.limits import ByteBudget, HttpLimits
from iop.api.http.routing import Routes
from iop.core.clock import Clock
from iop.core.errors import Cancelled, InvalidRequest, IopError, NotFound, Unavailable
from iop.engine import (
    Counters,
    Engine,
    EngineState,
    Finished,
    FinishReason,
    GenerationRequest,
    GenerationStream,
    PromptScored,
    TokenChunk,
    TokenLogprob,
    Usage,
)

__all__ = ["EngineHttp"]

_JSON: Final[HeaderList] = [(b"content-type", b"application/json")]
_SSE: Final[HeaderList] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
_METRICS: Final[HeaderList] = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
_GAUGES: Final = frozenset(
    {"running", "waiting", "kept", "kv_blocks_used", "kv_blocks_total", "prefix_entries"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One prompt of a request: its generation, where its alternatives are numbered from, and what to echo."""

    request: GenerationRequest
    first_index: int
    echo: str | None = None


class EngineHttp:
    """Handler of the engine's HTTP listener.

    Args:
        engine: started.
        limits: body and header limits.
        clock: for ``created``.
        make_id: makes ids that are unique in this process.
    """

    def __init__(
        self, engine: Engine, *, limits: HttpLimits, clock: Clock, make_id: Callable[[], str]
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._make_id = make_id
        self._budget = ByteBudget(limits.buffered_bytes)
        get, post = b"GET", b"POST"
        self._routes: Routes[Callable[[Exchange, bytes], None]] = Routes(
            {
                (get, b"/health"): self._health,
                (get, b"/metrics"): self._metrics,
                (get, b"/v1/models"): self._models,
                (post, b"/v1/chat/completions"): self._chat,
                (post, b"/v1/chat/completions/input_tokens"): self._count,
                (post, b"/v1/completions"): self._completions,
                (post, b"/tokenize"): self._tokenize,
            },
            prefix=(b"/v1/models/", self._model),
        )

    # ---- HttpHandler ----

    def on_head(self, exchange: Exchange) -> None:
        """Refuse unknown paths before their body is read."""
        try:
            exchange.data = self._routes.find(exchange.head.method, exchange.head.path)
            check_body_coding(exchange.head)
        except IopError as error:
            self.on_error(exchange, error)
            return
        exchange.accept_body(limit_bytes=self._limits.body_bytes, budgets=(self._budget,))

    def on_request(self, exchange: Exchange, body: Sequence[bytes]) -> None:
        """Hand the request to its route."""
        route, rest = exchange.data
        route(exchange, rest or b"".join(body))

    def on_error(self, exchange: Exchange, error: IopError) -> None:
        """Answer in OpenAI's error shape."""
        request_id = self._request_id(exchange)
        headers = [*error_headers(error), (b"x-request-id", request_id.encode("ascii"))]
        exchange.respond(error_status(error), headers, error_body(error, Dialect.CHAT, request_id))

    def on_left(self, exchange: Exchange) -> None:
        """Nothing of a request is kept beside its exchange."""

    # ---- reading routes ----

    def _health(self, exchange: Exchange, _body: bytes) -> None:
        state = self._engine.state
        serving = state in (EngineState.SERVING, EngineState.PAUSED)
        exchange.respond(200 if serving else 503, _JSON, orjson.dumps({"status": state.value.lower()}))

    def _metrics(self, exchange: Exchange, _body: bytes) -> None:
        exchange.respond(200, _METRICS, _render_metrics(self._engine.counters()))

    def _models(self, exchange: Exchange, _body: bytes) -> None:
        exchange.respond(200, _JSON, orjson.dumps({"object": "list", "data": [self._model_entry()]}))

    def _model(self, exchange: Exchange, name: bytes) -> None:
        self._check_model(name.decode("utf-8", "replace"))
        exchange.respond(200, _JSON, orjson.dumps(self._model_entry()))

    def _model_entry(self) -> dict[str, Any]:
        info = self._engine.info
        return {
            "id": info.model_id,
            "object": "model",
            "created": self._clock.unix_nanos() // 1_000_000_000,
            "owned_by": info.name,
            "max_model_len": info.context_tokens,
        }

    def _check_model(self, name: str | None) -> None:
        served = self._engine.info.model_id
        if name is not None and name != served:
            raise NotFound(
                f"There is no model of that name here; this engine serves `{served}`.",
                reason="MODEL_NOT_FOUND",
                details={"field": "model"},
            )

    def _count(self, exchange: Exchange, body: bytes) -> None:
        count = len(self._prompt_ids(decode(body, TokenizeBody)))
        value = {"object": "response.input_tokens", "input_tokens": count}
        exchange.respond(200, _JSON, orjson.dumps(value))

    def _tokenize(self, exchange: Exchange, body: bytes) -> None:
        ids = self._prompt_ids(decode(body, TokenizeBody))
        value = {"count": len(ids), "max_model_len": self._engine.info.context_tokens, "tokens": list(ids)}
        exchange.respond(200, _JSON, orjson.dumps(value))

    def _prompt_ids(self, body: TokenizeBody) -> tuple[int, ...]:
        self._check_model(body.model)
        if body.messages is not None:
            return self._engine.render_chat(chat_messages(body.messages)).token_ids
        if body.prompt is not None:
            return self._engine.tokenize(body.prompt)
        raise InvalidRequest("Send `messages` or `prompt`.", details={"field": "messages"})

    # ---- generating routes ----

    def _chat(self, exchange: Exchange, body: bytes) -> None:
        chat = decode(body, ChatBody)
        self._check_model(chat.model)
        prompt = self._engine.render_chat(chat_messages(chat.messages))
        request = chat_request(chat, request_id=self._make_id(), prompt=prompt.token_ids)
        shape = ChatShape(
            answer_id=f"chatcmpl-{request.request_id}",
            created=self._clock.unix_nanos() // 1_000_000_000,
            model=self._engine.info.model_id,
            fingerprint=self._engine.weight_version,
            has_logprobs=request.logprobs is not None,
            has_usage=chat.stream_options is not None and chat.stream_options.include_usage,
        )
        self._generate(exchange, chat, shape, [_Run(request=request, first_index=0)])

    def _completions(self, exchange: Exchange, body: bytes) -> None:
        completion = decode(body, CompletionBody)
        self._check_model(completion.model)
        runs = []
        answer_id = self._make_id()
        for number, prompt in enumerate(completion_prompts(completion)):
            request = completion_request(completion, request_id=f"{answer_id}-{number}", prompt=prompt)
            runs.append(
                _Run(
                    request=request,
                    first_index=number * request.n,
                    echo=self._echo(prompt) if completion.echo else None,
                )
            )
        options = completion.stream_options
        shape = CompletionShape(
            answer_id=f"cmpl-{answer_id}",
            created=self._clock.unix_nanos() // 1_000_000_000,
            model=self._engine.info.model_id,
            fingerprint=self._engine.weight_version,
            has_logprobs=completion.logprobs is not None,
            has_usage=options is not None and options.include_usage,
        )
        self._generate(exchange, completion, shape, runs)

    def _echo(self, prompt: str | tuple[int, ...]) -> str:
        return prompt if isinstance(prompt, str) else self._engine.detokenize(prompt)

    def _generate(
        self,
        exchange: Exchange,
        body: ChatBody | CompletionBody,
        shape: ChatShape | CompletionShape,
        runs: list[_Run],
    ) -> None:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest(
                "`stream_options` needs `stream`: true.", details={"field": "stream_options"}
            )
        request_id = self._request_id(exchange).encode("ascii")
        answer = _Answer(exchange, shape, is_stream=bool(body.stream), request_id=request_id)
        exchange.release_body()  # what is needed of it has been read into the request
        names = _CHAT_NAMES if isinstance(body, ChatBody) else _COMPLETION_NAMES
        exchange.run(
            _in_the_bodys_words(names, answer.give(self._engine, runs)), name=f"answer-{shape.answer_id}"
        )

    def _request_id(self, exchange: Exchange) -> str:
        return request_id_of(exchange.head) or self._make_id()


_CHAT_NAMES: Final = {"prompt": "messages", "logprobs": "top_logprobs"}
_COMPLETION_NAMES: Final = {"token_ids": "prompt"}
"""Fields of the engine's own request, by the names that they have in the body."""


async def _in_the_bodys_words(names: Mapping[str, str], work: Awaitable[None]) -> None:
    """Name the field that the caller wrote, where the engine knows it by another name."""
    try:
        await work
    except InvalidRequest as error:
        field = error.details.get("field", "")
        if field not in names:
            raise
        raise InvalidRequest(
            error.message.replace(f"`{field}`", f"`{names[field]}`"),
            reason=error.reason,
            details={**error.details, "field": names[field]},
        ) from error


class _Answer:
    """One request's answer as it grows."""

    def __init__(
        self, exchange: Exchange, shape: ChatShape | CompletionShape, *, is_stream: bool, request_id: bytes
    ) -> None:
        self._exchange = exchange
        self._shape: AnswerShape = shape
        self._has_usage = shape.has_usage
        self._is_stream = is_stream
        self._request_id = request_id
        self._choices: dict[int, ChoiceState] = {}
        self._usage = Usage(prompt_tokens=0, completion_tokens=0, cached_prompt_tokens=0)

    async def give(self, engine: Engine, runs: list[_Run]) -> None:
        """Generate and answer; leaving it in any way ends what still runs in the engine."""
        async with contextlib.AsyncExitStack() as stack:
            # All are accepted before the first is read: a refusal is an HTTP status, not half an answer.
            streams = [(run, await stack.enter_async_context(engine.generate(run.request))) for run in runs]
            try:
                for run, stream in streams:
                    await self._follow(engine, run, stream)
            except IopError as error:
                if not self._exchange.is_started:
                    raise
                self._exchange.write(error_event(error, Dialect.CHAT))
                self._exchange.end()
                return
        self._finish()

    async def _follow(self, engine: Engine, run: _Run, stream: GenerationStream) -> None:
        scored: PromptScored | None = None
        async for event in stream:
            if isinstance(event, PromptScored):
                scored = event
                continue
            index = run.first_index + event.index
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = ChoiceState(index=index)
                if run.echo is not None:
                    echo_prompt(choice, run.echo, _scores(engine, scored))
                if self._is_stream:
                    self._open(choice)
            if isinstance(event, Finished):
                self._close(choice, event)
            else:
                self._add(choice, event)
            if not self._exchange.is_writable:
                await self._exchange.wait_writable()

    def _open(self, choice: ChoiceState) -> None:
        if not self._exchange.is_started:
            self._exchange.start(200, [*_SSE, (b"x-request-id", self._request_id)])
        opening = self._shape.opening(choice)
        if opening is not None:
            self._exchange.write(sse_data(opening))

    def _add(self, choice: ChoiceState, chunk: TokenChunk) -> None:
        if not self._is_stream:
            choice.texts.append(chunk.text)
            choice.logprobs.extend(chunk.logprobs)
        elif chunk.text or chunk.logprobs:
            self._exchange.write(sse_data(self._shape.piece(choice, chunk)))
        choice.text_length += len(chunk.text)

    def _close(self, choice: ChoiceState, finished: Finished) -> None:
        if finished.reason is FinishReason.ABORTED:
            raise Unavailable(finished.message or "The request was ended by an operator.", reason="ABORTED")
        if finished.reason is FinishReason.CANCELLED:
            raise Cancelled("The request was cancelled.")
        choice.finish = finished
        if finished.usage is not None:
            total, part = self._usage, finished.usage
            self._usage = Usage(
                prompt_tokens=total.prompt_tokens + part.prompt_tokens,
                completion_tokens=total.completion_tokens + part.completion_tokens,
                cached_prompt_tokens=total.cached_prompt_tokens + part.cached_prompt_tokens,
            )
        if self._is_stream:
            self._exchange.write(sse_data(self._shape.closing(choice, finished)))

    def _finish(self) -> None:
        if self._is_stream:
            last = sse_data(self._shape.usage(self._usage)) if self._has_usage else b""
            self._exchange.write(last + b"data: [DONE]\n\n")
            self._exchange.end()
            return
        choices = [self._choices[index] for index in sorted(self._choices)]
        body = orjson.dumps(self._shape.whole(choices, self._usage))
        self._exchange.respond(200, [*_JSON, (b"x-request-id", self._request_id)], body)


def _scores(engine: Engine, scored: PromptScored | None) -> list[TokenLogprob | str]:
    """Scores of the prompt's tokens as the caller wrote them: the mark that opens every text is not one of
    them.
    """
    if scored is None:
        return []
    pairs = zip(scored.token_ids, scored.logprobs, strict=True)
    return [
        engine.detokenize((token,)) if score is None else score
        for token, score in pairs
        if token != engine.info.bos_token_id
    ]


def _render_metrics(counters: Counters) -> bytes:
    lines = []
    for item in fields(counters):
        kind = "gauge" if item.name in _GAUGES else "counter"
        name = f"iop_engine_{item.name}" + ("" if kind == "gauge" else "_total")
        lines.append(f"# TYPE {name} {kind}\n{name} {getattr(counters, item.name)}\n")
    return "".join(lines).encode("ascii")
