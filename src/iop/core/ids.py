"""Identifier types: strings and numbers that must not be mixed up."""

from __future__ import annotations

import re
from typing import Final, NewType

NodeId = NewType("NodeId", str)
"""A configured Node, as the Edge's config names it."""

ProviderId = NewType("ProviderId", str)
"""One adapter instance on one Node: ``AdapterConfig.name``, or its type when that is empty (EN-85)."""

ModelId = NewType("ModelId", str)
"""A model as callers name it."""

RunId = NewType("RunId", str)
"""One dispatch attempt of a run or a tunnel; new for every attempt (EN-118)."""

RequestId = NewType("RequestId", str)
"""A caller's request over all its attempts; what ``x-request-id`` shows."""

SessionId = NewType("SessionId", str)
"""An agent's or a caller's session; never a connection."""

OperationId = NewType("OperationId", str)
"""An admin operation; stable and opaque (AD-21)."""

ParticipantId = NewType("ParticipantId", str)
"""One rank that admin operations act on."""

GroupId = NewType("GroupId", str)
"""The participants that act only together: the ranks of one engine."""

ENGINE_GROUP: Final = GroupId("engine")
"""The one group of a reference engine that serves alone. Here, because an Edge that only names it must not load it."""

LeaseId = NewType("LeaseId", int)
"""One occupied unit of a provider's capacity."""

Generation = NewType("Generation", int)
"""The Edge's own number of one ownership of a Node id; never on the wire (EN-16)."""

NAME_BYTES_MAX: Final = 128
"""Longest configured name. Longer ones would bloat metrics labels and every lease listing."""

_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")


def is_name(text: str) -> bool:
    """Whether ``text`` may name a Node or an adapter: letters, digits, ``.``, ``_`` and ``-``, at most 128 bytes."""
    return _NAME.fullmatch(text) is not None
