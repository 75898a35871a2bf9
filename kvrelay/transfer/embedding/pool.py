"""The blocks of a worker's embedding pool: which are free, and where they lie. Several threads may use it.

    free ──take──> held ──give_back──> free
                    └──quarantine──> quarantined ──give_back──> free     a peer may still write them

A worker on a card may have every block twice, under one number: on the card and on its host. Transports that can move memory
of a card move the card's; the others move the host's. Features are stored on the card, and copied to the host when a consumer
is reached in no other way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.transfer.embedding.memory import PoolMemory
from kvrelay.transfer.embedding.pieces import Embedding
from kvrelay.transfer.region import Region


class PoolCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks; the three kinds sum to `total`."""

    total: int
    free: int
    held: int
    quarantined: int


class EmbeddingPool:
    """Blocks in memory that peers can reach."""

    def __init__(self, host: PoolMemory, card: PoolMemory | None = None, on_card: Collection[str] = ()) -> None:
        """`on_card`: the transports that move the card's memory, by name."""
        assert card is None or card.layout == host.layout
        self.layout = host.layout
        self.host = host
        self.card = card
        self._on_card = frozenset() if card is None else frozenset(on_card)
        self._lock = threading.Lock()
        self._free = np.ones(self.layout.num_blocks, dtype=bool)
        self._quarantined: set[int] = set()
        self._copied: set[int] = set()  # the first blocks of embeddings that were copied to the host
        self._is_wanted = False  # a `take` found too few
        self.on_room: Callable[[], None] = lambda: None  # called when blocks are given back after that

    # Memory

    def memory_of(self, transport: str) -> PoolMemory:
        """That this transport moves."""
        return self.card if self.card is not None and transport in self._on_card else self.host

    def regions_on_card(self) -> dict[str, Region]:
        """By transport; all others move the host's."""
        return {name: self.memory_of(name).region for name in self._on_card}

    def store(self, blocks: Sequence[int], embedding: Embedding) -> None:
        """On the card, if there is one: see `PoolMemory.store`."""
        memory = self.host if self.card is None else self.card
        memory.store(blocks, embedding)

    def bring_to(self, transport: str, blocks: Sequence[int], num_tokens: int) -> bool:
        """Makes an embedding that was stored reachable by this transport. Whether it had to be copied, which it is once."""
        with self._lock:
            if self.card is None or transport in self._on_card or blocks[0] in self._copied:
                return False
            self._copied.add(blocks[0])
        self.host.copy_from(self.card, blocks, num_tokens)
        return True

    # Blocks

    def take(self, num_tokens: int) -> tuple[int, ...] | None:
        """Blocks for so many tokens, side by side if possible; none if there are not enough."""
        with self._lock:
            blocks = self._take(self.layout.blocks_for(num_tokens))
            self._is_wanted |= blocks is None
            return blocks

    def take_up_to(self, num_tokens: int) -> tuple[int, ...]:
        with self._lock:
            count = min(self.layout.blocks_for(num_tokens), int(self._free.sum()))
            return self._take(count) or ()

    def give_back(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        with self._lock:
            assert not self._free[list(blocks)].any(), "given back twice"
            self._free[list(blocks)] = True
            self._quarantined.difference_update(blocks)
            self._copied.difference_update(blocks)
            was_wanted, self._is_wanted = self._is_wanted, False
        if was_wanted:
            self.on_room()

    def quarantine(self, blocks: Sequence[int]) -> None:
        """They stay out of use until they are given back, and are counted by themselves."""
        with self._lock:
            self._quarantined.update(blocks)

    def counts(self) -> PoolCounts:
        with self._lock:
            free, quarantined = int(self._free.sum()), len(self._quarantined)
        total = self.layout.num_blocks
        return PoolCounts(total=total, free=free, held=total - free - quarantined, quarantined=quarantined)

    def _take(self, count: int) -> tuple[int, ...] | None:
        free = np.flatnonzero(self._free)
        if count > len(free):
            return None
        first = _first_run(free, count)
        taken = free[first : first + count] if first is not None else free[:count]
        self._free[taken] = False
        return tuple(taken.tolist())


def _first_run(free: npt.NDArray[np.intp], count: int) -> int | None:
    """Where in the sorted numbers the first `count` neighbours begin."""
    if count == 0 or count > len(free):
        return None
    begins = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
    return int(begins[0]) if len(begins) else None
