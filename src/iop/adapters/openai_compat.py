"""Any engine that speaks OpenAI's HTTP: tunnels byte for byte, paused at the Node's gate, and no more control than
`engine_control` brings.

It also carries the tunnels of the HTTP engines that have a native control interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from iop.adapters.base import (
    AdapterCapabilities,
    AdapterServices,
    AdapterSnapshot,
    Category,
    EngineControl,
    Health,
    RunStream,
    TunnelStream,
)
from iop.adapters.controlled import Controlled
from iop.adapters.engine_facts import (
    TOOLS_QUESTION,
    absent_of,
    facts_of_models,
    facts_of_props,
    may_be_asked_for_tools,
    ranks_of_metrics,
    ranks_of_server_info,
    refuses_tools_at_all,
    tools_of_model_info,
)
from iop.adapters.gate_control import GateControl
from iop.adapters.http_exchange import (
    HEADERS_TIMEOUT_S,
    FetchedResponse,
    HttpRequest,
    Origin,
    UpstreamError,
    UpstreamFailure,
    client_ssl_context,
)
from iop.adapters.http_tunnel import HttpTunnel, engine_headers, refuse_tunnel
from iop.adapters.http_upstream import CONNECT_TIMEOUT_S, HttpUpstream
from iop.adapters.profiles import (
    BUILT_IN_PROFILES,
    DEFAULT_PROFILE,
    ForbiddenPathError,
    UnknownOperationError,
    is_plain_path,
    resolve,
)
from iop.core.errors import InvalidRequest, IopError, Unavailable
from iop.wire.messages import (
    AdapterConfig,
    Header,
    OpenAICompatSettings,
    RunEvent,
    RunEventType,
    StreamError,
    StreamErrorCode,
)
from iop.wire.model_facts import ModelFacts

PROBE_TIMEOUT_S: Final = 5.0
"""A model list is answered from memory; an engine that takes longer is not well."""

PROBE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest model list; some aggregators list thousands of models."""

MODELS_MAX: Final = 1024
"""Most model names kept for the snapshot."""

