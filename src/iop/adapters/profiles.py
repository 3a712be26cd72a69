"""Which named operation is which HTTP request at an engine, and which plain paths may be used besides
(EN-51, EN-55).
"""

from __future__ import annotations

import re
from typing import Final

from iop.wire.messages import ProfileOperation, ProtocolProfile, TunnelRequest

DEFAULT_PROFILE: Final = ProtocolProfile(
    name="openai",
    operations={
        "models": ProfileOperation(method="GET", path="/v1/models"),
        "chat_completions": ProfileOperation(method="POST", path="/v1/chat/completions"),
        "messages": ProfileOperation(method="POST", path="/v1/messages"),
        "count_tokens": ProfileOperation(method="POST", path="/v1/messages/count_tokens"),
        "responses": ProfileOperation(method="POST", path="/v1/responses"),
    },
)
"""For a config that carries none; an engine that lacks one of these says so itself."""

VLLM_PROFILE: Final = ProtocolProfile(
    name=DEFAULT_PROFILE.name,
    operations={
        **DEFAULT_PROFILE.operations,
        "tokenize": ProfileOperation(method="POST", path="/tokenize"),
    },
)
"""The same for vLLM, whose tokenizer takes chats."""

BUILT_IN_PROFILES: Final = (DEFAULT_PROFILE, VLLM_PROFILE)
"""What nobody wrote out: it says what there may be."""

_METHODS: Final = frozenset({"GET", "POST"})

_PATH: Final = re.compile(r"/[!$&'()*+,;=:@A-Za-z0-9._~/%?-]*")


class UnknownOperationError(ValueError):
    """The profile has no such operation."""


class ForbiddenPathError(ValueError):
    """The path may not be used over this wire."""


def resolve(profile: ProtocolProfile, request: TunnelRequest) -> tuple[bytes, bytes]:
    """Method and path for one tunnel request.

    A named operation takes both from the profile. Without one they come from the request, as older Edges
    send them and as completions and embeddings always travel. Such a path must lie under ``/v1/`` or stand
    in the profile: engines serve their control routes beside the public ones, often without any credential,
        and no tunnel may reach those.

    Raises:
        UnknownOperationError: named, but not in the profile.
        ForbiddenPathError: plain, but not a path that tunnels may use.
    """
    if request.operation:
        operation = profile.operations.get(request.operation)
        if operation is None:
            raise UnknownOperationError(request.operation)
        return operation.method.encode("ascii"), operation.path.encode("ascii")
    method, path = request.method, request.path
    if method not in _METHODS or not is_plain_path(path):
        raise ForbiddenPathError
    if not path.startswith("/v1/"):
        bare = path.partition("?")[0]
        if all((known.method, known.path) != (method, bare) for known in profile.operations.values()):
            raise ForbiddenPathError
    return method.encode("ascii"), path.encode("ascii")


def is_plain_path(path: str) -> bool:
    """Whether a path means the same to every server: absolute, no dot segments, nothing that hides a slash
    or a dot.
    """
    if _PATH.fullmatch(path) is None:
        return False
    bare = path.partition("?")[0]
    if "//" in bare or "%2f" in bare.lower() or "%2e" in bare.lower() or "%5c" in bare.lower():
        return False
    return not any(segment in {".", ".."} for segment in bare.split("/"))
