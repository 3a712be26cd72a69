"""Sources for config tests: text in, secrets from a dictionary."""

from __future__ import annotations

from pathlib import Path

from iop.config import Sources

HASH = "sha256:" + "ab" * 32


class FakeSecrets:
    """Files and variables that live in memory."""

    def __init__(self, files: dict[str, str] | None = None, variables: dict[str, str] | None = None) -> None:
        self.files = files or {}
        self.variables = variables or {}

    def read_file(self, path: Path) -> str:
        try:
            return self.files[str(path)]
        except KeyError:
            raise FileNotFoundError(2, "No such file or directory") from None

    def read_variable(self, name: str) -> str | None:
        return self.variables.get(name)


def sources(
    text: str = "",
    *,
    environment: dict[str, str] | None = None,
    flags: dict[str, tuple[str, str]] | None = None,
    secrets: FakeSecrets | None = None,
    file: str = "edge.yaml",
) -> Sources:
    """Sources as if ``text`` stood in ``file`` in the directory ``conf``."""
    return Sources(
        text=text,
        file=file,
        base_dir=Path("conf"),
        environment=environment or {},
        flags=flags or {},
        secrets=secrets or FakeSecrets(),
    )
