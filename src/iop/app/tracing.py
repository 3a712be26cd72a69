"""Makes a process's tracer from its settings; the one place that decides whether the tracing library is loaded."""

from __future__ import annotations

import importlib
import logging
from contextlib import AbstractContextManager, nullcontext

from iop import __version__
from iop.config.tree import Tracing
from iop.core.errors import InvalidRequest
from iop.obs.tracing import Tracer

__all__ = ["tracer_of"]

_log = logging.getLogger(__name__)


def tracer_of(
    settings: Tracing, *, process: str, instance: str = ""
) -> AbstractContextManager[Tracer | None]:
    """A tracer for as long as the process serves; None where no endpoint is set.

    Raises:
        InvalidRequest: an endpoint is set and the tracing library is not installed.
    """
    if settings.endpoint is None:
        return nullcontext(None)
    try:
        # Loading the library takes a tenth of a second and some MB: only who asked for traces pays.
        otel = importlib.import_module("iop.obs.otel")
    except ImportError:
        raise InvalidRequest(
            "`tracing.endpoint` is set, but the tracing library is missing: install `iop[tracing]`.",
            reason="TRACING_NOT_INSTALLED",
        ) from None
    _log.info("tracing.enabled", extra={"sample_ratio": settings.sample_ratio})
    made: AbstractContextManager[Tracer] = otel.tracing_to(
        otel.TracingSettings(
            endpoint=settings.endpoint,
            sample_ratio=settings.sample_ratio,
            process=process,
            instance=instance,
            version=__version__,
            interval_s=settings.interval_sec,
        )
    )
    return made
