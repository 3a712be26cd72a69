"""Edges behind Edges: how a request tells which it has come through, and how a circle of them is broken (SF-24). Pure.

Every Edge process has a name, made at its start. It adds the name to what it sends on, and refuses a request that has
its own name on it already. The same words go as a header to providers that speak HTTP and as metadata to OpenEngine
servers; whoever is no Edge ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from iop.edge.calls import DispatchRequest
from iop.wire import run_metadata
from iop.wire.messages import Header

__all__ = ["HOPS_MAX", "VIA_FIELD", "has_looped", "hop_headers", "hop_metadata", "read_via"]

VIA_FIELD: Final = "iop-via"
"""Header field and metadata key."""

HOPS_MAX: Final = 8
"""Most Edges in a row. A circle through replicas with many names would otherwise go round until it met one again."""

VIA_CHARS_MAX: Final = 512
"""Longest list that is read; `HOPS_MAX` names are far shorter."""

_VIA_FIELD: Final = VIA_FIELD.encode("ascii")


def read_via(values: Sequence[str | bytes]) -> str:
    """The list that a request brought, in however many fields; what cannot be in a field is let go."""
    texts = [value.decode("latin-1") if isinstance(value, bytes) else value for value in values]
    joined = ", ".join(texts)[:VIA_CHARS_MAX]
    return "".join(character for character in joined if " " <= character <= "~")


def has_looped(via: str, instance: str) -> bool:
    """Whether a request has been at this Edge before, or at too many."""
    names = [name.strip() for name in via.split(",")]
    return len(names) >= HOPS_MAX or (bool(instance) and instance in names)


def hop_headers(headers: Sequence[Header], via: str, instance: str) -> tuple[Header, ...]:
    """Request headers for a provider, with this Edge on the list."""
    if not instance:
        return tuple(headers)
    if not via:  # straight from a client, as most are
        return (*headers, (_VIA_FIELD, instance.encode("ascii")))
    kept = (field for field in headers if field[0].lower() != _VIA_FIELD)
    return (*kept, (_VIA_FIELD, _longer(via, instance).encode("latin-1")))


def hop_metadata(metadata: Mapping[str, str], request: DispatchRequest, instance: str) -> Mapping[str, str]:
    """A run's metadata for an OpenEngine server: the list, the request id that the caller knows, and its priority.

    What the caller said in OpenEngine's own words is there already, and stays.
    """
    told = {run_metadata.REQUEST_ID: str(request.request_id), **metadata}
    if request.priority:
        told.setdefault(run_metadata.PRIORITY, str(request.priority))
    if instance:
        told[run_metadata.VIA] = _longer(request.via, instance)
    return told


def _longer(via: str, instance: str) -> str:
    return f"{via}, {instance}" if via else instance
