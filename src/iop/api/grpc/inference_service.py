"""`openengine.v1.Inference` over an inference port (SF-20 to SF-22).

Acceptance is the border: until the port has accepted, every refusal is a status; from then on the call ends with OK and
its last message says how the generation ended.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Final, TypeAlias

from iop.api.grpc.auth import ApiCaller
from iop.api.grpc.capabilities import check_supported
from iop.api.grpc.hops import ignored_hints, read_hops, with_ignored
from iop.api.grpc.inference_codec import decode_generate, encode_event
from iop.api.grpc.interceptors import current_api_caller, name_request
from iop.api.grpc.metadata import WEIGHT_VERSION_KEY, header_text, read_hints
from iop.api.grpc.ports import (
    ControlPort,
    GenerateCall,
    GenerationStream,
    InferencePort,
    ModelInfo,
    RequestFailed,
)
from iop.core.errors import Internal, IopError, PermissionDenied
from iop.pb.openengine.v1 import generation_pb2 as pb
from iop.pb.openengine.v1 import openengine_pb2, openengine_pb2_grpc

__all__ = [
    "INFERENCE_SERVICE",
    "AdmitKey",
    "InferenceService",
    "NoteRefusal",
    "check_model_allowed",
    "no_limits",
    "no_note",
]

_log = logging.getLogger(__name__)

INFERENCE_SERVICE: Final[str] = openengine_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

UNKNOWN_VERSION: Final = "unknown"


AdmitKey: TypeAlias = Callable[[str], Callable[[], None]]
"""Counts a generation against the limits of the API key of this name, or raises Overloaded; gives what counts it out
(SF-11)."""


NoteRefusal: TypeAlias = Callable[[str, str, str, str], None]
"""Told of a generation that never came to the port: request id or nothing, model, reason, name of the API key."""


def no_limits(_key: str) -> Callable[[], None]:
    """Every key may do as much as it likes."""
    return lambda: None


def no_note(_request_id: str, _model: str, _reason: str, _key: str) -> None:
    """Nobody keeps account of refusals."""


class InferenceService(openengine_pb2_grpc.InferenceServicer):
    """Generate, for whoever can generate.

    Args:
        inference: who generates.
        control: says what the server is.
        admit: the limits of API keys.
        on_refused: hears of requests that were refused here (EN-112).
    """

    def __init__(
        self,
        inference: InferencePort,
        control: ControlPort,
        *,
        admit: AdmitKey = no_limits,
        on_refused: NoteRefusal = no_note,
    ) -> None:
        self._inference = inference
        self._control = control
        self._admit = admit
        self._on_refused = on_refused

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """One generation; ends with exactly one terminal message after acceptance."""
        caller = current_api_caller()
        name_request(request.request_id)
        try:
            leave = self._admit(caller.name)
        except IopError as error:
            self._on_refused(request.request_id, request.model, error.reason, caller.name)
            raise
        try:
            try:
                call, told = self._read(request, context)
            except IopError as error:
                self._on_refused(request.request_id, request.model, error.reason, caller.name)
                raise
            async with contextlib.aclosing(await self._inference.generate(call)) as stream:
                await context.send_initial_metadata(
                    (*_version_metadata(stream), *with_ignored(stream.metadata, told))
                )
                try:
                    async for event, usage in stream:
                        yield encode_event(call.request_id, event, usage)
                except IopError as error:
                    yield encode_event(call.request_id, failure_event(error), None)
                except Exception:  # noqa: BLE001 - accepted: the caller gets a terminal event, the log the cause
                    _log.exception("generate.failed_internally", extra={"request_id": call.request_id})
                    failed = failure_event(Internal("The server failed; its log has the cause."))
                    yield encode_event(call.request_id, failed, None)
                context.set_trailing_metadata(_version_metadata(stream))
        finally:
            leave()

    def _read(
        self, request: pb.GenerateRequest, context: Any
    ) -> tuple[GenerateCall, tuple[tuple[str, str], ...]]:
        """Decode and check all that can be refused before the port is asked; and what the answer tells of it."""
        caller = current_api_caller()
        metadata = tuple(context.invocation_metadata() or ())
        said = hints = read_hints(metadata)
        if "priority" not in caller.may:  # taken only from keys that are allowed it (SF-16)
            hints = replace(hints, priority=None)
        if "session" not in caller.may:
            hints = replace(hints, routing_key="")
        hops = read_hops(metadata)
        call = replace(
            decode_generate(request, request_id=uuid.uuid4().hex, hints=hints, caller=caller.name),
            come_through=hops.via,
            known_as=hops.request_id,
        )
        model = self._inference.model_info(call.model)
        check_model_allowed(caller, call.model, model)
        check_supported(call, model, self._control.server_info)
        return call, ignored_hints(said, hints)


def check_model_allowed(caller: ApiCaller, name: str, model: ModelInfo) -> None:
    """Refuse a model that the key may not use, by whatever name.

    Raises:
        PermissionDenied: MODEL_NOT_ALLOWED.
    """
    names = {name, model.served_model_name, *model.served_model_aliases}
    if not any(map(caller.may_use, names - {""})):
        raise PermissionDenied(
            "This API key may not use that model.", reason="MODEL_NOT_ALLOWED", details={"model": name}
        )


def failure_event(error: IopError) -> RequestFailed:
    """A failure after acceptance, as the terminal event says it."""
    return RequestFailed(code=error.status.engine, message=error.message, retryable=error.retryable)


def _version_metadata(stream: GenerationStream) -> tuple[tuple[str, str], ...]:
    """AD-33: at the first byte, and again at the end, when it may have changed under a KEEP update."""
    return ((WEIGHT_VERSION_KEY, header_text(stream.weight_version or UNKNOWN_VERSION)),)
