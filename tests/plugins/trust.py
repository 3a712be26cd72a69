"""Clients of the tests trust one authority that nobody uses: to read those of the system takes each of them 40 ms.

A client of HTTP reads them when it is made, and here hundreds are made that talk to plain listeners of this machine.
Tests of TLS name their own authority. Where real engines run, which may fetch something, nothing is changed.
"""

from __future__ import annotations

import os
from pathlib import Path

NOBODY = Path(__file__).parents[1] / "data" / "nobody.pem"

if not any(name.startswith("ENGINES_") for name in os.environ):
    os.environ["SSL_CERT_FILE"] = str(NOBODY)
