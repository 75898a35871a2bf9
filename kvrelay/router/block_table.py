"""The heart of the prefix index: a table from block hash to the set of those that hold the block, as bits.

Two implementations that give the same answers: `NativeBlockTable`, a hash table in C that takes about 50 bytes a block and
looks up a whole prompt in one call, and `PlainBlockTable`, a dict, where there is no compiler (and as the reference in tests).

Hashes go in and out as one string of bytes, 16 for each. They are hashes already, so the first bytes are the place to look.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kvrelay.native.compile import compile_and_load
from kvrelay.native.hashing import HASH_BYTES

_SOURCE = r"""
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Open addressing, linear probing, at most half full. A slot is a hash and its mask; an empty one has no bit set. */
typedef struct {
    uint64_t *slots;
    int64_t capacity; /* a power of two */
    int64_t used;
    int64_t width; /* words of a mask */
} Table;

static uint64_t *slot_at(const Table *t, int64_t place) { return t->slots + place * (2 + t->width); }

static int64_t home_of(const Table *t, const uint64_t *slot) { return (int64_t)(slot[0] & (uint64_t)(t->capacity - 1)); }

static int is_empty(const Table *t, const uint64_t *slot) {
    for (int64_t word = 0; word < t->width; word++)
        if (slot[2 + word])
            return 0;
    return 1;
}

/* Where the hash is, or where it would be put. */
static uint64_t *find(const Table *t, const char *hash) {
    uint64_t key[2];
    memcpy(key, hash, 16);
    for (int64_t place = home_of(t, key);; place = (place + 1) & (t->capacity - 1)) {
        uint64_t *slot = slot_at(t, place);
        if ((slot[0] == key[0] && slot[1] == key[1]) || is_empty(t, slot))
            return slot;
    }
}

/* Zeroed. A large table lies on huge pages where the system has them: its slots are read in no order, and every small page
   would have to be looked up. */
static uint64_t *new_slots(size_t bytes) {
    const size_t huge = (size_t)2 << 20;
    if (bytes < 2 * huge)
        return calloc(1, bytes);
    size_t rounded = (bytes + huge - 1) & ~(huge - 1);
    uint64_t *slots = aligned_alloc(huge, rounded);
    if (slots) {
#ifdef MADV_HUGEPAGE
        madvise(slots, rounded, MADV_HUGEPAGE);
#endif
        memset(slots, 0, rounded);
    }
    return slots;
}

static int rebuild(Table *t, int64_t capacity, int64_t width) {
    Table fresh = {new_slots((size_t)capacity * (size_t)(2 + width) * 8), capacity, t->used, width};
    if (!fresh.slots)
        return -1;
    for (int64_t place = 0; place < t->capacity; place++) {
        const uint64_t *old = slot_at(t, place);
        if (!is_empty(t, old))
            memcpy(find(&fresh, (const char *)old), old, (size_t)(2 + t->width) * 8);
    }
    free(t->slots);
    *t = fresh;
    return 0;
}

/* Takes the entry out and moves those behind it up, so that no search stops too early. */
static void take_out(Table *t, int64_t hole) {
    int64_t last = t->capacity - 1;
    size_t size = (size_t)(2 + t->width) * 8;
    t->used--;
    for (int64_t place = (hole + 1) & last;; place = (place + 1) & last) {
        uint64_t *slot = slot_at(t, place);
        if (is_empty(t, slot))
            break;
        if (((place - home_of(t, slot)) & last) >= ((place - hole) & last)) {
            memcpy(slot_at(t, hole), slot, size);
            hole = place;
        }
    }
    memset(slot_at(t, hole), 0, size);
}

Table *kvrelay_table_new(void) {
    Table *t = calloc(1, sizeof(Table));
    if (t && rebuild(t, 1024, 1)) {
        free(t);
        return NULL;
    }
    return t;
}

void kvrelay_table_free(Table *t) {
    free(t->slots);
    free(t);
}

int64_t kvrelay_table_size(const Table *t) { return t->used; }

/* Each returns how many of the hashes changed for this bit; -1: no memory. */

int64_t kvrelay_table_add(Table *t, const char *hashes, int64_t count, int64_t bit) {
    int64_t changed = 0, capacity = t->capacity, width = bit / 64 + 1;
    while (2 * (t->used + count) > capacity)
        capacity *= 2;
    if ((capacity > t->capacity || width > t->width) && rebuild(t, capacity, width > t->width ? width : t->width))
        return -1;
    for (int64_t i = 0; i < count; i++, hashes += 16) {
        uint64_t *slot = find(t, hashes), one = 1ULL << (bit & 63);
        if (is_empty(t, slot)) {
            memcpy(slot, hashes, 16);
            t->used++;
        }
        changed += !(slot[2 + bit / 64] & one);
        slot[2 + bit / 64] |= one;
    }
    return changed;
}

