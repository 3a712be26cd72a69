"""How the outer Edge speaks to the inner one; the clients' scenarios are those of one Edge."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from chain_site import KINDS

sys.path.append(str(Path(__file__).parents[1] / "api_http" / "convert"))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
