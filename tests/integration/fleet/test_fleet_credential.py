"""A wrong credential for an engine's admin server shows with its cause and where it is mended; real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from iop.testing.engine_fleet import EngineFleet
from iop.testing.process_fleet import ProcessFleet, eventually

pytestmark = pytest.mark.slow


@pytest.mark.clause("AD-03", "AD-39", "EN-34")
async def test_status_says_that_the_engine_refuses_the_credential_and_which_key_to_set(
    tmp_path: Path,
) -> None:
    async with EngineFleet(tmp_path, ["n1"], ranks=1, capacity=4) as fleet:
        fleet.spawn_engine("n1")
        await fleet.engine_ready("n1")
        (tmp_path / "engine.token").write_text("not-the-engines")
        await ProcessFleet.start(fleet)

        async def is_told() -> bool:
            (provider,) = (await fleet.node("n1"))["providers"]
            reason = str(provider["reason"])
            return "refuses the credential" in reason and "admin.token" in reason

        await eventually(is_told, what="the cause is told")
        (provider,) = (await fleet.node("n1"))["providers"]
        assert "not-the-engines" not in str(provider)
        assert "127.0.0.1" not in provider["reason"]
