"""What an HTTP engine offers, found out by questions that change nothing: GETs of its lists, and of its POST routes,
and a template filled in where the engine tells its tools in no other way.

A server that tells an unknown path (404) from a wrong method (405) shows by that which routes it has. One that answers
404 to both, or anything to all, shows nothing, and is believed to have what its profile says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from iop.wire.data_parallel import RANKS_MAX, served_ranks
from iop.wire.model_facts import ModelFacts

__all__ = [
    "MODELS_MAX",
    "TOOLS_QUESTION",
    "absent_of",
    "facts_of_models",
    "facts_of_props",
    "facts_of_show",
    "may_be_asked_for_tools",
    "ranks_of_metrics",
    "ranks_of_server_info",
    "refuses_tools_at_all",
    "tools_of_model_info",
]

MODELS_MAX: Final = 64
"""Models of one engine that facts are kept of."""

TOKENS_MAX: Final = 2**40
"""Above this a context length is nonsense."""

TOOLS_QUESTION: Final = msgspec.json.encode(
    {
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    }
)
"""For llama.cpp's ``/apply-template``, which generates nothing."""

_ENGINE: Final = re.compile(
    rb'^vllm:num_requests_running\{(?:[^}"\n]|"[^"\n]*")*?\bengine="([0-9]{1,6})"', re.MULTILINE
)
"""A sample of vLLM's with the rank that it is of. No part of it crosses a line, so a hostile text costs little."""

_LENGTHS: Final = ("max_model_len", "context_length", "context_window", "max_context_length")
"""How engines and gateways name a model's context in their list."""


def absent_of(statuses: Mapping[str, int]) -> frozenset[str]:
    """Operations that an engine does not have.

    Args:
        statuses: by operation, the status of a GET of its POST route.
    """
    if 405 not in statuses.values():
        return frozenset()
    return frozenset(name for name, status in statuses.items() if status == 404)


def facts_of_models(body: bytes) -> dict[str, ModelFacts]:
    """What a model list says of each model. Anything else says nothing."""
    try:
        listing = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    entries = listing.get("data") if isinstance(listing, dict) else None
    facts: dict[str, ModelFacts] = {}
    for entry in entries[:MODELS_MAX] if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(name := entry.get("id"), str):
            lengths = (_tokens(entry.get(key)) for key in _LENGTHS)
            length = next((each for each in lengths if each is not None), None)
            told = entry.get("iop")
            facts[name[:256]] = (
                _facts_of_edge(told) if isinstance(told, dict) else ModelFacts(context_tokens=length)
            )
    return facts


def _facts_of_edge(told: dict[str, Any]) -> ModelFacts:
    """What another Edge says of its pool: what all of its providers can, whichever serves (SF-24)."""
    window, modalities = (
        value if isinstance(value := told.get(key), dict) else {} for key in ("context_window", "modalities")
    )
    return ModelFacts(
        context_tokens=_tokens(window.get("min")),
        images=_flag(modalities.get("image")),
        audio=_flag(modalities.get("audio")),
        tools=_flag(told.get("tools")),
    )


def facts_of_props(body: bytes) -> ModelFacts:
    """What llama.cpp's ``/props`` says: the context of one slot, what goes in, and what the template can."""
    props = _object(body)
    settings, modalities, caps = (
        value if isinstance(value := props.get(key), dict) else {}
        for key in ("default_generation_settings", "modalities", "chat_template_caps")
    )
    return ModelFacts(
        context_tokens=_tokens(settings.get("n_ctx")),
        images=_flag(modalities.get("vision")),
        audio=_flag(modalities.get("audio")),
        tools=_flag(caps.get("supports_tools")),
    )


def may_be_asked_for_tools(props: bytes) -> bool:
    """Whether one llama.cpp has its model at hand: asleep, or a router, it would load it for the question."""
    told = _object(props)
    return told.get("is_sleeping") is False and told.get("role") != "router"


def refuses_tools_at_all(status: int, body: bytes) -> bool:
    """Whether llama.cpp takes no tools whatever its template can: its own words, since the status is one of many."""
    return status >= 400 and b"requires --jinja" in body


def tools_of_model_info(body: bytes) -> bool | None:
    """What SGLang's ``/model_info`` says: without a parser its calls come back as plain text, and no error."""
    told = _object(body)
    return bool(told["tool_call_parser"]) if "tool_call_parser" in told else None


def ranks_of_server_info(body: bytes) -> frozenset[int]:
    """What SGLang's ``/server_info`` says of data parallelism: its ranks are counted from nought."""
    size = _object(body).get("dp_size")
    return served_ranks(size=size) if isinstance(size, int) and not isinstance(size, bool) else frozenset()


def ranks_of_metrics(body: bytes) -> frozenset[int]:
    """The ranks of which vLLM's ``/metrics`` count requests; of too many, none."""
    found = {int(match[1]) for match in _ENGINE.finditer(body)}
    return frozenset(found) if len(found) <= RANKS_MAX else frozenset()


def facts_of_show(body: bytes) -> ModelFacts:
    """What Ollama's ``/api/show`` says a model can. Older servers say nothing."""
    can = _object(body).get("capabilities")
    if not isinstance(can, list):
        return ModelFacts()
    return ModelFacts(tools="tools" in can, images="vision" in can, audio="audio" in can)


def _object(body: bytes) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _tokens(value: Any) -> int | None:
    return (
        value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < TOKENS_MAX else None
    )


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
