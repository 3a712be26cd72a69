"""How the outer Edge speaks to the inner one."""

from __future__ import annotations

import pytest
from chain_site import KINDS


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
