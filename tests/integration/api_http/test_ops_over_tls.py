"""An ops listener that speaks TLS, and the commands that ask it (AD-03)."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import ClientError, ClientSession

from iop.api.http.ops import OpsServer, ops_app

STATUS: dict[str, Any] = {"config_revision": 7, "nodes": [], "models": [], "leases": []}


class Source:
    """What the listener tells."""

    def status(self, *, with_leases: bool) -> dict[str, Any]:
        return {**STATUS, "with_leases": with_leases}


@dataclass
class Ops:
    address: str
    files: Path
    authority: trustme.CA

    async def iop(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command as a user does."""
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "iop.cli", *arguments, "--target", self.address],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


@pytest.fixture(params=["server", "mutual"])
async def ops(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Ops]:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    other.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    for name in ("localhost", "operator.example"):
        leaf = authority.issue_cert(name)
        leaf.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        leaf.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
    app = ops_app(
        source=Source(),  # type: ignore[arg-type]  # only its status is asked for
        render_metrics=bytes,
        metrics_type="text/plain",
        authorize=lambda _token: None,
        is_ready=lambda: (True, ""),
    )
    async with OpsServer(
        app,
        host="127.0.0.1",
        port=0,
        tls_cert=str(tmp_path / "localhost.pem"),
        tls_key=str(tmp_path / "localhost.key"),
        tls_client_ca=str(tmp_path / "ca.pem") if request.param == "mutual" else None,
    ) as server:
        yield Ops(address=f"localhost:{server.port}", files=tmp_path, authority=authority)


@pytest.mark.clause("AD-03")
async def test_status_over_tls_needs_the_authority_and_where_asked_a_certificate(ops: Ops) -> None:
    mine = ("--tls-cert", str(ops.files / "operator.example.pem"))
    key = ("--tls-key", str(ops.files / "operator.example.key"))
    trusted = ("--tls-ca", str(ops.files / "ca.pem"))
    done = await ops.iop("status", "--json", *trusted, *mine, *key)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["config_revision"] == 7

    plain = await ops.iop("status")
    assert plain.returncode != 0
    assert "--tls-ca" in plain.stderr, plain.stderr

    stranger = await ops.iop("status", "--tls-ca", str(ops.files / "other.pem"))
    assert stranger.returncode != 0
    assert "cannot be trusted" in stranger.stderr, stranger.stderr

    lost = await ops.iop("status", "--tls-ca", str(ops.files / "nowhere.pem"))
    assert lost.returncode == 2, (lost.returncode, lost.stderr)
    assert "nowhere.pem" in lost.stderr

    alone = await ops.iop("status", *mine)
    assert alone.returncode == 2
    assert "--tls-ca" in alone.stderr


@pytest.mark.clause("AD-03", "SF-30")
@pytest.mark.parametrize("ops", ["mutual"], indirect=True)
async def test_a_client_authority_is_honoured(ops: Ops) -> None:
    context = ssl.create_default_context()
    ops.authority.configure_trust(context)
    url = f"https://{ops.address}/healthz"
    async with ClientSession() as session:
        with pytest.raises(ClientError):
            await session.get(url, ssl=context)
        ops.authority.issue_cert("ops.example").configure_cert(context)
        async with session.get(url, ssl=context) as answer:
            assert answer.status == 200
