"""What `iop adapters` and the reference say is what the code does."""

from __future__ import annotations

import pytest

from iop.adapters.catalog import kinds, markdown
from iop.adapters.registry import NATIVE_CONTROLS, adapter_types
from iop.app.edge_snapshot import CONTROLLED_TYPES


@pytest.mark.clause("AD-15")
def test_every_kind_is_listed_with_what_it_offers() -> None:
    listed = {kind.type: kind for kind in kinds()}
    assert tuple(listed) == adapter_types()
    for name, load_control in NATIVE_CONTROLS.items():
        control = load_control()
        assert listed[name].offers == control.OFFERS
        assert all(offer.operation.name.lower().replace("_", " ") in markdown() for offer in control.OFFERS)


@pytest.mark.clause("EN-32", "AD-35")
def test_the_edge_holds_back_exactly_the_kinds_that_take_admin_steps() -> None:
    assert set(NATIVE_CONTROLS) == CONTROLLED_TYPES
