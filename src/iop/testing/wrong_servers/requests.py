"""Requests that should have been refused (AD-10, AD-11, AD-15, AD-16, AD-19, AD-25)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from iop.admin.core import AdminCore
from iop.admin.enums import ProfilerKind
from iop.admin.permissions import Principal
from iop.admin.profile import AdminProfile
from iop.api.grpc import admin_codec
from iop.core.errors import InvalidRequest
from iop.testing.wrong_servers.defect import Defect, patched, with_core

__all__ = ["DEFECTS", "mended"]

_SERVICE = "iop.api.grpc.admin_service.decode_mutation"


def mended(mend: Callable[[Any], None]) -> Any:
    """A surface that puts a wrong message right instead of refusing it."""

    def decode(message: Any, record_type: Any, **context: Any) -> Any:
        mend(message)
        return admin_codec.decode_mutation(message, record_type, **context)

    return patched(_SERVICE, decode)


def _has(message: Any, name: str) -> bool:
    return name in message.DESCRIPTOR.fields_by_name


def _default_busy_policy(message: Any) -> None:
    if _has(message, "busy_policy") and message.busy_policy == 0:
        message.busy_policy = 2


def _default_admission(message: Any) -> None:
    if _has(message, "pause") and message.HasField("pause") and message.pause.admission > 2:
        message.pause.admission = 1


def _empty_is_all(message: Any) -> None:
    if _has(message, "target") and message.target.WhichOneof("scope") is None:
        message.target.all.SetInParent()


def _empty_list_is_all(message: Any) -> None:
    is_empty = _has(message, "target") and not message.target.participants.participant_ids
    if is_empty and message.target.HasField("participants"):
        message.target.all.SetInParent()


def _unique(message: Any) -> None:
    if _has(message, "kinds"):
        kinds = list(dict.fromkeys(message.kinds))
        message.kinds[:] = kinds


def _no_deadline(message: Any) -> None:
    if message.options.HasField("deadline_ms") and message.options.deadline_ms == 0:
        message.options.ClearField("deadline_ms")


def _makes_keys(message: Any) -> None:
    if not message.options.idempotency_key and not message.options.validate_only:
        message.options.idempotency_key = f"made-up-{id(message)}"


def _shortens_keys(message: Any) -> None:
    message.options.idempotency_key = message.options.idempotency_key[:128]


def _any_key(message: Any) -> None:
    key = message.options.idempotency_key
    message.options.idempotency_key = key.encode("unicode_escape").decode().replace("\x7f", "?")


def _heeds_only(holds: Callable[[str], bool]) -> Any:
    """A surface that refuses some unknown fields and ignores the others."""

    def check(message: Any) -> None:
        found = [path for path in admin_codec._unknown_paths(message, "") if holds(path)]
        if found:
            raise InvalidRequest(f"Unknown fields: {found}", reason="UNKNOWN_FIELDS")

    return patched("iop.api.grpc.admin_codec.check_unknown_fields", check)


class _Lies(AdminCore):
    async def profile(self, principal: Principal) -> AdminProfile:
        told = await super().profile(principal)

        def more(capabilities: Any) -> Any:
            return dataclasses.replace(
                capabilities, profiler_kinds=capabilities.profiler_kinds | {ProfilerKind.GPU}
            )

        participants = tuple(
            dataclasses.replace(p, info=dataclasses.replace(p.info, capabilities=more(p.info.capabilities)))
            for p in told.participants
        )
        return dataclasses.replace(told, capabilities=more(told.capabilities), participants=participants)


def _nothing(*_arguments: Any, **_options: Any) -> Iterator[Any]:
    return iter(())


def _accepts(*_arguments: Any, **_options: Any) -> None:
    return None


class _FlatOffer(AdminCore):
    async def profile(self, principal: Principal) -> AdminProfile:
        told = await super().profile(principal)
        less = dataclasses.replace(told.capabilities, cache_kinds=frozenset())
        return dataclasses.replace(told, capabilities=less)


DEFECTS = (
    Defect(name="UNSPECIFIED accepted", caught_by=("AD-10-unspecified",), patch=mended(_default_busy_policy)),
    Defect(
        name="unknown enum number accepted",
        caught_by=("AD-10-unknown-enum",),
        patch=mended(_default_admission),
    ),
    Defect(
        name="an empty selector means everybody",
        caught_by=("AD-10-empty-selector",),
        patch=mended(_empty_is_all),
    ),
    Defect(
        name="an empty list of participants means everybody",
        caught_by=("AD-10-empty-selector",),
        patch=mended(_empty_list_is_all),
    ),
    Defect(name="duplicates accepted", caught_by=("AD-10-duplicates",), patch=mended(_unique)),
    Defect(
        name="a mutation without key accepted", caught_by=("AD-11-key-missing",), patch=mended(_makes_keys)
    ),
    Defect(name="long keys are cut", caught_by=("AD-11-key-length",), patch=mended(_shortens_keys)),
    Defect(name="any character in a key", caught_by=("AD-11-key-ascii",), patch=mended(_any_key)),
    Defect(
        name="a deadline of zero means none", caught_by=("AD-25-deadline-range",), patch=mended(_no_deadline)
    ),
    Defect(
        name="unknown field ignored at the top level",
        caught_by=("AD-16-unknown-top-level",),
        patch=_heeds_only(lambda path: "." in path),
    ),
    Defect(
        name="unknown field ignored in a nested message",
        caught_by=("AD-16-unknown-nested",),
        patch=_heeds_only(lambda path: "." not in path or "[" in path),
    ),
    Defect(
        name="unknown field ignored in a list",
        caught_by=("AD-16-unknown-in-list",),
        patch=_heeds_only(lambda path: "[" not in path),
    ),
    Defect(name="the profile promises too much", caught_by=("AD-15-advertised",), recipe=with_core(_Lies)),
    Defect(name="the profile hides a capability", caught_by=("AD-50-profile",), recipe=with_core(_FlatOffer)),
    Defect(
        name="unsupported wishes are accepted",
        caught_by=("AD-15-unsupported",),
        patch=patched("iop.admin.planner.capability_refusals", _nothing),
    ),
    Defect(
        name="half a group is accepted",
        caught_by=("AD-19-partial-group",),
        patch=patched("iop.admin.planner.check_participants", _accepts),
    ),
    Defect(
        name="overlapping operations are accepted",
        caught_by=("AD-18-in-progress", "AD-18-profile-active"),
        patch=patched("iop.admin.planner.conflict_refusals", _nothing),
    ),
)
