"""A fleet as Inference and Control see it: generations go through dispatch to who serves the model (SF-20 to SF-24).

A generation becomes a completion or a chat at a provider that speaks HTTP, and a run at one that does not; an
OpenEngine server gets it as it came. Only what every provider of a pool can do is advertised, and what one is not known
to understand is refused rather than sent and ignored (SF-10, SF-22).
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from iop import __version__
from iop.admin.enums import EngineRole
from iop.api.grpc import ports
from iop.api.grpc.abilities import TEXT_FORMAT, Abilities, abilities_of, common_abilities
from iop.api.grpc.answer_stream import AnswerStream
from iop.api.grpc.inference_codec import REQUEST_ID_CHARS_MAX
from iop.api.grpc.provider_calls import generation_of, options_of, provider_call
from iop.core.clock import Clock
from iop.core.errors import (
    AlreadyExists,
    Cancelled,
    Draining,
    InvalidRequest,
    IopError,
    NotFound,
    Unsupported,
)
from iop.core.ids import NodeId, ProviderId, RequestId
from iop.edge.calls import PRIORITY_MAX, PRIORITY_MIN, Call, DispatchRequest, ServedTarget
from iop.edge.dispatch import Dispatcher
from iop.edge.snapshot import AdapterSpec, EdgeSnapshot, ModelSpec, PoolMember
from iop.wire.messages import ProviderSnapshot

__all__ = ["EdgePort"]

FINISHED_IDS_MAX: Final = 4096
"""How many ended requests are remembered, so that a late abort learns that there was nothing left to end."""

_DOWN: Final = frozenset({"offline", "not_ready"})
"""What a Node's probe says of an engine that would fail a request."""

FindReport = Callable[[NodeId, ProviderId], ProviderSnapshot | None]


