"""What an OpenEngine server's ``ModelInfo`` says to callers of the HTTP API. Pure."""

from __future__ import annotations

from iop.adapters.openengine.prompt import OPENAI_FORMAT
from iop.pb.openengine.v1 import model_pb2
from iop.wire.model_facts import ModelFacts

__all__ = ["facts_of_info"]


def facts_of_info(info: model_pb2.ModelInfo) -> ModelFacts:
    """Lengths, and what a chat may hold, as far as it is told.

    A server that reads whole chats may take pictures and tools in them and has no word for that: unknown. To any other,
    a chat is its text and its pictures, and tools are refused.
    """
    reads_chats = OPENAI_FORMAT in info.tokenizer_modes
    images = info.supports_multimodal if info.HasField("supports_multimodal") else None
    return ModelFacts(
        context_tokens=info.max_context_length or None if info.HasField("max_context_length") else None,
        images=None if reads_chats and not images else images,
        tools=None if reads_chats else False,
    )
