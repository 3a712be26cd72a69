"""Logs, metrics and identifiers in scope."""

from iop.obs.logs import LogFormat, bound, configure_logging
from iop.obs.metrics import Metrics
from iop.obs.redaction import redact
from iop.obs.timed import RepeatLimiter, timed

__all__ = ["LogFormat", "Metrics", "RepeatLimiter", "bound", "configure_logging", "redact", "timed"]
