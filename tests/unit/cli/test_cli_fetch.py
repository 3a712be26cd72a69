"""What is kept of a fetched profile: the file that was named, or nothing."""

from __future__ import annotations

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


@pytest.mark.clause("AD-46")
def test_a_file_that_has_its_digest_is_kept(tmp_path: Path) -> None:
    path = save(artifact(), [CONTENT[:7], CONTENT[7:]], tmp_path)
    assert path.read_bytes() == CONTENT
    assert [each.name for each in tmp_path.iterdir()] == ["n1-main-0.scheduler.json"]


@pytest.mark.clause("AD-46")
@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"!", CONTENT[:-1] + b"!"])
def test_of_any_other_file_nothing_is_left(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        save(artifact(), [content], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_participant_cannot_name_a_directory(tmp_path: Path) -> None:
    assert save(artifact("../../etc/x"), [CONTENT], tmp_path).parent == tmp_path
