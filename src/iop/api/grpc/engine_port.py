"""The reference engine as Inference and Control see it (SF-20 to SF-23)."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import replace
from typing import Final, Self, TypeVar

import msgspec

from iop.admin.enums import EngineRole, PauseMode
from iop.api.grpc import ports
from iop.core.clock import Clock
from iop.core.errors import InvalidRequest, IopError, NotFound
from iop.engine import (
    ChatMessage,
    Engine,
    EngineState,
    Finished,
    FinishReason,
    GenerationRequest,
    GenerationStream,
    PromptScored,
    Sampling,
    Stopping,
    TokenChunk,
    TokenLogprob,
)
from iop.engine.generation import SEQUENCES_MAX, TOP_LOGPROBS_MAX

__all__ = ["EnginePort"]

Number = TypeVar("Number", int, float)

FINISHED_IDS_MAX: Final = 4096
"""How many ended requests are remembered, so that a late abort learns that there was nothing left to end."""

READ_BACK_TIMEOUT_S: Final = 5.0
"""How long a health check waits for the ranks; one that does not answer by then is not healthy."""

PROBE_TIMEOUT_S: Final = 30.0
"""How long the tiny generation of a health probe may take; it waits in the queue like any other."""

CHAT_FORMAT: Final = "chat_messages"
"""The prompt format of chat messages that the engine renders with its own template."""

_FINISHES: Final = {
    FinishReason.STOP: ports.OutputFinish.STOP,
    FinishReason.LENGTH: ports.OutputFinish.LENGTH,
    FinishReason.CANCELLED: ports.OutputFinish.CANCELLED,
}


class _Message(msgspec.Struct):
    role: str
    content: str


class EnginePort:
    """Implements the inference and the control port over one engine in this process.

    Args:
        engine: may still be starting; what needs it then raises Unavailable.
        clock: dates load reports.
    """

    def __init__(self, engine: Engine, *, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._live: dict[str, _EngineStream] = {}
        self._finished: OrderedDict[str, str] = OrderedDict()

    # ------------------------------------------------------------------------------------------ inference

    @property
    def is_serving(self) -> bool:
        """Whether a request would start now (AD-06)."""
        return self._engine.state is EngineState.SERVING

    def model_info(self, model: str) -> ports.ModelInfo:
        """What the one model can do. Raises NotFound for any other name."""
        info = self._engine.info
        if model not in {"", info.model_id}:
            raise NotFound(
                f"There is no model {model[:128]!r} here; there is {info.model_id!r}.",
                reason="MODEL_NOT_FOUND",
                details={"model": model[:128]},
            )
        logprobs = ports.LogprobCapabilities(
            supported=True,
            candidate_selection_modes=(ports.CandidateMode.TOP_N,),
            max_top_n=TOP_LOGPROBS_MAX,
        )
        return ports.ModelInfo(
            model_id=info.model_id,
            served_model_name=info.model_id,
            max_context_length=info.context_tokens,
            tokenizer_modes=("text", CHAT_FORMAT),
            supports_text_input=True,
            supports_token_ids_input=True,
            generation=ports.GenerationCapabilities(
                prompt_logprobs=logprobs,
                output_logprobs=logprobs,
                guided_decoding=ports.GuidedCapabilities(supported=False),
                max_num_sequences=SEQUENCES_MAX,
                supports_priority=True,
                supports_stop_in_output=True,
                supports_cache_salt=False,
                supports_prefix_cache_bypass=False,
            ),
            supports_lora=False,
            supports_multimodal=False,
        )

    async def generate(self, call: ports.GenerateCall) -> _EngineStream:
        """Accept a request, or raise what the engine raises."""
        if call.extra.get("prompt_format") == CHAT_FORMAT:
            call = replace(call, prompt=self._render_chat(call.prompt))
        stream = self._engine.generate(_to_engine(call))
        accepted = _EngineStream(self, call, stream, self._engine)
        self._live[call.request_id] = accepted
        return accepted

    def _render_chat(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        """Messages as JSON, through the model's own template."""
        try:
            messages = msgspec.json.decode(prompt if isinstance(prompt, str) else "", type=list[_Message])
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as exc:
            raise InvalidRequest(
                '`prompt` must be a JSON list of {"role", "content"} with this prompt_format.',
                reason="BAD_PROMPT",
                details={"field": "prompt"},
            ) from exc
        rendered = self._engine.render_chat(
            [ChatMessage(role=message.role, content=message.content) for message in messages]
        )
        return rendered.token_ids

    # ------------------------------------------------------------------------------------------ control

    def server_info(self) -> ports.ServerInfo:
        """What the engine is."""
        info = self._engine.info
        return ports.ServerInfo(
            engine_name=info.name,
            engine_version=info.version,
            instance_id=info.instance_id,
            supported_models=(info.model_id,),
            parallelism=ports.Parallelism(
                tensor_parallel_size=info.ranks,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                data_parallel_rank=0,
                data_parallel_start_rank=0,
            ),
            capacity=ports.Deployment(
                kv_block_size=info.kv_block_tokens,
                total_kv_blocks=info.kv_blocks_total,
                max_running_requests=info.slots,
                max_loras=0,
            ),
        )

    async def load(self, *, include_per_rank: bool) -> ports.LoadInfo:
        """How busy the engine is; its tensor-parallel ranks are one data-parallel rank."""
        counters = self._engine.counters()
        rank = ports.RankLoad(
            data_parallel_rank=0,
            running_requests=counters.running,
            queued_requests=counters.waiting,
            used_kv_blocks=counters.kv_blocks_used,
            total_kv_blocks=counters.kv_blocks_total,
        )
        return ports.LoadInfo(
            instance_id=self._engine.info.instance_id,
            timestamp_unix_nanos=self._clock.unix_nanos(),
            running_requests=counters.running,
            queued_requests=counters.waiting,
            active_kv_sessions=0,
            used_kv_blocks=counters.kv_blocks_used,
            total_kv_blocks=counters.kv_blocks_total,
            ranks=(rank,) if include_per_rank else (),
        )

    async def health(
        self,
        *,
        model: str,
        role: EngineRole | None,
        include_probe: bool,
        may_use: ports.MayUse = ports.any_model,  # noqa: ARG002 - its one model is all that it is
    ) -> ports.HealthReport:
        """How scheduler and ranks are; with a probe also whether a token comes out."""
        checks = [await self._scheduler_health()]
        if checks[0].state is not ports.HealthState.STARTING:
            self.model_info(model)
        if role not in {None, EngineRole.AGGREGATED}:
            checks.append(_part("role", ports.HealthState.NOT_READY, "this engine prefills and decodes"))
        if include_probe:
            checks.append(await self._probe())
        # The first that is not ready is the sum: the probe fails because the scheduler stands, not beside it.
        worst = next((check for check in checks if check.state is not ports.HealthState.READY), checks[0])
        return ports.HealthReport(state=worst.state, checks=tuple(checks))

    async def abort(self, request_id: str, *, caller: str | None) -> ports.AbortOutcome:
        """End one request of this caller; somebody else's is as unknown as one that never was (SF-23)."""
        live = self._live.get(request_id)
        if live is not None and caller in {None, live.caller}:
            live.is_aborted_by_caller = caller is not None
            message = "aborted by its caller" if caller is not None else "aborted by an operator"
            if self._engine.abort(request_id, message=message):
                return ports.AbortOutcome.ABORTED
            return ports.AbortOutcome.ALREADY_FINISHED
        owner = self._finished.get(request_id)
        if owner is not None and caller in {None, owner}:
            return ports.AbortOutcome.ALREADY_FINISHED
        raise NotFound(
            "There is no such request of yours.",
            reason="REQUEST_NOT_FOUND",
            details={"request_id": request_id[:128]},
        )

    async def abort_all(self) -> int:
        """End every request that came through this port."""
        ids = list(self._live)
        return sum(self._engine.abort(request_id, message="all requests were aborted") for request_id in ids)

    def on_ended(self, request_id: str, caller: str) -> None:
        """A stream of ours is over; remember that it was."""
        if self._live.pop(request_id, None) is None:
            return
        self._finished[request_id] = caller
        self._finished.move_to_end(request_id)
        if len(self._finished) > FINISHED_IDS_MAX:
            self._finished.popitem(last=False)

    async def _scheduler_health(self) -> ports.HealthPart:
        match self._engine.state:
            case EngineState.STARTING:
                return _part("scheduler", ports.HealthState.STARTING, "loading")
            case EngineState.SERVING:
                return _part("scheduler", ports.HealthState.READY)
            case EngineState.FAILED | EngineState.CLOSED:
                return _part("scheduler", ports.HealthState.NOT_READY, "not running")
            case EngineState.PAUSED:
                # A drain is seen as such by those who knew the older Drain call (AD-103).
                is_drain = await self._pause_mode() is PauseMode.DRAIN
                state = ports.HealthState.DRAINING if is_drain else ports.HealthState.NOT_READY
                return _part("scheduler", state, "paused")

    async def _pause_mode(self) -> PauseMode | None:
        try:
            async with asyncio.timeout(READ_BACK_TIMEOUT_S):
                ranks = await self._engine.read_back()
        except (IopError, TimeoutError):
            return None
        return ranks[0].mode if ranks else None

    async def _probe(self) -> ports.HealthPart:
        if not self.is_serving:
            return _part("inference", ports.HealthState.NOT_READY, "not serving")
        request = GenerationRequest(
            request_id=f"health-probe-{secrets.token_hex(8)}",
            prompt=(self._engine.info.bos_token_id,),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=1, ignore_eos=True),
        )
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S), self._engine.generate(request) as stream:
                async for event in stream:
                    if isinstance(event, Finished) and event.reason is FinishReason.LENGTH:
                        return _part("inference", ports.HealthState.READY)
        except TimeoutError:
            return _part("inference", ports.HealthState.DEGRADED, "no token in time")
        except IopError as error:
            return _part("inference", ports.HealthState.NOT_READY, error.message)
        return _part("inference", ports.HealthState.DEGRADED, "the probe was ended")


