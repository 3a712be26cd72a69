"""The vocabulary of the operation core in one place: enums, requests, answers, profile, steps."""

from __future__ import annotations

from iop.admin import enums, profile, requests, results, steps
from iop.admin.enums import *  # noqa: F403
from iop.admin.profile import *  # noqa: F403
from iop.admin.requests import *  # noqa: F403
from iop.admin.results import *  # noqa: F403
from iop.admin.steps import *  # noqa: F403

__all__ = [  # noqa: PLE0604
    *enums.__all__,
    *profile.__all__,
    *requests.__all__,
    *results.__all__,
    *steps.__all__,
]
