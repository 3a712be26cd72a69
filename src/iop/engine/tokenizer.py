"""Byte-level BPE: any bytes can be encoded, and decoding the ids gives the same bytes back.

Ids run in three ranges: special marks first (they name roles and ends, and stand for no bytes), then the 256 bytes,
then one id per merge, in the order in which training found them. Text is cut into words, numbers' digits, runs of
signs and single spaces before merging, so that a merge never crosses them.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from iop.core.errors import InvalidRequest, NotFound

__all__ = ["FORMAT", "PIECE", "Detokenizer", "Tokenizer"]

FORMAT: Final = "iop-bpe-1"
"""Names the layout of ``tokenizer.json``."""

PIECE: Final = re.compile(r" ?[^\W\d_]{1,32}| ?\d| ?(?:[^\s\w]|_){1,32}|\s")
"""What merges stay within. At most 33 characters, so that merging a piece is cheap whatever the text."""

FILE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest ``tokenizer.json`` that is read."""

CACHED_PIECES_MAX: Final = 16_384
"""Pieces whose ids are remembered; when full the memory starts anew. Larger only helps varied text."""


class Tokenizer:
    """Turns text into ids and back. Not changed after construction but for its memory of pieces."""

    def __init__(self, *, specials: Sequence[str], merges: Sequence[tuple[int, int]]) -> None:
        self.specials: Mapping[str, int] = {name: index for index, name in enumerate(specials)}
        base = len(specials)
        self._byte_ids = tuple(base + value for value in range(256))
        self._bytes: list[bytes] = [b""] * base + [bytes([value]) for value in range(256)]
        self._ranks: dict[tuple[int, int], int] = {}
        for left, right in merges:
            if not (base <= left < len(self._bytes) and base <= right < len(self._bytes)):
                raise InvalidRequest("The tokenizer's merges refer to ids that do not exist yet.")
            self._ranks[left, right] = len(self._bytes)
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._names = tuple(specials)
        self._special_pattern = re.compile("|".join(re.escape(name) for name in specials) or r"(?!)")
        self._pieces: dict[str, tuple[int, ...]] = {}

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read ``tokenizer.json``.

        Raises:
            NotFound: there is no such file.
            InvalidRequest: it is not a tokenizer of ours.
        """
        try:
            if path.stat().st_size > FILE_BYTES_MAX:
                raise InvalidRequest("The checkpoint's tokenizer.json is too large.")
            content: Any = json.loads(path.read_bytes())
        except OSError as exc:
            raise NotFound(
                "The checkpoint has no readable tokenizer.json; point `checkpoint` at a complete one."
            ) from exc
        except ValueError as exc:
            raise InvalidRequest("The checkpoint's tokenizer.json is not JSON.") from exc
        try:
            if content["format"] != FORMAT:
                raise InvalidRequest(f"The checkpoint's tokenizer.json must have format {FORMAT}.")
            specials = [str(name) for name in content["specials"]]
            merges = [(int(left), int(right)) for left, right in content["merges"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise InvalidRequest("The checkpoint's tokenizer.json lacks specials or merges.") from exc
        return cls(specials=specials, merges=merges)

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self._bytes)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of ``text``. With ``special``, marks in the text become the ids they name; else they are plain text.

        Lone surrogates, which are not text, are encoded as `?`.
        """
        if not special:
            return self._encode_plain(text)
        ids: list[int] = []
        end = 0
        for match in self._special_pattern.finditer(text):
            ids.extend(self._encode_plain(text[end : match.start()]))
            ids.append(self.specials[match.group()])
            end = match.end()
        ids.extend(self._encode_plain(text[end:]))
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for; none for a special mark."""
        return self._bytes[token]

    def name(self, token: int) -> str:
        """A token's text for people: a mark's name, or its bytes as text with U+FFFD for what is not UTF-8."""
        if token < len(self._names):
            return self._names[token]
        return self._bytes[token].decode("utf-8", errors="replace")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of ``ids``; with ``special``, marks become their names, else nothing."""
        raw = b"".join(
            self._names[token].encode() if special and token < len(self._names) else self._bytes[token]
            for token in ids
        )
        return raw.decode("utf-8", errors="replace")

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for match in PIECE.finditer(text):
            piece = match.group()
            known = self._pieces.get(piece)
            if known is None:
                known = tuple(self._merge(piece.encode("utf-8", errors="replace")))
                if len(self._pieces) >= CACHED_PIECES_MAX:
                    self._pieces.clear()
                self._pieces[piece] = known
            ids.extend(known)
        return ids

    def _merge(self, raw: bytes) -> list[int]:
        ids = [self._byte_ids[value] for value in raw]
        while len(ids) > 1:
            ranked = [(self._ranks.get(pair, -1), at) for at, pair in enumerate(itertools.pairwise(ids))]
            best = min((r for r in ranked if r[0] >= 0), default=None)
            if best is None:
                break
            token, at = best
            ids[at : at + 2] = [token]
        return ids


class Detokenizer:
    """Turns one sequence's tokens into text as they come: only whole characters leave it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Text that became whole with this token, perhaps none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", True)
