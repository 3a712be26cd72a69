"""Mutual TLS on the admin listener: client certificates as principals, and certificates that are replaced."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from grpc_admin_rig import TOKENS, ScriptedOperations

from iop.admin.enums import BusyPolicy, CacheKind
from iop.admin.permissions import PRESETS
from iop.admin.requests import AllTargets, FlushCachesRequest, MutationOptions
from iop.api.grpc.auth import PrincipalDirectory, PrincipalGrant, secret_sha256
from iop.api.grpc.listeners import admin_listener
from iop.api.grpc.server import ListenerSettings
from iop.api.grpc.tls import tls_from_files
from iop.client.admin import AdminClient, AdminTarget, ClientTls
from iop.core.errors import InvalidRequest, IopError, PermissionDenied, Unauthenticated, Unavailable

FLUSH = FlushCachesRequest(
    options=MutationOptions(idempotency_key="k"),
    target=AllTargets(),
    kinds=(CacheKind.PREFIX,),
    busy_policy=BusyPolicy.FAIL,
)
OPENSSL = shutil.which("openssl")

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl program to make certificates")


@dataclass
class Authority:
    """A throw-away certificate authority in a folder."""

    folder: Path

    def __post_init__(self) -> None:
        self._openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", "-days", "2",
        )  # fmt: skip

    def issue(self, name: str, san: str) -> None:
        """Write NAME.pem and NAME.key, replacing them at once."""
        (self.folder / "san.cnf").write_text(f"subjectAltName={san}\n", encoding="utf-8")
        self._openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-keyout", f"{name}.key", "-out", "request.pem", "-subj", f"/CN={name}",
        )  # fmt: skip
        self._openssl(
            "x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "san.cnf",
        )  # fmt: skip

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def _openssl(self, *arguments: str) -> None:
        assert OPENSSL is not None
        subprocess.run([OPENSSL, *arguments], cwd=self.folder, check=True, capture_output=True, timeout=30)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.issue("server", "IP:127.0.0.1")
    made.issue("trainer", "DNS:trainer.example")
    made.issue("stranger", "DNS:stranger.example")
    return made


@pytest.fixture
def mtls_principals() -> PrincipalDirectory:
    return PrincipalDirectory(
        [
            PrincipalGrant(name="trainer", permissions=PRESETS["admin"], mtls_san="trainer.example"),
            PrincipalGrant(
                name="viewer", permissions=PRESETS["viewer"], token_sha256=secret_sha256(TOKENS["viewer"])
            ),
        ]
    )


def settings(authority: Authority) -> ListenerSettings:
    folder = authority.folder
    tls = tls_from_files(folder / "server.pem", folder / "server.key", folder / "ca.pem")
    return ListenerSettings(address="127.0.0.1:0", tls=tls, stop_grace_s=0.2)


def client(address: str, authority: Authority, name: str | None, token: str | None = None) -> AdminClient:
    tls = ClientTls(
        ca=authority.read("ca.pem"),
        certificate=authority.read(f"{name}.pem") if name else None,
        key=authority.read(f"{name}.key") if name else None,
    )
    return AdminClient(AdminTarget(address=address, token=token, tls=tls, timeout_s=60))


@pytest.mark.slow
@pytest.mark.clause("AD-03", "AD-04")
async def test_a_client_certificates_name_is_a_principal_and_a_token_decides_if_sent(
    operations: ScriptedOperations, mtls_principals: PrincipalDirectory, authority: Authority
) -> None:
    listener = admin_listener(operations, mtls_principals, settings(authority))
    async with listener.serving():
        async with client(listener.address, authority, "trainer") as admin:
            await admin.cancel("op-1")
        async with client(listener.address, authority, "trainer", TOKENS["viewer"]) as admin:
            await admin.profile()
            with pytest.raises(PermissionDenied):
                async for _ in admin.submit(FLUSH):
                    pass
        for token, reason in ((None, "UNKNOWN_CREDENTIAL"), ("wrong", "UNKNOWN_CREDENTIAL")):
            async with client(listener.address, authority, "stranger", token) as admin:
                with pytest.raises(Unauthenticated) as caught:
                    await admin.profile()
                assert caught.value.reason == reason
        async with client(listener.address, authority, None, TOKENS["viewer"]) as admin:
            with pytest.raises(Unavailable):
                await admin.profile()
    assert [principal.name for _, principal, _ in operations.seen] == ["trainer", "viewer"]


@pytest.mark.slow
async def test_replaced_certificates_are_used_for_new_connections_and_broken_ones_are_not(
    operations: ScriptedOperations, mtls_principals: PrincipalDirectory, authority: Authority
) -> None:
    async def reach(listener_address: str) -> IopError | None:
        async with client(listener_address, authority, "trainer") as admin:
            try:
                await admin.profile()
            except IopError as error:
                return error
        return None

    listener = admin_listener(operations, mtls_principals, settings(authority))
    async with listener.serving():
        assert await reach(listener.address) is None
        # A certificate for another name is refused by the client: proof that the new one is shown.
        authority.issue("server", "DNS:elsewhere.example")
        assert isinstance(await reach(listener.address), Unavailable)
        authority.issue("server", "IP:127.0.0.1")
        assert await reach(listener.address) is None
        (authority.folder / "server.pem").unlink()
        assert await reach(listener.address) is None


def test_an_unreadable_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"server\.pem"):
        tls_from_files(tmp_path / "server.pem", tmp_path / "server.key")
