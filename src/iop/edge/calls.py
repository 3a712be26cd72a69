"""What a surface hands to dispatch, and what it gets back: plain data, no I/O.

A surface describes the request once (:class:`DispatchRequest`), without knowing who will serve it. When a provider is
chosen, dispatch asks the surface for the concrete call under that lease (EN-54, EN-60): a :class:`TunnelCall` for
providers that speak the caller's dialect, a :class:`RunCall` for those that take normalised runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, unique
from typing import NamedTuple, TypeAlias

from msgspec import Struct, field

from iop.core.errors import IopError
from iop.core.ids import ModelId, NodeId, ProviderId, RequestId
from iop.net.ports import RunSink, TunnelSink
from iop.wire.messages import Header

CONVERSIONS: Mapping[str, tuple[str, ...]] = {
    "chat_completions": ("messages", "responses"),
    "messages": ("chat_completions", "responses"),
    "responses": ("chat_completions", "messages"),
    "count_tokens": ("tokenize",),
}
"""What else a provider may be asked where it does not offer an operation: the surface converts (SF-01). First choice
first."""

RUN_OPERATIONS: frozenset[str] = frozenset({"chat_completions", "completions"})
"""What normalised runs are asked in; other chats are converted to it."""

GENERATIONS: Mapping[str, tuple[str, ...]] = {
    "generate_chat": ("chat_completions",),
    "generate_text": ("completions",),
}
"""OpenEngine's generations, by what a provider is asked: they are not converted to another dialect."""

_WAYS: Mapping[str, tuple[str, ...]] = {
    **{operation: (operation, *others) for operation, others in CONVERSIONS.items()},
    **GENERATIONS,
}

OPERATIONS: frozenset[str] = frozenset(
    {"chat_completions", "completions", "embeddings", "responses", "messages", "count_tokens"}
)
"""Everything that a provider can have a route for."""

TOKENIZE = "tokenize"
"""A tokenizer's route for chats, which counts where a provider has no route for counts."""

SIDE_OPERATIONS: frozenset[str] = frozenset({"count_tokens"})
"""What occupies no generation slot: it is answered from a tokenizer (SF-14)."""

SIDE_WORK_MAX = 4
"""Most side work at one provider at once; the Node's gate has the same number."""


def ways_to(operation: str) -> tuple[str, ...]:
    """The operation itself and those that a surface can serve it by."""
    return _WAYS.get(operation) or (operation,)


class CannotBeSaidError(Exception):
    """Of :data:`PrepareCall`: this provider would have to be asked in a dialect that cannot say the request.

    Attributes:
        error: what its caller is told, if nobody is there who is asked in another way.
    """

    def __init__(self, error: IopError) -> None:
        super().__init__(error.message)
        self.error = error


PRIORITY_MIN = -10
PRIORITY_MAX = 10
"""Priorities outside are clamped: each distinct value costs one queue per class, so their number is bounded."""


@unique
class Route(Enum):
    """How a provider is spoken to (EN-60)."""

    TUNNEL = "tunnel"
    RUN = "run"


@unique
class Outcome(Enum):
    """How a request ended; exactly one is recorded for each (EN-112)."""

    COMPLETE = "complete"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TRUNCATED = "upstream_truncated"
    CLIENT_CANCELLED = "client_cancelled"
    ABORTED_BY_ADMIN = "aborted_by_admin"
    NODE_LOST = "node_lost"
    TIMEOUT = "timeout"
    EDGE_SHUTDOWN = "edge_shutdown"
    REJECTED = "rejected"


class ProviderKey(NamedTuple):
    """One resource: one adapter instance on one Node; the same over all generations (EN-92).

    A tuple, because it is hashed a dozen times per request.
    """

    node: NodeId
    provider: ProviderId

    def __str__(self) -> str:
        return f"{self.node}/{self.provider}"


class ServedTarget(Struct, frozen=True, kw_only=True):
    """Who serves an attempt: fixed by pool selection before any body is built (EN-54).

    Attributes:
        model: public id of the model, aliases resolved.
        key: the resource; for logs and status, never for callers (EN-04).
        target: the model name that the provider knows.
        route: how to speak to it.
        adapter_type: e.g. ``openai_compat``, ``ollama``, ``cli``.
        operations: named operations of its profile (EN-51); empty for providers that take runs.
        response_model: ``provider`` or ``alias`` (SF-15).
        rewrites: names of the model's opt-in rules (SF-15).
        workspace: working directory of workspace-bound routes, from the config (EN-42, SF-16).
    """

    model: ModelId
    key: ProviderKey
    target: str
    route: Route
    adapter_type: str
    operations: frozenset[str] = frozenset()
    response_model: str = "provider"
    rewrites: frozenset[str] = frozenset()
    workspace: str = ""


class DispatchRequest(Struct, frozen=True, kw_only=True):
    """One caller's request, before anybody was chosen for it.

    Attributes:
        request_id: what ``x-request-id`` shows; unique among recent requests, or ``iop explain`` shows the newest.
        model: id or alias as the caller said it.
        operation: what is asked: ``chat_completions``, ``completions``, ``responses``, ``messages``, ``count_tokens``,
            ``embeddings``, or one of `GENERATIONS`; providers that cannot do it are no candidates.
        estimated_prompt_tokens: decides whether a long slot is needed as well (EN-111).
        priority: higher first; clamped to -10..10.
        session: affinity key; later requests with the same key prefer the provider of the earlier ones.
        preferred_provider: opaque provider name (as in ``x-iop-provider``) that the caller would like: a hint (EN-04).
        caller: name of the API key, for ``iop explain``; empty when the API is open.
        traceparent, tracestate: the caller's trace context, as it said it (SF-13); read only where spans are recorded.
        target_rank: the data-parallel rank that shall serve it; only providers that have it are candidates (SF-21).
        via: names of the Edges that it came through, with commas; empty: it came from a client (SF-24).
    """

    request_id: RequestId
    model: str
    operation: str
    estimated_prompt_tokens: int = 0
    priority: int = 0
    session: str = ""
    preferred_provider: str = ""
    caller: str = ""
    traceparent: str = ""
    tracestate: str = ""
    target_rank: int | None = None
    via: str = ""


class TunnelCall(Struct, frozen=True, kw_only=True):
    """A provider HTTP request, built for one chosen target (EN-50).

    Attributes:
        operation: profile operation, or empty when ``path`` rules (EN-51).
        path: origin-form path, with its query if any.
        headers: end-to-end request headers that may reach the provider (SF-04).
        body: final bytes in parts; they are not copied, and must not change afterwards.
        sink: receives the answer of this attempt. A later attempt may bring another sink or the same one.
    """

    operation: str
    method: str
    path: str
    sink: TunnelSink
    headers: Sequence[Header] = ()
    body: Sequence[bytes] = ()
    stream: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    session_id: str = ""


class RunCall(Struct, frozen=True, kw_only=True):
    """A normalised run, built for one chosen target (EN-40 to EN-44)."""

    input: bytes
    sink: RunSink
    stream: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    session_id: str = ""
    traceparent: str = ""
    tracestate: str = ""


Call: TypeAlias = TunnelCall | RunCall

PrepareCall: TypeAlias = Callable[[ServedTarget], Call]
"""Builds the call under the lease. Called once per attempt, synchronously. May raise ``IopError`` (e.g. Unsupported:
the target cannot say what was asked); the lease then comes back and the error reaches the caller of ``dispatch``. After
:class:`CannotBeSaidError` those are asked who would be asked in another way, if any is there."""
