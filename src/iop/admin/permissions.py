"""Who may do what: permissions per operation kind, presets, and the checks (AD-03, AD-04). Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from iop.admin.enums import AdminOperationKind
from iop.admin.results import AdminOperation
from iop.core.errors import PermissionDenied

__all__ = [
    "ALL_PERMISSIONS",
    "PERMISSION_OF_KIND",
    "PRESETS",
    "Permission",
    "Principal",
    "may_cancel_anything",
    "redact",
    "require",
    "require_cancel",
]


@enum.unique
class Permission(enum.Enum):
    """One thing that a principal may be granted; the value is its name in the config."""

    PROFILE = "profile"
    GET = "get"
    LIST = "list"
    WATCH = "watch"
    FLUSH = "flush"
    PAUSE = "pause"
    RESUME = "resume"
    RELEASE = "release"
    RESTORE = "restore"
    UPDATE_WEIGHTS = "update-weights"
    START_PROFILE = "profile-start"
    STOP_PROFILE = "profile-stop"
    RECONFIGURE = "reconfigure"
    ABORT = "abort"
    LORA = "lora"
    AUDIT = "audit"


ALL_PERMISSIONS: Final = frozenset(Permission)

_VIEWER: Final = frozenset({Permission.PROFILE, Permission.GET, Permission.LIST, Permission.WATCH})
_OPERATOR: Final = _VIEWER | {
    Permission.FLUSH,
    Permission.PAUSE,
    Permission.RESUME,
    Permission.START_PROFILE,
    Permission.STOP_PROFILE,
}

PRESETS: Final[Mapping[str, frozenset[Permission]]] = MappingProxyType(
    {"viewer": _VIEWER, "operator": _OPERATOR, "admin": ALL_PERMISSIONS}
)
"""Roles of the config (AD-04)."""

PERMISSION_OF_KIND: Final[Mapping[AdminOperationKind, Permission]] = MappingProxyType(
    {
        AdminOperationKind.FLUSH_CACHES: Permission.FLUSH,
        AdminOperationKind.PAUSE: Permission.PAUSE,
        AdminOperationKind.RESUME: Permission.RESUME,
        AdminOperationKind.RELEASE_RESOURCES: Permission.RELEASE,
        AdminOperationKind.RESTORE_RESOURCES: Permission.RESTORE,
        AdminOperationKind.UPDATE_WEIGHTS: Permission.UPDATE_WEIGHTS,
        AdminOperationKind.START_PROFILE: Permission.START_PROFILE,
        AdminOperationKind.STOP_PROFILE: Permission.STOP_PROFILE,
        AdminOperationKind.RECONFIGURE_SERVING: Permission.RECONFIGURE,
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller. `peer` is its address, for the audit only."""

    name: str
    permissions: frozenset[Permission]
    peer: str = ""

    @property
    def may_everything(self) -> bool:
        """Whether the principal holds every permission: an admin."""
        return self.permissions >= ALL_PERMISSIONS


def require(principal: Principal, permission: Permission) -> None:
    """Check one permission.

    Raises:
        PermissionDenied: reason `PERMISSION_DENIED`, naming the missing permission (AD-03).
    """
    if permission not in principal.permissions:
        raise PermissionDenied(
            f"the principal {principal.name!r} lacks the permission {permission.value!r}",
            details={"principal": principal.name, "permission": permission.value},
        )


_MUTATING: Final = frozenset(PERMISSION_OF_KIND.values())


def may_cancel_anything(principal: Principal) -> bool:
    """Whether some operation of some kind could be cancelled by the principal (AD-24)."""
    return bool(principal.permissions & _MUTATING)


def require_cancel(principal: Principal, kind: AdminOperationKind) -> None:
    """Cancelling needs the permission of the cancelled kind (AD-04)."""
    require(principal, PERMISSION_OF_KIND[kind])


def redact(operation: AdminOperation, viewer: Principal) -> AdminOperation:
    """Hide key and reason from all but their principal and admins (AD-04)."""
    if viewer.may_everything or viewer.name == operation.principal:
        return operation
    return dataclasses.replace(operation, idempotency_key="", reason="")