NO_CONTROL: Final = (
    "it has no control interface; name the engine's OpenEngineAdmin as `admin` if it serves one"
)
"""Why nothing but a pause is offered."""


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class OpenAICompatAdapter(Controlled):
    """One OpenAI-compatible endpoint.

    Args:
        config: its adapter config; the type may be any kind that is tunnelled to over HTTP.
        services: the Node's clock and change signal.
        control: the engine's control interface; without one the gate of this adapter is all there is.

    Raises:
        InvalidRequest: the config cannot work; names key and fix.
    """

    def __init__(
        self, config: AdapterConfig, services: AdapterServices, *, control: EngineControl | None = None
    ) -> None:
        settings = config.settings
        if not isinstance(settings, OpenAICompatSettings):
            raise InvalidRequest(
                f"adapter {config.name!r}: type {config.type} needs an endpoint", reason="NO_ENDPOINT"
            )
        if control is None:
            control = GateControl(services, name=f"a provider of type {config.type}", why_no_more=NO_CONTROL)
        super().__init__(config, services, control)
        self._profile = settings.protocol_profile or DEFAULT_PROFILE
        for name, operation in self._profile.operations.items():
            if operation.method not in {"GET", "POST"} or not is_plain_path(operation.path):
                raise InvalidRequest(
                    f"adapter {config.name!r}: profile operation {name!r} needs GET or POST and a plain path",
                    reason="BAD_PROFILE",
                )
        origin = Origin.parse(settings.endpoint)
        self._upstream = HttpUpstream(
            origin,
            ssl_context=client_ssl_context(settings.tls_ca_pem) if origin.is_tls else None,
            connect_timeout_s=settings.connect_timeout_sec or CONNECT_TIMEOUT_S,
        )
        self._credentials = _credentials(settings.api_key, self._profile.name)
        self._models: tuple[str, ...] = ()
        self._facts: dict[str, ModelFacts] = {}
        self._tools: bool | None = None
        self._absent: frozenset[str] | None = None  # None: not looked for since the engine last came up
        self._ranks: frozenset[int] | None = None  # the same
        self._open: set[HttpTunnel] = set()

    @property
    def in_flight(self) -> int:
        """Tunnels of which something is left at the engine."""
        return len(self._open)

    def cancel_all(self) -> None:
        """Close the engine connections of all tunnels; each stream ends as cancelled."""
        for tunnel in tuple(self._open):
            tunnel.cancel()

    @property
    def capabilities(self) -> AdapterCapabilities:
        """Tunnels for the profile's operations; admin by the gate, or as the control interface finds it."""
        return AdapterCapabilities(
            kind=self._config.type,
            category=Category.LOCAL_INFERENCE if self._config.type in _LOCAL_TYPES else Category.API,
            tunnels=True,
            operations=frozenset(self._profile.operations) - (self._absent or frozenset()),
            admin=True,
            admin_refusal=self._refusal,
        )

    def snapshot(self) -> AdapterSnapshot:
        """From the last probe and the requests since."""
        return AdapterSnapshot(
            health=self._health,
            reason=self._reason,
            models=self._models,
            weight_version=self._control.weight_version(),
            model_facts=self._facts,
            absent_operations=self._absent or frozenset(),
            data_parallel_ranks={}
            if self._ranks is None
            else dict.fromkeys(self._config.targets, self._ranks),
        )

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Open for requests; the first probe is the Node's to ask for."""
        self._upstream.start(tasks)
        await self._control.start(tasks)

    async def aclose(self) -> None:
        """Close connections; tunnels under way end as cancelled."""
        await self._upstream.aclose()
        await self._control.aclose()

    async def probe(self) -> None:
        """Ask for the model list: any HTTP answer shows that somebody is there."""
        operation = self._profile.operations.get("models")
        request = HttpRequest(
            method=b"GET",
            path=operation.path.encode("ascii") if operation is not None else b"/v1/models",
            headers=[(b"Accept", b"application/json"), *self._credentials],
            headers_timeout_s=PROBE_TIMEOUT_S,
        )
        try:
            response = await self._upstream.fetch(request, body_bytes_max=PROBE_BYTES_MAX)
        except IopError as exc:
            self._absent = self._ranks = None
            self._observe(Health.OFFLINE, exc.message)
        else:
            if response.status >= 500:
                self._absent = self._ranks = None  # perhaps it is starting anew
            if response.status in {401, 403}:
                self._observe(Health.NOT_READY, "the engine refuses the configured api_key")
            elif response.status >= 500:
                self._observe(Health.NOT_READY, f"the engine answers {response.status} to a model list")
            else:
                if response.status == 200:
                    self._models = _model_names(response.body)
                self._observe(Health.READY, "")
                await self._learn(response.body if response.status == 200 else b"")
        await self._control.probe()

    async def _learn(self, listing: bytes) -> None:
        """Find out once after each start of the engine what it has; every probe, what its list says."""
        before = (self._facts, self._absent, self._ranks)
        if self._config.type != "llamacpp":
            if self._config.type == "sglang" and self._absent is None:
                self._tools = tools_of_model_info(await self._look(b"/model_info"))
            facts = facts_of_models(listing)
            self._facts = {
                name: facts[name]
                if self._tools is None
                else msgspec.structs.replace(facts[name], tools=self._tools)
                for name in self._config.targets
                if name in facts
            }
        elif self._absent is None:
            # One server, one model, whatever the name that it is asked for; nothing of it changes while it runs.
            said = await self._look_at_props()
            self._facts = dict.fromkeys(self._config.targets or self._models[:1], said)
        if self._absent is None:
            self._absent = await self._look_for_absent()
        if self._ranks is None or len(self._ranks) > 1:  # of some, there may be more or fewer by now
            self._ranks = await self._look_for_ranks()
        if before != (self._facts, self._absent, self._ranks):
            self._services.on_change()

    async def _look_for_ranks(self) -> frozenset[int]:
        """The data-parallel ranks that a request can ask for, where the engine has a header for that."""
        match self._config.type:
            case "sglang":
                return ranks_of_server_info(await self._look(b"/server_info"))
            case "vllm":
                return ranks_of_metrics(await self._look(b"/metrics"))
            case _:
                return frozenset()

    async def _look_at_props(self) -> ModelFacts:
        """What llama.cpp says; its template may know tools that the server does not take."""
        props = await self._look(b"/props")
        said = facts_of_props(props)
        if said.tools and may_be_asked_for_tools(props):
            answer = await self._ask(b"POST", b"/apply-template", TOOLS_QUESTION)
            if answer is not None and refuses_tools_at_all(answer.status, answer.body):
                said = msgspec.structs.replace(said, tools=False)
        return said

    async def _look_for_absent(self) -> frozenset[str]:
        paths = {name: operation.path for name, operation in self._profile.operations.items()}
        statuses: dict[str, int] = {}
        for name, path in (paths | _PLAIN_PATHS).items():
            if name == "models":
                continue
            response = await self._get(path.encode("ascii"))
            if response is None:
                return frozenset()  # it does not even answer: nothing can be learnt so
            statuses[name] = response.status
        # What somebody wrote out is believed; the built-in profile only says what there may be.
        believed = frozenset() if self._profile in BUILT_IN_PROFILES else frozenset(paths)
        return absent_of(statuses) - believed

    async def _look(self, path: bytes) -> bytes:
        """What a GET brings; nothing, if it brings no 200."""
        response = await self._get(path)
        return b"" if response is None or response.status != 200 else response.body

    async def _get(self, path: bytes) -> FetchedResponse | None:
        return await self._ask(b"GET", path)

    async def _ask(self, method: bytes, path: bytes, body: bytes = b"") -> FetchedResponse | None:
        """`None`: no answer."""
        request = HttpRequest(
            method=method,
            path=path,
            headers=[
                (b"Accept", b"application/json"),
                *([(b"Content-Type", b"application/json")] if body else []),
                *self._credentials,
            ],
            body=(body,) if body else (),
            headers_timeout_s=PROBE_TIMEOUT_S,
        )
        try:
            return await self._upstream.fetch(request, body_bytes_max=PROBE_BYTES_MAX)
        except IopError:
            return None

    def open_tunnel(self, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """Send one request to the engine and its answer back, byte for byte (EN-50 to EN-57).

        Nothing passes a closed gate: a paused engine might never answer.
        """
        request = stream.request
        if self._is_gated:
            refuse_tunnel(stream, StreamErrorCode.BUSY, "the engine is paused", retryable=True)
            on_done()
            return
        try:
            method, path = resolve(self._profile, request)
            headers = engine_headers(request.headers)
        except UnknownOperationError:
            operation = request.operation[:64]
            refuse_tunnel(
                stream,
                StreamErrorCode.UNKNOWN_OPERATION,
                f"the provider's profile has no operation {operation!r}",
            )
            on_done()
            return
        except ForbiddenPathError:
            refuse_tunnel(stream, StreamErrorCode.INVALID_REQUEST, "this path cannot be used on a provider")
            on_done()
            return
        except ValueError as exc:
            refuse_tunnel(stream, StreamErrorCode.INVALID_REQUEST, str(exc))
            on_done()
            return
        headers += self._credentials

        def closed() -> None:
            self._open.discard(tunnel)
            on_done()

        tunnel = HttpTunnel(stream, on_done=closed, on_outcome=self._on_outcome)
        self._open.add(tunnel)
        try:
            tunnel.open(
                self._upstream.request,
                HttpRequest(
                    method=method,
                    path=path,
                    headers=headers,
                    body=stream.body,
                    headers_timeout_s=request.timeout_sec or HEADERS_TIMEOUT_S,
                ),
            )
        except Unavailable as exc:
            refuse_tunnel(stream, StreamErrorCode.CONNECT_FAILED, exc.message, retryable=True)
            closed()

    async def run(self, stream: RunStream) -> None:
        """Not offered: a tunnel serves these engines better."""
        stream.emit(
            RunEvent(
                type=RunEventType.ERROR,
                error=StreamError(
                    code=StreamErrorCode.INVALID_REQUEST,
                    message=f"providers of type {self._config.type} serve tunnels, not runs",
                    before_start=True,
                ),
            )
        )

    def _on_outcome(self, error: UpstreamError | None) -> None:
        """What a request shows of the engine's health, between probes."""
        if error is None:
            if self._health is Health.OFFLINE:
                self._observe(Health.READY, "")
        elif error.failure is UpstreamFailure.CONNECT_FAILED:
            self._absent = self._ranks = None  # what comes back may be started otherwise
            self._observe(Health.OFFLINE, error.message)


_PLAIN_PATHS: Final = {"completions": "/v1/completions", "embeddings": "/v1/embeddings"}
"""Operations that travel by path because no profile names them (EN-51)."""

_LOCAL_TYPES: Final = frozenset({"vllm", "sglang", "trtllm", "llamacpp"})


def _credentials(api_key: str, profile_name: str) -> list[Header]:
    """The engine's own credential, in the header that its dialect reads."""
    if not api_key:
        return []
    try:
        key = api_key.encode("ascii")
    except UnicodeEncodeError:
        key = b""
    if not key or (not key.isalnum() and any(byte < 0x21 or byte > 0x7E for byte in key)):
        raise InvalidRequest("api_key: must be printable ASCII without spaces", reason="BAD_API_KEY")
    if profile_name == "anthropic":
        return [(b"x-api-key", key)]
    return [(b"Authorization", b"Bearer " + key)]


def _model_names(body: bytes) -> tuple[str, ...]:
    try:
        listing = msgspec.json.decode(body, type=_ModelList)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return ()
    return tuple(model.id[:256] for model in listing.data[:MODELS_MAX])
