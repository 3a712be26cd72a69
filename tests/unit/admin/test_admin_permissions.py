"""Presets and per-kind permissions (AD-04)."""

from __future__ import annotations

import pytest

from iop.admin.enums import AdminOperationKind
from iop.admin.permissions import (
    ALL_PERMISSIONS,
    PERMISSION_OF_KIND,
    PRESETS,
    Permission,
    Principal,
    may_cancel_anything,
    require,
)
from iop.core.errors import PermissionDenied


@pytest.mark.clause("AD-04")
def test_presets_grow_from_viewer_to_admin() -> None:
    assert PRESETS["viewer"] == {
        Permission.PROFILE,
        Permission.GET,
        Permission.LIST,
        Permission.WATCH,
    }
    assert PRESETS["operator"] - PRESETS["viewer"] == {
        Permission.FLUSH,
        Permission.PAUSE,
        Permission.RESUME,
        Permission.START_PROFILE,
        Permission.STOP_PROFILE,
    }
    assert PRESETS["admin"] == ALL_PERMISSIONS


@pytest.mark.clause("AD-04")
def test_every_kind_has_a_permission_of_its_own() -> None:
    assert set(PERMISSION_OF_KIND) == set(AdminOperationKind)
    assert len(set(PERMISSION_OF_KIND.values())) == len(AdminOperationKind)


@pytest.mark.clause("AD-04")
@pytest.mark.parametrize("permission", list(Permission))
def test_a_principal_may_do_what_was_granted_and_no_more(permission: Permission) -> None:
    granted = Principal(name="one", permissions=frozenset({permission}))
    require(granted, permission)
    for other in Permission:
        if other is not permission:
            with pytest.raises(PermissionDenied):
                require(granted, other)
    assert may_cancel_anything(granted) is (permission in PERMISSION_OF_KIND.values())
