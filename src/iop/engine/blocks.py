"""The KV arena's blocks and the prefix cache over them. Pure: it counts and names blocks, the ranks hold their content.

A block is *free*, *held* by one or more sequences, or *cached*: held by none but still named by the hash of all
tokens up to its end, so that a later prompt with the same beginning can take it over. Cached blocks are given away
again, least recently used first, when no free one is left.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["BlockPool", "chain_hash"]


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a full block: depends on its tokens and on all before it, and on the root's weights."""
    return hashlib.sha256(parent + b"".join(token.to_bytes(4, "little") for token in tokens)).digest()[:16]


class BlockPool:
    """Who holds which block. All methods are immediate; none raises for lack of blocks but returns None."""

    def __init__(self, *, blocks: int, block_tokens: int) -> None:
        self.total = blocks
        self.block_tokens = block_tokens
        self._free = list(range(blocks - 1, -1, -1))
        self._holders = [0] * blocks
        self._name_of: dict[int, bytes] = {}
        self._by_name: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks held by sequences."""
        return self.total - len(self._free) - len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def entries(self) -> int:
        """Names in the prefix cache, of cached and of held blocks."""
        return len(self._by_name)

    def take(self) -> int | None:
        """A block for new content, held once; None when all are held."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._by_name[self._name_of.pop(block)]
        else:
            return None
        self._holders[block] = 1
        return block

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The longest run of cached blocks that begins ``names``; each is then held once more."""
        found: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._idle.pop(block, None)
            self._holders[block] += 1
        return found

    def publish(self, block: int, name: bytes) -> None:
        """Name a held block whose content is complete; a name that is taken stays with its first block."""
        if name not in self._by_name and block not in self._name_of:
            self._by_name[name] = block
            self._name_of[block] = name

    def give_back(self, block: int) -> None:
        """Hold a block once less; when nobody holds it, it is cached if named, else free."""
        self._holders[block] -= 1
        assert self._holders[block] >= 0, "a block was given back twice"
        if self._holders[block] == 0:
            if block in self._name_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def free_blocks(self) -> list[int]:
        """Blocks whose content nobody will read again."""
        return list(self._free)

    def forget(self) -> tuple[int, list[int]]:
        """Drop every name. Returns how many there were and the blocks that became free thereby."""
        dropped, freed = len(self._by_name), list(self._idle)
        self._by_name.clear()
        self._name_of.clear()
        self._idle.clear()
        self._free.extend(reversed(freed))
        return dropped, freed
