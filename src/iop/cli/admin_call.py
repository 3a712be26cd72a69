"""One call of ``iop admin``: its common options, its server, its way of printing.

A verb is written with its own options only and gets a :class:`Call`. The decorators here add the common options to its
signature, open the client, run the verb, and turn errors into exit codes in one place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import typer

from iop.admin.requests import MutationOptions, StartProfileRequest, StopProfileRequest, Target
from iop.admin.results import OperationPlan
from iop.cli import admin_options as option
from iop.cli.admin_progress import observe, print_plan
from iop.cli.common_options import CommonOptions, with_options
from iop.cli.output import data, exit_with, print_error, print_json
from iop.cli.records import describe, describe_result, to_json
from iop.cli.targets import find_endpoint
from iop.client.admin import AdminClient, AdminTarget, ClientTls, StreamingMutation
from iop.core.errors import IopError

__all__ = ["Call", "mutation", "query"]

CALL_TIMEOUT_S: Final = 30.0
"""For calls that answer once; a server that says nothing for longer is not reachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the common options said; ``options`` and ``target`` only for verbs that have them."""

    client: AdminClient
    as_json: bool
    as_events: bool = False
    options: MutationOptions | None = None
    target: Target | None = None

    @property
    def required_options(self) -> MutationOptions:
        """The options of a mutation."""
        assert self.options is not None, "the verb is no mutation"
        return self.options

    @property
    def required_target(self) -> Target:
        """Whom the verb acts on."""
        assert self.target is not None, "the verb selects nobody"
        return self.target


Mutation = StreamingMutation | StartProfileRequest | StopProfileRequest

_SERVER_OPTIONS: Final[CommonOptions] = {
    "target": (option.TargetOption, None),
    "token": (option.TokenOption, None),
    "tls_ca": (option.CaOption, None),
    "tls_cert": (option.CertOption, None),
    "tls_key": (option.TlsKeyOption, None),
    "as_json": (option.JsonOption, False),
}
_SAFETY_OPTIONS: Final[CommonOptions] = {
    "key": (option.KeyOption, None),
    "expected_revision": (option.RevisionOption, None),
    "deadline_ms": (option.DeadlineOption, None),
    "validate_only": (option.ValidateOption, False),
    "reason": (option.ReasonOption, ""),
    "as_events": (option.EventsOption, False),
}
_SELECT_OPTIONS: Final[CommonOptions] = {
    "everything": (option.AllOption, False),
    "model": (option.ModelOption, None),
    "participant": (option.ParticipantOption, None),
}


def query(app: typer.Typer, name: str, *, role: str) -> Callable[[Callable[..., Awaitable[None]]], None]:
    """Register an async verb ``(call, ...)`` that asks and prints by itself. ``role``: the development token used."""

    def register(verb: Callable[..., Awaitable[None]]) -> None:
        async def run(call: Call, own: dict[str, Any]) -> int:
            await verb(call, **own)
            return 0

        _register(app, name, verb, common=_SERVER_OPTIONS, role=role, run=run)

    return register


def mutation(
    app: typer.Typer, name: str, *, role: str, selects: bool
) -> Callable[[Callable[..., Mutation]], None]:
    """Register a verb ``(call, ...)`` that returns the request to submit; the operation is observed to its end."""

    def register(verb: Callable[..., Mutation]) -> None:
        async def run(call: Call, own: dict[str, Any]) -> int:
            return await _submit(call, verb(call, **own))

        common = {**(_SELECT_OPTIONS if selects else {}), **_SERVER_OPTIONS, **_SAFETY_OPTIONS}
        _register(app, name, verb, common=common, role=role, run=run)

    return register


def _register(
    app: typer.Typer,
    name: str,
    verb: Callable[..., Any],
    *,
    common: CommonOptions,
    role: str,
    run: Callable[[Call, dict[str, Any]], Awaitable[int]],
) -> None:
    def command(own: dict[str, Any], given: dict[str, Any]) -> None:
        exit_with(_run(role, given, lambda call: run(call, own)))

    app.command(name)(with_options(common, verb, command))


def _run(role: str, given: dict[str, Any], work: Callable[[Call], Awaitable[int]]) -> int:
    as_json = bool(given["as_json"])
    try:
        return asyncio.run(_with_client(role, given, work))
    except IopError as error:
        print_error(error, as_json=as_json)
        return error.status.exit_code


async def _with_client(role: str, given: dict[str, Any], work: Callable[[Call], Awaitable[int]]) -> int:
    options: MutationOptions | None = None
    target: Target | None = None
    if "everything" in given:
        target = option.target_of(
            everything=given["everything"], models=given["model"], participants=given["participant"]
        )
    if "key" in given:
        options = option.mutation_options(
            option.Safety(
                key=given["key"],
                expected_revision=given["expected_revision"],
                deadline_ms=given["deadline_ms"],
                validate_only=given["validate_only"],
                reason=given["reason"],
            )
        )
    endpoint = find_endpoint("admin", target=given["target"], token=given["token"], role=role)
    ca = option.read_pem(given["tls_ca"], "--tls-ca")
    certificate = option.read_pem(given["tls_cert"], "--tls-cert")
    key = option.read_pem(given["tls_key"], "--tls-key")
    tls = ClientTls(ca=ca, certificate=certificate, key=key) if ca or certificate else None
    server = AdminTarget(address=endpoint.address, token=endpoint.token, tls=tls, timeout_s=CALL_TIMEOUT_S)
    async with AdminClient(server) as client:
        return await work(
            Call(
                client=client,
                as_json=given["as_json"],
                as_events=given.get("as_events", False),
                options=options,
                target=target,
            )
        )


async def _submit(call: Call, request: Mutation) -> int:
    """Submit, observe, print; the exit code tells how the operation ended."""
    if isinstance(request, StartProfileRequest | StopProfileRequest):
        client = call.client
        answer = await (
            client.start_profile(request)
            if isinstance(request, StartProfileRequest)
            else client.stop_profile(request)
        )
        if isinstance(answer, OperationPlan):
            print_plan(answer, as_json=call.as_json)
        elif call.as_json:
            print_json(to_json(answer))
        else:
            for line in describe(answer):
                data.print(line)
        return 0
    ended = await observe(
        call.client, call.client.submit(request), as_json=call.as_json, as_events=call.as_events
    )
    if ended.operation is not None and not call.as_json and not call.as_events:
        for line in describe_result(ended.operation):
            data.print(line)
    return ended.exit_code