class _EngineStream:
    """One accepted request: the engine's events as the port's."""

    def __init__(
        self, port: EnginePort, call: ports.GenerateCall, stream: GenerationStream, engine: Engine
    ) -> None:
        self._port = port
        self._call = call
        self._stream = stream
        self._engine = engine
        self._is_over = False
        self.caller = call.caller
        self.weight_version = stream.weight_version
        self.is_aborted_by_caller = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Nothing: an engine has no queue of its own to tell of."""
        return ()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[ports.GenerationEvent, ports.Usage | None]:
        if self._is_over:
            raise StopAsyncIteration
        try:
            event = await anext(self._stream)
        except BaseException:
            self._end()
            raise
        match event:
            case TokenChunk():
                self.weight_version = event.weight_version
                return _tokens(event), None
            case PromptScored():
                return self._scored_prompt(event), None
            case Finished(reason=FinishReason.ABORTED):
                return await self._aborted(event)
            case Finished():
                if event.usage is not None:
                    self._end()
                return _finished(event), _usage(event)

    async def aclose(self) -> None:
        self._end()
        await self._stream.aclose()

    async def _aborted(self, event: Finished) -> tuple[ports.GenerationEvent, ports.Usage | None]:
        """An operator, or the caller by another call, ended the request: one error for all of its outputs."""
        usage = _usage(event)
        async for later in self._stream:
            if isinstance(later, Finished) and later.usage is not None:
                usage = _usage(later)
        self._end()
        failed = ports.RequestFailed(
            code="CANCELLED" if self.is_aborted_by_caller else "DRAINING",
            message=event.message or "The request was ended by an operator.",
            retryable=not self.is_aborted_by_caller,
        )
        return failed, usage

    def _scored_prompt(self, event: PromptScored) -> ports.PromptScored:
        start = self._call.prompt_logprobs.start if self._call.prompt_logprobs is not None else 0
        scored = [
            _scored(score) if score is not None else self._unscored(token_id)
            for token_id, score in zip(event.token_ids, event.logprobs, strict=True)
        ]
        return ports.PromptScored(tokens=tuple(scored[start:]))

    def _unscored(self, token_id: int) -> ports.ScoredToken:
        return ports.ScoredToken(token_id=token_id, token=self._engine.detokenize((token_id,)))

    def _end(self) -> None:
        self._is_over = True
        self._port.on_ended(self._call.request_id, self._call.caller)


def _to_engine(call: ports.GenerateCall) -> GenerationRequest:
    wanted, stopping = call.sampling, call.stopping
    usual = Sampling()
    return GenerationRequest(
        request_id=call.request_id,
        prompt=call.prompt,
        sampling=Sampling(
            temperature=_or(wanted.temperature, usual.temperature),
            top_p=_or(wanted.top_p, usual.top_p),
            top_k=_or(wanted.top_k, usual.top_k),
            min_p=_or(wanted.min_p, usual.min_p),
            frequency_penalty=_or(wanted.frequency_penalty, usual.frequency_penalty),
            presence_penalty=_or(wanted.presence_penalty, usual.presence_penalty),
            repetition_penalty=_or(wanted.repetition_penalty, usual.repetition_penalty),
            seed=wanted.seed,
        ),
        stopping=Stopping(
            max_tokens=stopping.max_tokens,
            min_tokens=_or(stopping.min_tokens, 0),
            stop=stopping.stop,
            stop_token_ids=stopping.stop_token_ids,
            ignore_eos=bool(stopping.ignore_eos),
            include_stop_in_output=bool(stopping.include_stop_in_output),
        ),
        n=_or(wanted.num_sequences, 1),
        logprobs=_top_n(call.output_logprobs),
        prompt_logprobs=_top_n(call.prompt_logprobs),
        priority=-_or(call.hints.priority, 0),  # the protocol's high ones come first, the engine's low ones
    )


def _or(value: Number | None, usual: Number) -> Number:
    return usual if value is None else value


def _top_n(wish: ports.LogprobWish | None) -> int | None:
    if wish is None:
        return None
    return wish.candidates.top_n if isinstance(wish.candidates, ports.TopCandidates) else 0


def _tokens(chunk: TokenChunk) -> ports.OutputTokens:
    tokens = (
        tuple(_scored(score) for score in chunk.logprobs)
        if chunk.logprobs
        else tuple(ports.ScoredToken(token_id=token_id) for token_id in chunk.token_ids)
    )
    return ports.OutputTokens(output_index=chunk.index, tokens=tokens, text=chunk.text)


def _scored(score: TokenLogprob) -> ports.ScoredToken:
    chosen = score.chosen
    return ports.ScoredToken(
        token_id=chosen.token_id,
        token=chosen.text,
        logprob=chosen.logprob,
        rank=chosen.rank,
        candidates=tuple(
            ports.Candidate(token_id=one.token_id, logprob=one.logprob, token=one.text, rank=one.rank)
            for one in score.top
        ),
    )


def _finished(event: Finished) -> ports.OutputFinished:
    stop = event.stop
    match = (
        None
        if stop is None
        else ports.StopMatch(stop_token_id=stop.token_id, stop_text=stop.text, eos_token_id=stop.eos_token_id)
    )
    return ports.OutputFinished(
        output_index=event.index, reason=_FINISHES[event.reason], message=event.message, stop_match=match
    )


def _usage(event: Finished) -> ports.Usage | None:
    if event.usage is None:
        return None
    return ports.Usage(
        prompt_tokens=event.usage.prompt_tokens,
        completion_tokens=event.usage.completion_tokens,
        cached_prompt_tokens=event.usage.cached_prompt_tokens,
    )


def _part(name: str, state: ports.HealthState, message: str = "") -> ports.HealthPart:
    return ports.HealthPart(name=name, state=state, message=message)
