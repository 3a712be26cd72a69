"""What every test would pay for and none needs."""

from __future__ import annotations

import gc
import os
import ssl
from pathlib import Path

import trust


def test_a_collection_of_garbage_goes_over_nothing_that_the_collection_of_tests_made() -> None:
    assert gc.get_freeze_count() > len(gc.get_objects())


def test_a_client_that_a_test_makes_reads_one_authority() -> None:
    assert Path(os.environ["SSL_CERT_FILE"]).samefile(trust.NOBODY)
    assert len(ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"]).get_ca_certs()) == 1
