"""The heart of the prefix index: a table from block hash to the set of those that hold the block, as bits.

Two implementations that give the same answers: `NativeBlockTable`, a hash table in C (block_table.c) that takes 48 to 96 bytes
a block, however many workers there are, and looks up a whole prompt in one call; and `PlainBlockTable`, a dict, where there is
no compiler (and as the reference in tests). The one in C knows no more than 4,096 workers: of others it keeps nothing.

Hashes go in and out as one string of bytes, 16 for each. They are hashes already, so the first bytes are the place to look.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kvrelay.native.compile import load_native
from kvrelay.native.hashing import HASH_BYTES


class BlockTable(Protocol):
    """`bit` is a small number. What is added twice, or removed without being there, is no error."""

    def __len__(self) -> int:
        """Hashes that have any bit."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""

    def add(self, hashes: bytes, bit: int) -> int:
        """Returns for how many of them this is new."""

    def remove(self, hashes: bytes, bit: int) -> int:
        """Returns how many of them had it."""

    def clear(self, bit: int) -> int:
        """Returns how many had it."""

    def list(self, bit: int, count: int) -> bytes:
        """The `count` hashes that have it, in any order."""

    def match(self, hashes: bytes, num_bits: int, unit: int) -> tuple[Sequence[int], Sequence[int]]:
        """The bits below `num_bits` that the first hash has; and for each, how many hashes have it, from the first on without a
        gap, times `unit`."""


def new_block_table() -> BlockTable:
    library = _library()
    return PlainBlockTable() if library is None else NativeBlockTable(library)


class NativeBlockTable:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = functions = _Functions(library)
        self._table = functions.new()
        if not self._table:
            raise MemoryError
        weakref.finalize(self, functions.free, self._table)

    def __len__(self) -> int:
        return int(self._functions.size(self._table))

    @property
    def size_bytes(self) -> int:
        return int(self._functions.bytes(self._table))

    def add(self, hashes: bytes, bit: int) -> int:
        changed = int(self._functions.add(self._table, hashes, len(hashes) // HASH_BYTES, bit))
        if changed < 0:
            raise MemoryError
        return changed

    def remove(self, hashes: bytes, bit: int) -> int:
        return int(self._functions.remove(self._table, hashes, len(hashes) // HASH_BYTES, bit))

    def clear(self, bit: int) -> int:
        return int(self._functions.clear(self._table, bit))

    def list(self, bit: int, count: int) -> bytes:
        out = ctypes.create_string_buffer(HASH_BYTES * count + 1)
        listed = self._functions.list(self._table, bit, out)
        assert listed == count
        return out.raw[: HASH_BYTES * count]

    def match(self, hashes: bytes, num_bits: int, unit: int) -> tuple[Sequence[int], Sequence[int]]:
        out = (ctypes.c_int32 * (2 * num_bits))()
        count = self._functions.match(self._table, hashes, len(hashes) // HASH_BYTES, unit, out)
        return out[: 2 * count : 2], out[1 : 2 * count : 2]


class PlainBlockTable:
    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def size_bytes(self) -> int:
        entries = sum(sys.getsizeof(digest) + sys.getsizeof(mask) for digest, mask in self._masks.items())
        return sys.getsizeof(self._masks) + entries

    def add(self, hashes: bytes, bit: int) -> int:
        changed, one, masks = 0, 1 << bit, self._masks
        for digest in _split(hashes):
            mask = masks.get(digest, 0)
            changed += not mask & one
            masks[digest] = mask | one
        return changed

    def remove(self, hashes: bytes, bit: int) -> int:
        changed, one, masks = 0, 1 << bit, self._masks
        for digest in _split(hashes):
            mask = masks.get(digest, 0)
            if mask & one:
                changed += 1
                masks[digest] = mask ^ one
                if mask == one:
                    del masks[digest]
        return changed

    def clear(self, bit: int) -> int:
        return self.remove(self.list(bit, 0), bit)

    def list(self, bit: int, count: int) -> bytes:
        return b"".join(digest for digest, mask in self._masks.items() if mask >> bit & 1)

    def match(self, hashes: bytes, num_bits: int, unit: int) -> tuple[Sequence[int], Sequence[int]]:
        found: dict[int, int] = {}
        alive, depth = (1 << num_bits) - 1, 0
        for digest in _split(hashes):
            still = alive & self._masks.get(digest, 0)
            if depth:
                found.update(dict.fromkeys(_bits(alive ^ still), depth * unit))
            alive, depth = still, depth + 1
            if not alive:
                break
        found.update(dict.fromkeys(_bits(alive if depth else 0), depth * unit))
        return list(found), list(found.values())


def _split(hashes: bytes) -> Iterator[bytes]:
    return (hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_native(__file__)


class _Functions:
    """Python's lock is kept during each call: they are short, and getting it back may take longer than the call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        number, table, text = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p

        def function(name: str, result: Any, *arguments: Any) -> Any:
            return ctypes.PYFUNCTYPE(result, *arguments)((f"kvrelay_table_{name}", library))

        self.new = function("new", table)
        self.free = function("free", None, table)
        self.size = function("size", number, table)
        self.bytes = function("bytes", number, table)
        self.add = function("add", number, table, text, number, number)
        self.remove = function("remove", number, table, text, number, number)
        self.clear = function("clear", number, table, number)
        self.list = function("list", number, table, number, text)
        self.match = function("match", number, table, text, number, number, ctypes.c_void_p)
