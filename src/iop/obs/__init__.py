"""Logs, metrics and identifiers in scope.

Metrics are imported from their module: a process that serves none must not carry their library.
"""

from iop.obs.logs import LogFormat, bound, configure_logging
from iop.obs.redaction import redact
from iop.obs.timed import RepeatLimiter, timed

__all__ = ["LogFormat", "RepeatLimiter", "bound", "configure_logging", "redact", "timed"]
