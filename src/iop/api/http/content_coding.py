"""Content codings of providers that compress although nobody asked (P-05)."""

from __future__ import annotations

import zlib
from typing import Final

__all__ = ["DecodeError", "Decoder", "decoder_for"]

EXPANSION_BYTES_MAX: Final = 16 * 1024 * 1024
"""Most bytes that one read may unfold to; a larger burst is a bomb, not an answer."""


class DecodeError(Exception):
    """The bytes are not in the coding they claim, or unfold to too many."""


class Decoder:
    """Undoes gzip or deflate as bytes come; gives out what a sync flush has completed."""

    __slots__ = ("_is_begun", "_is_deflate", "_machine")

    def __init__(self, *, is_deflate: bool) -> None:
        self._is_deflate = is_deflate
        self._is_begun = False
        self._machine = zlib.decompressobj(zlib.MAX_WBITS | 16)

    @property
    def is_whole(self) -> bool:
        """Whether what came ends where its coding says, or is nothing."""
        return not self._is_begun or self._machine.eof

    def decode(self, data: bytes) -> bytes:
        """The clear bytes of ``data``.

        Raises:
            DecodeError: broken, or more than ``EXPANSION_BYTES_MAX``.
        """
        if not self._is_begun:
            if not data:
                return b""
            self._is_begun = True
            if self._is_deflate:
                # "deflate" is zlib's format by its definition, and the bare one by habit.
                is_zlib = data[0] & 0x0F == 8 and data[0] >> 4 <= 7
                self._machine = zlib.decompressobj(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)
        try:
            clear = self._machine.decompress(data, EXPANSION_BYTES_MAX)
            while self._machine.eof and self._machine.unused_data and not self._is_deflate:
                rest = self._machine.unused_data  # gzip members may follow one another
                self._machine = zlib.decompressobj(zlib.MAX_WBITS | 16)
                clear += self._machine.decompress(rest, EXPANSION_BYTES_MAX)
        except zlib.error as error:
            raise DecodeError from error
        if self._machine.unconsumed_tail or len(clear) > 2 * EXPANSION_BYTES_MAX:
            raise DecodeError
        return clear


def decoder_for(coding: bytes) -> Decoder | None:
    """A decoder for a ``Content-Encoding``, or None for one that is not read here."""
    if coding in (b"gzip", b"x-gzip"):
        return Decoder(is_deflate=False)
    if coding == b"deflate":
        return Decoder(is_deflate=True)
    return None
