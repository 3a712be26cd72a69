"""A request's head: what it says, and the checks that the parser leaves to us.

The parser (llhttp, strict) already refuses bare CR or LF, folded headers, white space before a colon,
control bytes, repeated or malformed lengths, a length beside a transfer coding and malformed chunks. What
is left is policy: one Host, one transfer coding, known versions, targets in a form that cannot be read two
ways.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from iop.core.errors import InvalidRequest, IopError, Unsupported

__all__ = ["NO_HEAD", "HeaderList", "RequestHead", "check_framing", "split_target"]

HeaderList: TypeAlias = list[tuple[bytes, bytes]]
"""Names in lower case, values without surrounding white space, in order of arrival."""

_TARGET: Final = re.compile(rb"[\x21\x22\x24-\x7e]+")
_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")


@dataclass(slots=True, kw_only=True)
class RequestHead:
    """One request's first line and header fields.

    ``path`` is the target before ``?``, as sent (nothing is decoded); ``content_length`` is None when the
    body is chunked or absent (``is_chunked`` tells which).
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


def check_framing(head: RequestHead) -> IopError | None:
    """Say why a head must be refused for the way it frames its message, or None. Such a connection is
    closed.
    """
    if head.version not in ("1.1", "1.0"):
        return Unsupported("Only HTTP/1.1 and HTTP/1.0 are spoken here.", reason="HTTP_VERSION")
    hosts = head.get_all(b"host")
    if len(hosts) > 1 or (not hosts and head.version == "1.1"):
        return InvalidRequest("Exactly one Host header is required.", reason="MALFORMED_REQUEST")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        return InvalidRequest("The Host header is malformed.", reason="MALFORMED_REQUEST")
    coding = head.get(b"transfer-encoding")
    if coding is not None:
        if head.version == "1.0":
            return InvalidRequest("HTTP/1.0 has no transfer coding.", reason="MALFORMED_REQUEST")
        if coding.strip(b" \t").lower() != b"chunked":
            return Unsupported("The only transfer coding read here is chunked.", reason="TRANSFER_CODING")
        if head.content_length is not None:
            return InvalidRequest(
                "A length beside a transfer coding is ambiguous.", reason="MALFORMED_REQUEST"
            )
    expect = head.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        return InvalidRequest("The only expectation met here is 100-continue.", reason="EXPECTATION")
    return None
