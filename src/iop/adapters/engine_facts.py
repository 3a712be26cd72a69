"""What an HTTP engine offers, found out by questions that change nothing: GETs of its lists, and of its POST routes.

A server that tells an unknown path (404) from a wrong method (405) shows by that which routes it has. One that answers
404 to both, or anything to all, shows nothing, and is believed to have what its profile says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from iop.wire.model_facts import ModelFacts

__all__ = ["MODELS_MAX", "absent_of", "facts_of_models", "facts_of_props"]

MODELS_MAX: Final = 64
"""Models of one engine that facts are kept of."""

TOKENS_MAX: Final = 2**40
"""Above this a context length is nonsense."""

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
            facts[name[:256]] = ModelFacts(context_tokens=length)
    return facts


def facts_of_props(body: bytes) -> ModelFacts:
    """What llama.cpp's ``/props`` says: the context of one slot, what goes in, and what the template can."""
    try:
        props = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return ModelFacts()
    if not isinstance(props, dict):
        return ModelFacts()
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


def _tokens(value: Any) -> int | None:
    return (
        value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < TOKENS_MAX else None
    )


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
