"""A fleet as Inference and Control see it: generations go through dispatch as text completions (SF-20 to SF-24).

A generation becomes `POST /v1/completions` at a provider that offers it. Only what every such provider can do is
advertised, and what a provider's kind is not known to understand is refused rather than sent and ignored (SF-10,
SF-22).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from iop import __version__
from iop.admin.enums import EngineRole
from iop.api.grpc import ports
from iop.api.grpc.completion_stream import CompletionStream
from iop.core.clock import Clock
from iop.core.errors import AlreadyExists, InvalidRequest, NotFound, Unsupported
from iop.core.ids import RequestId
from iop.edge.calls import DispatchRequest, Route, ServedTarget, TunnelCall
from iop.edge.dispatch import Dispatcher
from iop.edge.snapshot import EdgeSnapshot, ModelSpec

__all__ = ["EdgePort"]

OPERATION: Final = "completions"
PATH: Final = "/v1/completions"

_EXTENDED_TYPES: Final = frozenset({"vllm", "sglang", "llamacpp"})
"""Providers that understand sampling options beyond OpenAI's own; others would silently ignore them."""


class EdgePort:
    """Implements the inference and the control port over the Edge's dispatch.

    Args:
        dispatcher: finds providers.
        find_snapshot: the running configuration.
        clock: dates load reports.
        instance_id: new at every start of the process.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        find_snapshot: Callable[[], EdgeSnapshot],
        clock: Clock,
        instance_id: str,
    ) -> None:
        self._dispatcher = dispatcher
        self._find_snapshot = find_snapshot
        self._clock = clock
        self._instance_id = instance_id
        self._live: dict[str, CompletionStream] = {}

    # ------------------------------------------------------------------------------------------ inference

    @property
    def is_serving(self) -> bool:
        """Whether some model can admit now (AD-06)."""
        pools = self._dispatcher.pools
        return any(pools.model_figures(model).can_admit for model in self._find_snapshot().models)

    def model_info(self, model: str) -> ports.ModelInfo:
        """What a model of the fleet can do, by id or alias.

        Raises:
            NotFound: MODEL_NOT_FOUND.
            InvalidRequest: no name, and not exactly one model.
        """
        spec = self._find_model(model)
        return ports.ModelInfo(
            model_id=spec.id,
            served_model_name=spec.id,
            served_model_aliases=spec.aliases,
            supports_text_input=self._completes_text(spec),
            generation=ports.GenerationCapabilities(
                guided_decoding=ports.GuidedCapabilities(supported=False),
                max_num_sequences=1,
                supports_priority=True,
                supports_stop_in_output=False,
                supports_cache_salt=False,
                supports_prefix_cache_bypass=False,
            ),
            supports_lora=False,
            supports_multimodal=False,
        )

    async def generate(self, call: ports.GenerateCall) -> CompletionStream:
        """Dispatch a generation; accepted when the provider has begun its stream.

        Raises:
            AlreadyExists: a live request has this id.
            IopError: no provider took it.
        Cancellation: safe; the waiter, or the provider's work, is called off.
        """
        if call.request_id in self._live:
            raise AlreadyExists(
                "A live request has this id.",
                reason="DUPLICATE_REQUEST",
                details={"request_id": call.request_id},
            )
        stream = _TrackedStream(self._live, call)
        try:
            handle = await self._dispatcher.dispatch(
                self._request_of(call), lambda target: _tunnel_call(call, target, stream)
            )
            stream.bind(handle)
            await stream.wait_accepted()
        except BaseException:
            await stream.aclose()
            raise
        return stream

    def _request_of(self, call: ports.GenerateCall) -> DispatchRequest:
        text = call.prompt if isinstance(call.prompt, str) else ""
        snapshot = self._find_snapshot()
        return DispatchRequest(
            request_id=RequestId(call.request_id),
            model=self._find_model(call.model).id,
            operation=OPERATION,
            estimated_prompt_tokens=int(len(text.encode()) / snapshot.chars_per_token),
            # The schema's priorities come first when low, dispatch's when high.
            priority=-call.hints.priority if call.hints.priority is not None else 0,
            session=call.hints.routing_key,
            caller=call.caller,
        )

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

    def _completes_text(self, spec: ModelSpec) -> bool:
        snapshot = self._find_snapshot()
        adapters = [snapshot.find_adapter(member.key) for member in spec.members]
        return any(
            adapter is not None
            and adapter.enabled
            and adapter.route is Route.TUNNEL
            and (adapter.operations is None or OPERATION in adapter.operations)
            for adapter in adapters
        )

    # ------------------------------------------------------------------------------------------ control

    def server_info(self) -> ports.ServerInfo:
        """What the Edge is; nothing about its Nodes (EN-04)."""
        return ports.ServerInfo(
            engine_name="iop-edge",
            engine_version=__version__,
            instance_id=self._instance_id,
            supported_models=tuple(self._find_snapshot().models),
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

    async def health(self, *, model: str, role: EngineRole | None, include_probe: bool) -> ports.HealthReport:
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
        checks = [self._pool_health(spec) for spec in specs]
        if role not in {None, EngineRole.AGGREGATED}:
            checks = [ports.HealthPart(name="role", state=ports.HealthState.NOT_READY)]
        states = {check.state for check in checks}
        if states == {ports.HealthState.READY}:
            state = ports.HealthState.READY
        elif ports.HealthState.READY in states:
            state = ports.HealthState.DEGRADED
        elif states == {ports.HealthState.DRAINING}:
            state = ports.HealthState.DRAINING
        else:
            state = ports.HealthState.NOT_READY
        return ports.HealthReport(state=state, checks=tuple(checks))

    def _pool_health(self, spec: ModelSpec) -> ports.HealthPart:
        figures = self._dispatcher.pools.model_figures(spec.id)
        if figures.can_admit:
            return ports.HealthPart(name=f"model {spec.id}", state=ports.HealthState.READY)
        if figures.paused:
            return ports.HealthPart(
                name=f"model {spec.id}", state=ports.HealthState.DRAINING, message="paused"
            )
        return ports.HealthPart(
            name=f"model {spec.id}", state=ports.HealthState.NOT_READY, message="no provider is available"
        )

    async def abort(self, request_id: str, *, caller: str | None) -> ports.AbortOutcome:
        """End one request of this caller, or for an operator of anybody (SF-23).

        Raises:
            NotFound: unknown, or somebody else's.
        """
        stream = self._live.get(request_id)
        if stream is not None and caller in {None, stream.caller}:
            failure = ports.RequestFailed(
                code="CANCELLED" if caller is not None else "DRAINING",
                message="aborted by its caller" if caller is not None else "aborted by an operator",
                retryable=caller is None,
            )
            ended = stream.end_by(failure)
            return ports.AbortOutcome.ABORTED if ended else ports.AbortOutcome.ALREADY_FINISHED
        record = self._dispatcher.outcomes.find(request_id)
        if record is not None and record.outcome is not None and caller in {None, record.caller}:
            return ports.AbortOutcome.ALREADY_FINISHED
        raise NotFound(
            "There is no such request of yours.",
            reason="REQUEST_NOT_FOUND",
            details={"request_id": request_id[:128]},
        )

    async def abort_all(self) -> int:
        """End every generation that came through this port."""
        failure = ports.RequestFailed(
            code="DRAINING", message="all requests were aborted by an operator", retryable=True
        )
        return sum(stream.end_by(failure) for stream in list(self._live.values()))


class _TrackedStream(CompletionStream):
    """A stream that is listed as live until it is closed."""

    def __init__(self, live: dict[str, CompletionStream], call: ports.GenerateCall) -> None:
        super().__init__(caller=call.caller)
        self._live = live
        self._request_id = call.request_id
        live[call.request_id] = self

    async def aclose(self) -> None:
        if self._live.get(self._request_id) is self:
            del self._live[self._request_id]
        await super().aclose()


def _tunnel_call(call: ports.GenerateCall, target: ServedTarget, sink: CompletionStream) -> TunnelCall:
    """The provider's request, once it is known who that is (EN-54).

    Raises:
        Unsupported: the provider is no tunnel, or may not understand an option.
    """
    if target.route is not Route.TUNNEL:
        raise _unsupported("prompt", target)
    headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
    if call.hints.traceparent:
        headers.append((b"traceparent", call.hints.traceparent.encode("latin-1")))
    if call.hints.tracestate:
        headers.append((b"tracestate", call.hints.tracestate.encode("latin-1")))
    return TunnelCall(
        operation=OPERATION if OPERATION in target.operations else "",
        method="POST",
        path=PATH,
        sink=sink,
        headers=headers,
        body=(orjson.dumps(_body_of(call, target)),),
        stream=True,
    )


def _body_of(call: ports.GenerateCall, target: ServedTarget) -> dict[str, Any]:
    sampling, stopping = call.sampling, call.stopping
    plain = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "seed": sampling.seed,
        "max_tokens": stopping.max_tokens,
        "stop": list(stopping.stop) or None,
    }
    extended = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": stopping.min_tokens,
        "ignore_eos": stopping.ignore_eos,
        "stop_token_ids": list(stopping.stop_token_ids) or None,
    }
    for name, value in extended.items():
        if value is not None and target.adapter_type not in _EXTENDED_TYPES:
            raise _unsupported(name, target)
    options = {name: value for name, value in {**plain, **extended}.items() if value is not None}
    return {
        "model": target.target,
        "prompt": call.prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }


def _unsupported(feature: str, target: ServedTarget) -> Unsupported:
    return Unsupported(
        f"`{feature}` is not offered by the providers of {target.model!r}.",
        reason="UNSUPPORTED_FEATURE",
        details={"feature": feature},
    )