int64_t kvrelay_table_remove(Table *t, const char *hashes, int64_t count, int64_t bit) {
    int64_t changed = 0;
    for (int64_t i = 0; i < count; i++, hashes += 16) {
        uint64_t *slot = find(t, hashes), one = 1ULL << (bit & 63);
        if (bit / 64 >= t->width || !(slot[2 + bit / 64] & one))
            continue;
        changed++;
        slot[2 + bit / 64] &= ~one;
        if (is_empty(t, slot))
            take_out(t, (slot - t->slots) / (2 + t->width));
    }
    return changed;
}

int64_t kvrelay_table_clear(Table *t, int64_t bit) {
    int64_t changed = 0, last = t->capacity - 1, start = 0;
    uint64_t one = 1ULL << (bit & 63);
    if (bit / 64 >= t->width)
        return 0;
    while (!is_empty(t, slot_at(t, start)))
        start++;
    /* From an empty slot once around: what `take_out` moves up comes from places that are still ahead. */
    for (int64_t step = 1; step <= last; step++) {
        int64_t place = (start + step) & last;
        uint64_t *slot = slot_at(t, place);
        while (slot[2 + bit / 64] & one) {
            changed++;
            slot[2 + bit / 64] &= ~one;
            if (is_empty(t, slot))
                take_out(t, place);
        }
    }
    return changed;
}

/* Writes the hashes that have the bit; `out` has room for them. */
int64_t kvrelay_table_list(const Table *t, int64_t bit, char *out) {
    int64_t count = 0;
    for (int64_t place = 0; place < t->capacity && bit / 64 < t->width; place++) {
        const uint64_t *slot = slot_at(t, place);
        if (slot[2 + bit / 64] >> (bit & 63) & 1)
            memcpy(out + 16 * count++, slot, 16);
    }
    return count;
}

/* Follows the hashes while anybody has all of them so far. Writes pairs (bit, how many it has times unit) and returns their
   number; `out` has room for one pair per bit. The first pass has the memory on its way before the second needs it. */
int64_t kvrelay_table_match(const Table *t, const char *hashes, int64_t count, int64_t unit, int32_t *out) {
    int64_t pairs = 0;
    uint64_t alive[64];
    if (count == 0 || t->width > 64) /* more than 4096 workers */
        return 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t key[2];
        memcpy(key, hashes + 16 * i, 16);
        __builtin_prefetch(slot_at(t, home_of(t, key)));
    }
    memcpy(alive, find(t, hashes) + 2, (size_t)t->width * 8);
    for (int64_t i = 0; i <= count; i++, hashes += 16) {
        const uint64_t *mask = i < count ? find(t, hashes) + 2 : NULL;
        uint64_t left = 0;
        for (int64_t word = 0; word < t->width; word++) {
            uint64_t still = mask ? alive[word] & mask[word] : 0;
            for (uint64_t lost = alive[word] ^ still; lost; lost &= lost - 1, pairs++) {
                out[2 * pairs] = (int32_t)(64 * word + __builtin_ctzll(lost));
                out[2 * pairs + 1] = (int32_t)(i * unit);
            }
            alive[word] = still;
            left |= still;
        }
        if (!left)
            break;
    }
    return pairs;
}
"""


class BlockTable(Protocol):
    """`bit` is a small number. What is added twice, or removed without being there, is no error."""

    def __len__(self) -> int:
        """Hashes that have any bit."""

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
    return compile_and_load("block_table", _SOURCE, ("-O3",))


class _Functions:
    """Python's lock is kept during each call: they are short, and getting it back may take longer than the call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        number, table, text = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p

        def function(name: str, result: Any, *arguments: Any) -> Any:
            return ctypes.PYFUNCTYPE(result, *arguments)((f"kvrelay_table_{name}", library))

        self.new = function("new", table)
        self.free = function("free", None, table)
        self.size = function("size", number, table)
        self.add = function("add", number, table, text, number, number)
        self.remove = function("remove", number, table, text, number, number)
        self.clear = function("clear", number, table, number)
        self.list = function("list", number, table, number, text)
        self.match = function("match", number, table, text, number, number, ctypes.c_void_p)
