"""A core without a model: its next token is a hash of the KV that it finds in its blocks, so that a byte that was lost or
overwritten is a wrong token. It is driven as `worker.vllm.core.VllmCore` drives vLLM, and asks the same hooks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvrelay.engine.fence import PASSED
from kvrelay.states import FinishReason
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.region import Region, shared_region
from kvrelay.worker.vllm.seam import CoreCounts, CoreOutput, CoreRequest, Hooks, Pass

BLOCK_SIZE = 4
NUM_LAYERS = 2
VOCAB = 500
EOS = 0


@dataclass(eq=False)
class _Sequence:
    request: CoreRequest
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_output: int = 0
    cached: int = 0
    state: str = "waiting"  # blocked, running, ended


class FakeCore:
    block_size = BLOCK_SIZE
    max_model_len = 64
    vocab_size = VOCAB
    eos_token_ids = frozenset({EOS})

    def __init__(self, num_blocks: int = 64, chunk: int = 8) -> None:
        self.hooks: Hooks = Hooks()
        self.layout = KVLayout(
            num_layers=NUM_LAYERS, num_blocks=num_blocks, block_size=1, num_kv_heads=1, head_dim=BLOCK_SIZE * 8,
            dtype="fake", item_bytes=1, planes=1,
        )  # fmt: skip
        self.region: Region = shared_region(self.layout.size_bytes)
        assert self.region.buffer is not None
        self._kv = np.frombuffer(self.region.buffer, dtype=np.int64).reshape(NUM_LAYERS, num_blocks, BLOCK_SIZE)
        self._chunk = chunk
        self._free = list(range(num_blocks))
        self._users = [0] * num_blocks
        self._cached: dict[tuple[int, ...], int] = {}  # tokens up to a block's end -> the block
        self.sequences: dict[str, _Sequence] = {}

    # As the engine sees it

    def add(self, request: CoreRequest) -> None:
        assert request.id not in self.sequences
        assert request.max_tokens >= 1
        made = _Sequence(request, request.prompt + request.forced, num_output=len(request.forced))
        self.sequences[request.id] = made

    def abort(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            sequence = self.sequences.get(sequence_id)
            if sequence is not None and sequence.state != "ended":
                waits, sequence.state = sequence.state == "blocked", "ended"
                if not waits and not self.hooks.holds(sequence_id):
                    self._release(sequence)

    def sent(self, sequence_id: str) -> None:
        assert self.sequences[sequence_id].state == "ended"
        self._release(self.sequences[sequence_id])

    def received(self, sequence_id: str, token: int | None = None) -> None:
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.state == "ended":
            self._release(sequence)
            return
        assert sequence.state == "blocked"
        if token is not None:
            sequence.num_computed = len(sequence.tokens)
            sequence.tokens.append(token)
            sequence.num_output += 1
        sequence.state = "running"
        self._cache(sequence)

    def step(self) -> tuple[list[CoreOutput], bool]:
        self._schedule()
        rows = [(one, len(one.tokens[one.num_computed :][: self._chunk])) for one in self._in("running")]
        ending = [
            Pass(id=one.request.id, blocks=list(one.blocks), num_computed=one.num_computed)
            for one, count in rows
            if one.num_computed < len(one.request.prompt + one.request.forced) <= one.num_computed + count
        ]
        self.hooks.passes(ending, PASSED)
        for layer in range(NUM_LAYERS):
            for one, count in rows:
                self._store(one, count, layer)
            self.hooks.layer_done(layer, PASSED)
        self.hooks.passed(PASSED)
        return [output for one, count in rows if (output := self._sample(one, count)) is not None], bool(rows)

    def counts(self) -> CoreCounts:
        cached = len([block for block in self._cached.values() if not self._users[block]])
        return CoreCounts(
            running=len(self._in("running")), waiting=len(self._in("waiting")) + len(self._in("blocked")),
            total=len(self._users), free=len(self._free) - cached, cached=cached, preemptions=0,
        )  # fmt: skip

    def close(self) -> None:
        pass

    # Inside

    def _in(self, state: str) -> list[_Sequence]:
        return [one for one in self.sequences.values() if one.state == state]

    def _schedule(self) -> None:
        for one in self._in("waiting"):
            found = self._find(one)
            wanted = self.hooks.wanted(one.request.id, len(found) * BLOCK_SIZE)
            most = len(one.request.prompt) + one.request.max_tokens
            needed = -(-most // BLOCK_SIZE) - len(found)
            if needed > len([block for block in self._free if block not in found]):
                return
            for block in found:
                self._use(block)
            one.blocks = found + [self._take() for _ in range(needed)]
            one.cached = one.num_computed = len(found) * BLOCK_SIZE
            if wanted:
                one.state = "blocked"
                self.hooks.allocated(one.request.id, one.blocks, one.cached, PASSED)
            else:
                one.state = "running"

    def _find(self, one: _Sequence) -> list[int]:
        """All but the last token at most."""
        found: list[int] = []
        for end in range(BLOCK_SIZE, len(one.tokens), BLOCK_SIZE):
            block = self._cached.get(tuple(one.tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def _use(self, block: int) -> None:
        if not self._users[block]:
            self._free.remove(block)
        self._users[block] += 1

    def _take(self) -> int:
        block = self._free[0]
        for name in [name for name, its in self._cached.items() if its == block]:
            del self._cached[name]
        self._kv[:, block] = -1
        self._use(block)
        return block

    def _release(self, sequence: _Sequence) -> None:
        del self.sequences[sequence.request.id]
        for block in sequence.blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def _cache(self, one: _Sequence) -> None:
        for index in range(one.num_computed // BLOCK_SIZE):
            self._cached.setdefault(tuple(one.tokens[: (index + 1) * BLOCK_SIZE]), one.blocks[index])

    def _store(self, one: _Sequence, count: int, layer: int) -> None:
        for index in range(one.num_computed, one.num_computed + count):
            self._kv[layer, one.blocks[index // BLOCK_SIZE], index % BLOCK_SIZE] = one.tokens[index] + 1000 * layer

    def _sample(self, one: _Sequence, count: int) -> CoreOutput | None:
        one.num_computed += count
        self._cache(one)
        if one.num_computed < len(one.tokens):
            return None
        seen = [self._kv[:, one.blocks[index // BLOCK_SIZE], index % BLOCK_SIZE] for index in range(len(one.tokens))]
        token = int.from_bytes(hashlib.blake2b(np.stack(seen).tobytes(), digest_size=4).digest(), "little") % VOCAB
        one.tokens.append(token)
        one.num_output += 1
        finish = None
        params = one.request.params
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        if token in ends and one.num_output >= params.min_tokens:
            finish = FinishReason.STOP
        elif one.num_output >= one.request.max_tokens or len(one.tokens) >= self.max_model_len:
            finish = FinishReason.LENGTH
        if finish is not None:
            one.state = "ended"
            if not self.hooks.holds(one.request.id):
                self._release(one)
        return CoreOutput(id=one.request.id, tokens=[token], finish=finish, cached_tokens=one.cached)
