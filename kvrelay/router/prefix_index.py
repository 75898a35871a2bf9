"""Which workers hold which blocks: an exact copy of their prefix caches, made from their events.

    block hash -> the set of workers that hold it, one bit each

A worker has a bit from its first block on until it is dropped; then the bit is free for another. `match` follows a prompt's
hashes from the first on and keeps the bits that all of them have, so its time hardly depends on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.ids import WorkerId
from kvrelay.native.hashing import HASH_BYTES
from kvrelay.router.block_table import BlockTable, new_block_table


class PrefixIndex:
    """Says nothing about whether a worker can be used. Hashes of another length than ours are left out."""

    def __init__(self, table: BlockTable | None = None) -> None:
        self._table = new_block_table() if table is None else table
        self._bits: dict[WorkerId, int] = {}
        self._workers: list[WorkerId] = []  # by bit
        self._free_bits: list[int] = []
        self._num_blocks: dict[WorkerId, int] = {}

    def __len__(self) -> int:
        """Blocks, each counted once, however many workers hold it."""
        return len(self._table)

    @property
    def size_bytes(self) -> int:
        return self._table.size_bytes

    def hashes(self, worker_id: WorkerId) -> frozenset[bytes]:
        if worker_id not in self._bits:
            return frozenset()
        listed = self._table.list(self._bits[worker_id], self._num_blocks[worker_id])
        return frozenset(listed[start : start + HASH_BYTES] for start in range(0, len(listed), HASH_BYTES))

    def add(self, worker_id: WorkerId, hashes: Iterable[bytes]) -> None:
        bit = self._bit(worker_id)
        self._num_blocks[worker_id] += self._table.add(_joined(hashes), bit)

    def remove(self, worker_id: WorkerId, hashes: Iterable[bytes]) -> None:
        """Those that the worker does not hold are no error."""
        if worker_id in self._bits:
            self._num_blocks[worker_id] -= self._table.remove(_joined(hashes), self._bits[worker_id])

    def clear(self, worker_id: WorkerId) -> None:
        if self._num_blocks.get(worker_id):
            self._num_blocks[worker_id] -= self._table.clear(self._bits[worker_id])

    def replace(self, worker_id: WorkerId, hashes: Iterable[bytes]) -> None:
        """From now on the worker holds these and nothing else."""
        self.clear(worker_id)
        self.add(worker_id, hashes)

    def drop(self, worker_id: WorkerId) -> None:
        """The worker is gone."""
        if worker_id in self._bits:
            self.clear(worker_id)
            del self._num_blocks[worker_id]
            self._free_bits.append(self._bits.pop(worker_id))

    def holds(self, digest: bytes) -> bool:
        """Whether any worker has this block, however much of what comes before it."""
        return bool(self._table.match(digest, len(self._workers), 1)[0])

    def match(self, hashes: bytes, block_size: int = 1) -> dict[WorkerId, int]:
        """How many tokens of these blocks, from the first on without a gap, each worker holds. Those that hold none are left
        out."""
        bits, tokens = self._table.match(hashes, len(self._workers), block_size)
        return dict(zip(map(self._workers.__getitem__, bits), tokens, strict=True))

    def _bit(self, worker_id: WorkerId) -> int:
        bit = self._bits.get(worker_id)
        if bit is None:
            if not self._free_bits:
                self._free_bits.append(len(self._workers))
                self._workers.append(worker_id)
            bit = self._bits[worker_id] = self._free_bits.pop()
            self._workers[bit] = worker_id
            self._num_blocks[worker_id] = 0
        return bit


def _joined(hashes: Iterable[bytes]) -> bytes:
    known = list(hashes)
    if set(map(len, known)) - {HASH_BYTES}:
        known = [digest for digest in known if len(digest) == HASH_BYTES]
    return b"".join(known)
