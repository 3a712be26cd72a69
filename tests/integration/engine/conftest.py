"""Engines with real rank processes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from iop.engine import Engine, EngineSettings, builtin_checkpoint


@pytest.fixture
def settings() -> EngineSettings:
    return EngineSettings(checkpoint=builtin_checkpoint("first"), kv_blocks=256)


@pytest.fixture
async def engine(settings: EngineSettings) -> AsyncIterator[Engine]:
    async with Engine(settings) as running:
        yield running
