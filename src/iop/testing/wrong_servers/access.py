"""Who may do what, and how refusals look, done wrong (AD-03, AD-04, AD-06, AD-17)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from iop.admin.permissions import PRESETS, Permission, Principal
from iop.api.grpc.auth import PrincipalDirectory
from iop.api.grpc.errors import RpcFailure, failure_of
from iop.core.errors import IopError, NotFound
from iop.testing.conformance_site import Recipe
from iop.testing.wrong_servers.defect import Defect, patched

__all__ = ["DEFECTS"]

_authenticate = PrincipalDirectory.authenticate


def _anonymous_reads(directory: PrincipalDirectory, credentials: Any) -> Principal:
    if credentials.bearer is None:
        return Principal(name="anonymous", permissions=PRESETS["viewer"])
    return _authenticate(directory, credentials)


def _anybody_reads(directory: PrincipalDirectory, credentials: Any) -> Principal:
    try:
        return _authenticate(directory, credentials)
    except IopError:
        if credentials.bearer is None:
            raise
        return Principal(name="somebody", permissions=PRESETS["viewer"])


def _bare(error: IopError) -> RpcFailure:
    return dataclasses.replace(failure_of(error), trailing_metadata=())


_count = itertools.count(1)


def _unstable(error: IopError) -> RpcFailure:
    error.reason = f"{error.reason}_{next(_count)}"
    return failure_of(error)


async def _no_health(*_arguments: Any) -> Any:
    raise NotFound("no such service", reason="UNKNOWN_SERVICE")


def _open(_operation: Any, _viewer: Any) -> Any:
    return _operation


DEFECTS = (
    Defect(
        name="reading needs no credential",
        caught_by=("AD-03-no-credential", "AD-17-authentication-first"),
        patch=patched("iop.api.grpc.auth.PrincipalDirectory.authenticate", _anonymous_reads),
    ),
    Defect(
        name="any credential may read",
        caught_by=("AD-03-unknown-credential",),
        patch=patched("iop.api.grpc.auth.PrincipalDirectory.authenticate", _anybody_reads),
    ),
    Defect(
        name="a viewer may pause",
        caught_by=("AD-04-viewer-changes-nothing",),
        recipe=Recipe(presets={**PRESETS, "viewer": PRESETS["viewer"] | {Permission.PAUSE}}),
    ),
    Defect(
        name="a viewer may not watch",
        caught_by=("AD-04-viewer-reads",),
        recipe=Recipe(presets={**PRESETS, "viewer": PRESETS["viewer"] - {Permission.WATCH}}),
    ),
    Defect(
        name="keys of others are shown",
        caught_by=("AD-04-redaction",),
        patch=patched("iop.admin.core.redact", _open),
    ),
    Defect(
        name="refusals have no ErrorInfo",
        caught_by=("AD-17-error-info", "AD-14-zero-epoch"),
        patch=patched("iop.api.grpc.interceptors.failure_of", _bare),
    ),
    Defect(
        name="reasons are not stable",
        caught_by=("AD-17-error-info",),
        patch=patched("iop.api.grpc.interceptors.failure_of", _unstable),
    ),
    Defect(
        name="no health service for it",
        caught_by=("AD-06-health",),
        patch=patched("iop.api.grpc.health.LiveHealth.Check", _no_health),
    ),
)
