"""What a Node found out about a model at its engine, as one word of a provider's capabilities (EN-90).

Every field is what the engine itself said; what it did not say is ``None``, and nobody guesses. The words travel in
``ProviderSnapshot.capabilities``, which older peers ignore.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "ABSENT_OPERATIONS",
    "MODEL_FACTS",
    "NODE_STOPPING",
    "ModelFacts",
    "decode_facts",
    "encode_facts",
    "read_names",
]

ABSENT_OPERATIONS = "absent_operations"
"""Capability: operations that the profile names and the engine does not have, with commas."""

MODEL_FACTS = "model:"
"""Beginning of the capability of one target."""

NODE_STOPPING = "node_stopping"
"""Capability, ``true``: the Node lets its work finish and takes none any more, until its connection closes (EN-109)."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine says of one model.

    Attributes:
        context_tokens: tokens of prompt and answer that one request may have.
        images: whether it takes pictures.
        audio: whether it takes sound.
        tools: whether its template knows tools.
        embeds: whether it makes embeddings.
    """

    context_tokens: int | None = None
    images: bool | None = None
    audio: bool | None = None
    tools: bool | None = None
    embeds: bool | None = None


def encode_facts(facts: ModelFacts) -> str:
    """The capability's value."""
    return msgspec.json.encode(facts).decode()


def decode_facts(text: str) -> ModelFacts:
    """The facts; a value that cannot be read says nothing."""
    try:
        return msgspec.json.decode(text, type=ModelFacts)
    except msgspec.MsgspecError:
        return ModelFacts()


def read_names(text: str) -> frozenset[str]:
    """Names with commas between them."""
    return frozenset(name for name in text.split(",") if name)
