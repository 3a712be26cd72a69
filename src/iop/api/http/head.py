"""A request's head: what it says, and the checks that the parser leaves to us.

The parser (llhttp, strict) already refuses bare CR or LF, folded headers, white space before a colon,
control bytes, repeated or malformed lengths, a length beside a transfer coding and malformed chunks. What
is left is policy: one Host, one transfer coding, known versions, targets in a form that cannot be read two
ways.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from iop.core.errors import InvalidRequest, Unsupported

__all__ = ["NO_HEAD", "HeaderList", "RequestHead", "check_body_coding", "read_head", "split_target"]

HeaderList: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case, values without surrounding white space, in order of arrival."""

_TARGET: Final = re.compile(rb"[\x21\x22\x24-\x7e]+")
_FRAMING: Final = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"expect", b"content-encoding"}
)
_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")


@dataclass(slots=True, kw_only=True)
class RequestHead:
    """One request's first line and header fields.

    ``path`` is the target before ``?``, as sent (nothing is decoded); ``content_length`` is None when the
    body is chunked or absent (``is_chunked`` tells which); ``is_body_coded`` says that it is compressed.
    """

    method: bytes
    path: bytes
    query: bytes
    version: str
    headers: HeaderList
    content_length: int | None
    is_chunked: bool
    is_keep_alive: bool
    expects_continue: bool
    is_body_coded: bool = False

    def get(self, name: bytes) -> bytes | None:
        """The first value of header ``name`` (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def get_all(self, name: bytes) -> list[bytes]:
        """Every value of header ``name`` (lower case)."""
        return [value for key, value in self.headers if key == name]


NO_HEAD: Final = RequestHead(
    method=b"",
    path=b"",
    query=b"",
    version="1.1",
    headers=[],
    content_length=None,
    is_chunked=False,
    is_keep_alive=False,
    expects_continue=False,
)
"""Stands in where a request was refused before its head was understood."""


@lru_cache(maxsize=256)
def split_target(target: bytes) -> tuple[bytes, bytes]:
    """Split a request target into path and query.

    Raises:
        InvalidRequest: not a path and not an absolute http(s) address, or bytes that have no place there.
    """
    if _TARGET.fullmatch(target) is None:
        raise InvalidRequest(
            "The request target holds bytes that a target may not.", reason="MALFORMED_REQUEST"
        )
    if target[:1] != b"/":
        scheme, mark, rest = target.partition(b"://")
        if not mark or scheme.lower() not in (b"http", b"https"):
            raise InvalidRequest("The request target must be a path.", reason="MALFORMED_REQUEST")
        authority, slash, tail = rest.partition(b"/")
        if not authority or b"?" in authority or b"@" in authority:
            raise InvalidRequest("The request target's address is malformed.", reason="MALFORMED_REQUEST")
        target = slash + tail if slash else b"/"
    path, _, query = target.partition(b"?")
    return path, query


def read_head(
    *, method: bytes, target: bytes, version: str, headers: HeaderList, is_keep_alive: bool
) -> RequestHead:
    """Judge a parsed head and make it.

    Raises:
        InvalidRequest: its target or framing is malformed or could be read in two ways.
        Unsupported: a version or transfer coding that is not spoken here.
    """
    path, query = split_target(target)
    length: int | None = None
    coding = expect = None
    hosts = 0
    is_body_coded = False
    for name, value in headers:
        if name not in _FRAMING:
            continue
        if name == b"host":
            hosts += 1
            if not _is_host(value):
                raise InvalidRequest("The Host header is malformed.", reason="MALFORMED_REQUEST")
        elif name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            coding = value
        elif name == b"expect":
            expect = value
        elif value and value.lower() != b"identity":
            is_body_coded = True
    if version not in ("1.1", "1.0"):
        raise Unsupported("Only HTTP/1.1 and HTTP/1.0 are spoken here.", reason="HTTP_VERSION")
    if hosts > 1 or (not hosts and version == "1.1"):
        raise InvalidRequest("Exactly one Host header is required.", reason="MALFORMED_REQUEST")
    if coding is not None:
        _check_coding(coding, version=version, has_length=length is not None)
    if expect is not None and expect.lower() != b"100-continue":
        raise InvalidRequest("The only expectation met here is 100-continue.", reason="EXPECTATION")
    return RequestHead(
        method=method,
        path=path,
        query=query,
        version=version,
        headers=headers,
        content_length=length,
        is_chunked=coding is not None,
        is_keep_alive=is_keep_alive,
        expects_continue=expect is not None,
        is_body_coded=is_body_coded,
    )


def check_body_coding(head: RequestHead) -> None:
    """Refuse a compressed body: its fields must be read, and a small one could unfold to any size.

    Raises:
        InvalidRequest: ``Content-Encoding`` names a coding, and there is a body.
    """
    if head.is_body_coded and (head.is_chunked or head.content_length):
        raise InvalidRequest(
            "The body must come as it is: send it without `Content-Encoding`, uncompressed.",
            reason="CONTENT_ENCODING",
            details={"field": "content-encoding"},
        )


def _check_coding(coding: bytes, *, version: str, has_length: bool) -> None:
    if version == "1.0":
        raise InvalidRequest("HTTP/1.0 has no transfer coding.", reason="MALFORMED_REQUEST")
    if coding.strip(b" \t").lower() != b"chunked":
        raise Unsupported("The only transfer coding read here is chunked.", reason="TRANSFER_CODING")
    if has_length:
        raise InvalidRequest("A length beside a transfer coding is ambiguous.", reason="MALFORMED_REQUEST")


@lru_cache(maxsize=256)
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None
