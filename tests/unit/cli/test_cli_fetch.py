"""What is kept of a fetched profile: the file that was named, or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from iop.admin.enums import ProfilerKind
from iop.admin.results import ProfileArtifact
from iop.cli.fetch_command import save
from iop.core.errors import RemoteProtocolError
from iop.core.ids import ParticipantId

CONTENT = b"trace" * 100


def artifact(participant: str = "n1/main/0") -> ProfileArtifact:
    return ProfileArtifact(
        participant_id=ParticipantId(participant),
        kind=ProfilerKind.SCHEDULER,
        uri="iop-artifact:n1/main/0f",
        media_type="application/json",
        size_bytes=len(CONTENT),
        sha256=sha256(CONTENT).digest(),
    )


async def chunks(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.mark.clause("AD-46")
async def test_a_file_that_has_its_digest_is_kept(tmp_path: Path) -> None:
    path = await save(artifact(), chunks(CONTENT[:7], CONTENT[7:]), tmp_path)
    assert path.read_bytes() == CONTENT
    assert [each.name for each in tmp_path.iterdir()] == ["n1-main-0.scheduler.json"]


@pytest.mark.clause("AD-46")
@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"!", CONTENT[:-1] + b"!"])
async def test_of_any_other_file_nothing_is_left(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        await save(artifact(), chunks(content), tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_a_participant_cannot_name_a_directory(tmp_path: Path) -> None:
    path = await save(artifact("../../etc/x"), chunks(CONTENT), tmp_path)
    assert path.parent == tmp_path
