"""Arenas: resident when made, gone when closed, the same bytes after a round trip."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest

from iop.engine.arena import Arena, ArraySpec, resident_bytes

SPECS = {"a": ArraySpec(shape=(300, 7), dtype="float32"), "b": ArraySpec(shape=(5,), dtype="int8")}


@pytest.mark.clause("AD-43")
def test_closing_gives_every_resident_byte_back() -> None:
    size = 8 * 1024 * 1024
    arena = Arena("iop-test-pad", SPECS, size_min=size)
    assert resident_bytes("iop-test-pad") == size
    arena.close()
    assert resident_bytes("iop-test-pad") == 0


def test_a_view_that_is_still_held_keeps_the_memory_and_is_told() -> None:
    arena = Arena("iop-test-view", SPECS)
    view = arena.arrays["a"]
    with pytest.raises(BufferError):
        arena.close()
    del view
    arena.close()


def test_arrays_do_not_overlap_and_the_digest_follows_their_bytes() -> None:
    arena = Arena("iop-test-digest", SPECS)
    empty = arena.digest()
    arena.arrays["b"][:] = 1
    assert not arena.arrays["a"].any()
    changed = arena.digest()
    assert changed != empty
    arena.arrays["b"][:] = 0
    assert arena.digest() == empty
    arena.close()


def test_a_copy_in_a_file_comes_back_whole() -> None:
    arena, other = Arena("iop-test-out", SPECS), Arena("iop-test-in", SPECS)
    arena.arrays["a"][:] = np.arange(2100).reshape(300, 7)
    with tempfile.TemporaryFile() as file:
        arena.write_to(file.fileno())
        other.read_from(file.fileno())
        assert other.digest() == arena.digest()
        os.ftruncate(file.fileno(), 100)
        with pytest.raises(EOFError):
            other.read_from(file.fileno())
    arena.close()
    other.close()