class EdgePort:
    """Implements the inference and the control port over the Edge's dispatch.

    Args:
        dispatcher: finds providers.
        find_snapshot: the running configuration.
        clock: dates load reports.
        instance_id: new at every start of the process.
        find_report: what a Node last told of one of its engines.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        find_snapshot: Callable[[], EdgeSnapshot],
        clock: Clock,
        instance_id: str,
        find_report: FindReport = lambda _node, _provider: None,
    ) -> None:
        self._dispatcher = dispatcher
        self._find_snapshot = find_snapshot
        self._find_report = find_report
        self._clock = clock
        self._instance_id = instance_id
        self._live: dict[str, _Live] = {}
        self._finished: OrderedDict[str, str] = OrderedDict()

    # ------------------------------------------------------------------------------------------ inference

    @property
    def is_serving(self) -> bool:
        """Whether some model would take a request now (AD-06)."""
        unfit = (ports.HealthState.NOT_READY, ports.HealthState.DRAINING)
        return any(
            self._pool_health(spec).state not in unfit for spec in self._find_snapshot().models.values()
        )

    def model_info(self, model: str) -> ports.ModelInfo:
        """What a model of the fleet can do, by id or alias: what all of its providers can.

        Raises:
            NotFound: MODEL_NOT_FOUND.
            InvalidRequest: no name, and not exactly one model.
        """
        spec = self._find_model(model)
        every = self._common(spec)
        text, chat = (self._common(spec, operation) for operation in ("generate_text", "generate_chat"))
        takes_text = text is not None and text.takes_text
        every = every or Abilities(options=frozenset())
        return ports.ModelInfo(
            model_id=spec.id,
            served_model_name=spec.id,
            served_model_aliases=spec.aliases,
            max_context_length=every.context_max,
            max_output_tokens=every.output_max,
            tokenizer_modes=(
                *((TEXT_FORMAT,) if takes_text else ()),
                *sorted(chat.formats if chat is not None else ()),
            ),
            supports_text_input=takes_text,
            supports_token_ids_input=text is not None and text.takes_token_ids,
            generation=ports.GenerationCapabilities(
                prompt_logprobs=every.prompt_logprobs,
                output_logprobs=every.output_logprobs,
                guided_decoding=every.guided,
                max_num_sequences=every.sequences_max,
                supports_priority=True,
                supports_stop_in_output=every.stop_in_output,
                supports_cache_salt=every.cache_salt,
                supports_prefix_cache_bypass=every.prefix_cache_bypass,
            ),
            supports_lora=every.lora,
            supports_multimodal=every.multimodal,
            data_parallel_ranks=self._dispatcher.pools.roster.ranks_of(spec.id),
        )

    async def generate(self, call: ports.GenerateCall) -> AnswerStream:
        """Dispatch a generation; accepted when the provider has begun its answer.

        Raises:
            AlreadyExists: a live request has this id.
            Unsupported: an option that not every provider of the model understands.
            IopError: no provider took it.
        Cancellation: safe; the waiter, or the provider's work, is called off.
        """
        spec = self._find_model(call.model)
        every = self._common(spec) or Abilities()
        for name in sorted(options_of(call).keys() - every.options):
            self.note_refused(call.request_id, spec.id, "UNSUPPORTED_FEATURE", call.caller)
            raise Unsupported(
                f"`{name}` is not understood by every provider of {spec.id!r}.",
                reason="UNSUPPORTED_FEATURE",
                details={"feature": name},
            )
        if call.request_id in self._live:
            # Not recorded: the record of this id is the live request's.
            raise AlreadyExists(
                "A live request has this id.",
                reason="DUPLICATE_REQUEST",
                details={"request_id": call.request_id},
            )
        answer = AnswerStream(
            caller=call.caller,
            outputs=call.sampling.num_sequences or 1,
            shows_provider=self._find_snapshot().shows_provider,
            on_closed=partial(self._closed, call.request_id),
        )
        live = self._live[call.request_id] = _Live(answer)
        request = self._request_of(call, spec)
        try:
            try:
                async with live.acceptance:
                    handle = await self._dispatcher.dispatch(
                        request, partial(self._prepare, call, request, answer)
                    )
                    answer.bind(handle)
                    await answer.wait_accepted()
            except TimeoutError:
                if live.ended_by is None:
                    raise
                raise live.ended_by from None
            if live.ended_by is not None:  # in the turn in which it was accepted
                raise live.ended_by
        except BaseException:
            await answer.aclose()
            raise
        return answer

    def note_refused(self, request_id: str, model: str, reason: str, caller: str) -> None:
        """Record a generation that was refused before dispatch, for ``iop explain`` (EN-112).

        What has no id that can be asked for, or that of a live request, is counted under one of its own.
        """
        is_fit = 0 < len(request_id) <= REQUEST_ID_CHARS_MAX and request_id.isprintable()
        if not is_fit or request_id in self._live:
            request_id = f"refused-{uuid.uuid4().hex}"
        self._dispatcher.record_rejection(RequestId(request_id), model[:200], reason.lower(), caller=caller)

    def _prepare(
        self, call: ports.GenerateCall, request: DispatchRequest, answer: AnswerStream, target: ServedTarget
    ) -> Call:
        adapter = self._find_snapshot().find_adapter(target.key)
        able = Abilities() if adapter is None else self._able(adapter, target.key.node, target.target)
        return provider_call(
            call,
            target,
            answer,
            able=able,
            request_id=request.request_id,
            session=request.session,
            priority=call.hints.priority,
        )

    def _request_of(self, call: ports.GenerateCall, spec: ModelSpec) -> DispatchRequest:
        snapshot = self._find_snapshot()
        tokens = (
            int(len(call.prompt.encode()) / snapshot.chars_per_token)
            if isinstance(call.prompt, str)
            else len(call.prompt)
        )
        hints = call.hints
        return DispatchRequest(
            request_id=RequestId(call.known_as or call.request_id),
            model=spec.id,
            operation=generation_of(call),
            estimated_prompt_tokens=tokens,
            priority=0 if hints.priority is None else max(PRIORITY_MIN, min(PRIORITY_MAX, hints.priority)),
            target_rank=hints.target_dp_rank,
            # Two keys that choose the same word do not share a session.
            session=f"{call.caller}:{hints.routing_key}" if hints.routing_key else "",
            caller=call.caller,
            traceparent=hints.traceparent,
            tracestate=hints.tracestate,
            via=call.come_through,
        )

    def _closed(self, request_id: str, answer: AnswerStream) -> None:
        live = self._live.get(request_id)
        if live is None or live.answer is not answer:
            return
        del self._live[request_id]
        self._finished[request_id] = answer.caller
        self._finished.move_to_end(request_id)
        if len(self._finished) > FINISHED_IDS_MAX:
            self._finished.popitem(last=False)

    # ------------------------------------------------------------------------------------------ abilities

    def _find_model(self, name: str) -> ModelSpec:
        snapshot = self._find_snapshot()
        if not name:
            if len(snapshot.models) == 1:
                return next(iter(snapshot.models.values()))
            raise InvalidRequest(
                "`model` is required: this server has not exactly one.",
                reason="INVALID_FIELD",
                details={"field": "model"},
            )
        spec = snapshot.find_model(name)
        if spec is None:
            raise NotFound(
                f"The model {name[:128]!r} is not served here.",
                reason="MODEL_NOT_FOUND",
                details={"model": name[:128]},
            )
        return spec

    def _members(self, spec: ModelSpec) -> Iterable[tuple[PoolMember, AdapterSpec]]:
        snapshot = self._find_snapshot()
        for member in spec.members:
            adapter = snapshot.find_adapter(member.key)
            if adapter is not None and adapter.enabled:
                yield member, adapter

    def _common(self, spec: ModelSpec, operation: str = "") -> Abilities | None:
        """What all can do that may get a request of this operation (any, when empty); None: there is nobody."""
        each = [
            self._able(adapter, member.key.node, member.target)
            for member, adapter in self._members(spec)
            if not operation or self._dispatcher.pools.roster.serves(member.key, operation)
        ]
        return common_abilities(each) if each else None

    def _able(self, adapter: AdapterSpec, node: NodeId, target: str) -> Abilities:
        report = self._find_report(node, adapter.provider) if adapter.type == "openengine" else None
        return abilities_of(adapter, target=target, report=report)

    # ------------------------------------------------------------------------------------------ control

    def server_info(self) -> ports.ServerInfo:
        """What the Edge is; nothing about its Nodes (EN-04).

        Data-parallel ranks are told where they are the same for every model; else each model's own tell them (SF-22).
        """
        models = tuple(self._find_snapshot().models)
        each = {self._dispatcher.pools.roster.ranks_of(model) for model in models}
        return ports.ServerInfo(
            engine_name="iop-edge",
            engine_version=__version__,
            instance_id=self._instance_id,
            supported_models=models,
            parallelism=_parallelism(each.pop()) if len(each) == 1 else ports.Parallelism(),
        )

    async def load(self, *, include_per_rank: bool) -> ports.LoadInfo:  # noqa: ARG002 - a fleet has no ranks of its own
        """How busy the fleet is: requests under a lease, and those that wait for one."""
        pools = self._dispatcher.pools
        return ports.LoadInfo(
            instance_id=self._instance_id,
            timestamp_unix_nanos=self._clock.unix_nanos(),
            running_requests=len(pools.leases),
            queued_requests=pools.waiting,
        )

    async def health(
        self,
        *,
        model: str,
        role: EngineRole | None,
        include_probe: bool,
        may_use: ports.MayUse = ports.any_model,
    ) -> ports.HealthReport:
        """How the models' pools are. A probe through the queue would take a caller's place, so there is none.

        Raises:
            NotFound: no such model.
            Unsupported: a probe was asked for.
        """
        if include_probe:
            raise Unsupported(
                "Probes are for engines; ask for the health of a model's pool instead.",
                reason="UNSUPPORTED_FEATURE",
                details={"feature": "include_inference_probe"},
            )
        snapshot = self._find_snapshot()
        specs = [self._find_model(model)] if model else list(snapshot.models.values())
        checks = [self._pool_health(spec) for spec in specs if may_use(spec.id, *spec.aliases)]
        if role not in {None, EngineRole.AGGREGATED}:
            checks = [ports.HealthPart(name="role", state=ports.HealthState.NOT_READY)]
        states = {check.state for check in checks}
        if states == {ports.HealthState.READY}:
            state = ports.HealthState.READY
        elif states & {ports.HealthState.READY, ports.HealthState.DEGRADED}:
            state = ports.HealthState.DEGRADED
        elif states == {ports.HealthState.DRAINING}:
            state = ports.HealthState.DRAINING
        else:
            state = ports.HealthState.NOT_READY
        return ports.HealthReport(state=state, checks=tuple(checks))

    def _pool_health(self, spec: ModelSpec) -> ports.HealthPart:
        """Ready if somebody would take a request, degraded if not everybody would who should (SF-22)."""
        name = f"model {spec.id}"
        pools = self._dispatcher.pools
        figures = pools.model_figures(spec.id)
        if figures.paused:
            return ports.HealthPart(name=name, state=ports.HealthState.DRAINING, message="paused")
        wanted = [member.key for member, _ in self._members(spec)]
        well = 0
        for key in wanted:
            told = pools.provider_figures(key)
            report = self._find_report(key.node, key.provider)
            is_down = report is not None and report.health in _DOWN
            well += told.status == "available" and told.health == "online" and not is_down
        if not well:
            return ports.HealthPart(
                name=name, state=ports.HealthState.NOT_READY, message="no provider is available"
            )
        if well < len(wanted):
            return ports.HealthPart(
                name=name,
                state=ports.HealthState.DEGRADED,
                message=f"{well} of {len(wanted)} providers are available",
            )
        return ports.HealthPart(name=name, state=ports.HealthState.READY)

    async def abort(self, request_id: str, *, caller: str | None) -> ports.AbortOutcome:
        """End one request of this caller, or for an operator of anybody (SF-23).

        Raises:
            NotFound: unknown, or somebody else's.
        """
        live = self._live.get(request_id)
        if live is not None and caller in {None, live.answer.caller}:
            by = "its caller" if caller is not None else "an operator"
            return live.end(f"aborted by {by}", is_own=caller is not None)
        owner = self._finished.get(request_id)
        if owner is not None and caller in {None, owner}:
            return ports.AbortOutcome.ALREADY_FINISHED
        raise NotFound(
            "There is no such request of yours.",
            reason="REQUEST_NOT_FOUND",
            details={"request_id": request_id[:128]},
        )

    async def abort_all(self) -> int:
        """End every generation that came through this port."""
        message = "all requests were aborted by an operator"
        outcomes = [live.end(message, is_own=False) for live in list(self._live.values())]
        return outcomes.count(ports.AbortOutcome.ABORTED)


def _parallelism(ranks: frozenset[int]) -> ports.Parallelism:
    """Ranks in the words of the schema, which has some for one span of them."""
    first = min(ranks, default=0)
    if not ranks or max(ranks) - first + 1 != len(ranks):
        return ports.Parallelism()
    return ports.Parallelism(data_parallel_size=len(ranks), data_parallel_start_rank=first)


class _Live:
    """A request that has not ended: in the queue, or answered."""

    def __init__(self, answer: AnswerStream) -> None:
        self.answer = answer
        self.acceptance = asyncio.timeout(None)
        self.ended_by: IopError | None = None

    def end(self, message: str, *, is_own: bool) -> ports.AbortOutcome:
        """End it: by a status while nobody has accepted it, by its last event after that (SF-20)."""
        if self.answer.is_terminal:
            return ports.AbortOutcome.ALREADY_FINISHED
        if self.answer.is_accepted:
            code = "CANCELLED" if is_own else "DRAINING"
            self.answer.end_by(ports.RequestFailed(code=code, message=message, retryable=not is_own))
        elif self.ended_by is None:
            self.ended_by = (
                Cancelled(message, reason="ABORTED") if is_own else Draining(message, reason="ABORTED")
            )
            self.acceptance.reschedule(asyncio.get_running_loop().time())
        return ports.AbortOutcome.ABORTED
