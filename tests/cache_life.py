"""A KV cache in which sequences come, grow and go at random, so that blocks enter and leave its prefix cache."""

from __future__ import annotations

import random
from typing import assert_never

from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.request import Request, Sequence
from kvrelay.ids import new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.wire.events import CacheEvent, Cleared, Freed, FreedForNow, Removed, Restored, Stored, Swapped
from kvrelay.wire.serving import Submit

BLOCK_SIZE = 4


def new_sequence(tokens: list[int]) -> Sequence:
    submit = Submit(request_id=new_request_id(), external_id="", prompt=tokens, params=SamplingParams())
    return Sequence(1, Request(submit, 1), 0, list(tokens), len(tokens))


def apply(event: CacheEvent, hashes: set[bytes]) -> None:
    match event:
        case Stored():
            hashes.update(event.hashes)
        case Removed():
            assert hashes.issuperset(event.hashes)
            hashes.difference_update(event.hashes)
        case Cleared():
            hashes.clear()
        case Swapped() | Restored() | FreedForNow() | Freed():
            pass
        case _:
            assert_never(event)


class CacheLife:
    """Prompts are short and alike, so that prefixes are shared, found and evicted."""

    def __init__(self, rng: random.Random, num_blocks: int) -> None:
        self.kv = KVCache(num_blocks=num_blocks, block_size=BLOCK_SIZE, prefix_cache=True, cache_seed="model")
        self.recorder = self.kv.record_events()
        self._rng = rng
        self._live: list[Sequence] = []

    def hashes(self) -> set[bytes]:
        return {digest for digest, _ in self.kv.prefixes.chains()}

    def step(self) -> None:
        rng = self._rng
        if self._live and rng.random() < 0.5:
            sequence = rng.choice(self._live)
            if rng.random() < 0.3:
                self._live.remove(sequence)
                self.kv.free(sequence)
            elif self.kv.grow(sequence, len(sequence.tokens) + 1, []):
                sequence.tokens.append(rng.randrange(2))
                self.kv.computed(sequence, len(sequence.tokens) - sequence.num_computed)
            return
        sequence = new_sequence([rng.randrange(2) for _ in range(rng.randrange(1, 24))])
        if self.kv.attach(sequence, headroom=0):
            self._live.append(sequence)
            self.kv.computed(sequence, len(sequence.tokens) - sequence.num_computed)
        elif self._live:
            self.kv.free(self._live.pop(0))
