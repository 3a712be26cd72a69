"""Credentials out of the transport, and the directories that know them."""

from __future__ import annotations

import hashlib

import pytest

from iop.admin.permissions import PRESETS
from iop.api.grpc.auth import (
    ApiCaller,
    ApiKeyDirectory,
    ApiKeyGrant,
    Credentials,
    PrincipalDirectory,
    PrincipalGrant,
    read_credentials,
    secret_sha256,
)
from iop.core.errors import Unauthenticated


def principal(name: str, token: str) -> PrincipalGrant:
    return PrincipalGrant(name=name, permissions=PRESETS["viewer"], token_sha256=secret_sha256(token))


@pytest.mark.clause("AD-03")
@pytest.mark.parametrize(
    ("metadata", "bearer"),
    [
        ((), None),
        ((("user-agent", "x"),), None),
        ((("authorization", "Bearer abc"),), "abc"),
        ((("authorization", "bearer  abc "),), "abc"),
        ((("x-api-key", "abc"),), "abc"),
        ((("authorization", "Bearer a b"),), "a b"),
        ((("authorization", "Bearer " + "x" * 4089),), "x" * 4089),
    ],
)
def test_a_credential_is_read_from_metadata(
    metadata: tuple[tuple[str, str], ...], bearer: str | None
) -> None:
    assert read_credentials(metadata, {}, peer="p").bearer == bearer


@pytest.mark.clause("AD-03")
@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", "abc"),),
        (("authorization", "Basic abc"),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer  "),),
        (("authorization", "Bearer " + "x" * 4090),),
        (("authorization", "Bearer a"), ("x-api-key", "b")),
    ],
)
def test_a_malformed_or_doubled_credential_is_none_at_all(metadata: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(Unauthenticated):
        read_credentials(metadata, {}, peer="p")


@pytest.mark.clause("AD-03")
def test_certificate_names_are_read_from_the_connection() -> None:
    context = {"x509_subject_alternative_name": [b"a.example", b"b.example"], "x509_common_name": [b"c"]}
    assert read_credentials((), context, peer="p").names == ("a.example", "b.example")


@pytest.mark.clause("AD-04")
def test_tokens_are_known_by_their_digest_alone() -> None:
    directory = PrincipalDirectory([principal("a", "token-a"), principal("b", "token-b")])
    assert directory.grants[0].token_sha256 == hashlib.sha256(b"token-a").digest()
    assert directory.authenticate(Credentials(bearer="token-b", peer="p")).name == "b"
    for wrong in ("token-", "token-bb", "", hashlib.sha256(b"token-a").hexdigest()):
        with pytest.raises(Unauthenticated):
            directory.authenticate(Credentials(bearer=wrong))


@pytest.mark.clause("AD-04")
def test_a_principal_without_a_token_is_not_reached_by_an_empty_one() -> None:
    grant = PrincipalGrant(name="t", permissions=PRESETS["admin"], mtls_san="t.example")
    directory = PrincipalDirectory([grant])
    for credentials in (
        Credentials(),
        Credentials(bearer=""),
        Credentials(names=("",)),
        Credentials(names=("T.example",)),
        Credentials(names=("x.t.example",)),
    ):
        with pytest.raises(Unauthenticated):
            directory.authenticate(credentials)
    assert directory.authenticate(Credentials(names=("other", "t.example"))).name == "t"


@pytest.mark.clause("EN-114")
def test_a_reload_replaces_who_is_known() -> None:
    directory = PrincipalDirectory([principal("a", "old")])
    directory.replace([principal("a", "new")])
    assert directory.authenticate(Credentials(bearer="new")).name == "a"
    with pytest.raises(Unauthenticated):
        directory.authenticate(Credentials(bearer="old"))


@pytest.mark.clause("SF-23")
def test_without_keys_everybody_is_let_in_and_with_keys_nobody_without_one() -> None:
    directory = ApiKeyDirectory()
    assert directory.authenticate(Credentials(bearer="whatever", peer="p")) == ApiCaller(peer="p")
    directory.replace([ApiKeyGrant(name="k", key_sha256=secret_sha256("s"), models=frozenset({"fast"}))])
    caller = directory.authenticate(Credentials(bearer="s", peer="p"))
    assert (caller.name, caller.may_use("fast"), caller.may_use("slow")) == ("k", True, False)
    for bearer in (None, "other"):
        with pytest.raises(Unauthenticated):
            directory.authenticate(Credentials(bearer=bearer))


def test_nothing_secret_shows_in_a_repr() -> None:
    texts = [
        repr(Credentials(bearer="hush-token")),
        repr(principal("a", "hush-token")),
        repr(ApiKeyGrant(name="k", key_sha256=secret_sha256("hush-token"))),
    ]
    secrets = ("hush", secret_sha256("hush-token").hex(), repr(secret_sha256("hush-token")))
    assert not any(secret in text for text in texts for secret in secrets)
