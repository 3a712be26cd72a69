"""Options that the verbs of ``iop admin`` share, and what they mean."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from iop.admin.requests import AllTargets, ModelTargets, MutationOptions, ParticipantTargets, Target
from iop.core.errors import InvalidRequest

__all__ = [
    "AllOption",
    "CaOption",
    "CertOption",
    "DeadlineOption",
    "EventsOption",
    "JsonOption",
    "KeyOption",
    "ModelOption",
    "ParticipantOption",
    "ReasonOption",
    "RevisionOption",
    "TargetOption",
    "TlsKeyOption",
    "TokenOption",
    "ValidateOption",
    "mutation_options",
    "read_pem",
    "target_of",
]

_SERVER = "Server"
_SAFETY = "Safety"
_OUTPUT = "Output"
_WHO = "Participants (one is required)"

TargetOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="HOST:PORT", help="Server; else the one that runs here.", rich_help_panel=_SERVER
    ),
]
TokenOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="REF",
        help="file:PATH, env:NAME, none, or viewer|operator|admin for a development token.",
        rich_help_panel=_SERVER,
    ),
]
CaOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-ca", help="Authorities of the server, PEM; turns TLS on.", rich_help_panel=_SERVER),
]
CertOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--tls-cert", help="Our certificate, PEM, for mutual TLS.", rich_help_panel=_SERVER),
]
TlsKeyOption: TypeAlias = Annotated[
    Path | None, typer.Option("--tls-key", help="Its private key, PEM.", rich_help_panel=_SERVER)
]
KeyOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--key",
        help="Idempotency key: the same key is the same operation. Else a new one.",
        rich_help_panel=_SAFETY,
    ),
]
RevisionOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--expected-revision", min=0, help="Refuse if the server's revision differs.", rich_help_panel=_SAFETY
    ),
]
DeadlineOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--deadline-ms", min=1, help="The operation's own deadline.", rich_help_panel=_SAFETY),
]
ValidateOption: TypeAlias = Annotated[
    bool, typer.Option("--validate-only", help="Show the plan, change nothing.", rich_help_panel=_SAFETY)
]
ReasonOption: TypeAlias = Annotated[
    str, typer.Option("--reason", help="Why, for the audit.", rich_help_panel=_SAFETY)
]
JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output.", rich_help_panel=_OUTPUT)
]
EventsOption: TypeAlias = Annotated[
    bool,
    typer.Option("--events", help="Print each event as a JSON line, as it comes.", rich_help_panel=_OUTPUT),
]
AllOption: TypeAlias = Annotated[bool, typer.Option("--all", help="Every participant.", rich_help_panel=_WHO)]
ModelOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--model", help="Those that serve this model.", rich_help_panel=_WHO)
]
ParticipantOption: TypeAlias = Annotated[
    list[str] | None, typer.Option("--participant", help="This one, by id.", rich_help_panel=_WHO)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Safety:
    """What the safety options said."""

    key: str | None
    expected_revision: int | None
    deadline_ms: int | None
    validate_only: bool
    reason: str


def mutation_options(safety: Safety) -> MutationOptions:
    """The options of a mutation; without ``--key`` each call is a new operation.

    Raises:
        InvalidRequest: ``--key`` is empty: a script whose variable is not set must not lose its protection (AD-11).
    """
    if safety.key == "":
        raise InvalidRequest(
            "--key is empty: give the operation's key, or leave the option out.", reason="EMPTY_KEY"
        )
    return MutationOptions(
        idempotency_key=safety.key if safety.key is not None else f"cli-{secrets.token_hex(12)}",
        expected_revision=safety.expected_revision,
        deadline_ms=safety.deadline_ms,
        validate_only=safety.validate_only,
        reason=safety.reason,
    )


def target_of(*, everything: bool, models: list[str] | None, participants: list[str] | None) -> Target:
    """Whom a verb acts on.

    Raises:
        InvalidRequest: none of the three was said, or more than one.
    """
    said = [everything, bool(models), bool(participants)]
    if sum(said) != 1:
        raise InvalidRequest(
            "Say whom this acts on: exactly one of --all, --model MODEL or --participant ID.",
            reason="NO_TARGET",
        )
    if everything:
        return AllTargets()
    if models:
        return ModelTargets(models=tuple(models))
    return ParticipantTargets(participant_ids=tuple(participants or ()))


def read_pem(path: Path | None, option: str) -> bytes | None:
    """A PEM file's bytes.

    Raises:
        InvalidRequest: it cannot be read.
    """
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"The file of {option} cannot be read: {error.strerror}.", reason="NO_FILE"
        ) from None
