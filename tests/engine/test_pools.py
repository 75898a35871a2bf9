"""The block pool, the prefix cache and the KV cache, driven by Hypothesis: whatever happens, every block is in one place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.engine.memory.block_pool import BlockPool, Holder
from kvrelay.engine.memory.events import EventRecorder
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.memory.prefix_cache import PrefixCache
from kvrelay.engine.request import Request, Sequence
from kvrelay.ids import new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.wire.events import Removed, Stored
from kvrelay.wire.serving import Submit


class PoolMachine(RuleBasedStateMachine):
    """Against a model: a dict of how often each block is held, and a list of which blocks are worth keeping, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.evicted: list[int] = []
        self.pool = BlockPool(12, keep=self.known.__contains__, evict=self.on_evict)
        self.held: dict[int, int] = {}
        self.holders: dict[int, list[Holder]] = {}
        self.cached: list[int] = []

    def on_evict(self, blocks: list[int]) -> None:
        self.known.difference_update(blocks)
        self.evicted += blocks

    @rule(count=st.integers(0, 14))
    def allocate(self, count: int) -> None:
        available = 12 - len(self.held)
        expected_evictions = self.cached[: max(0, count - (available - len(self.cached)))]
        self.evicted.clear()
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        if blocks is None:
            assert not self.evicted
            return
        assert self.evicted == expected_evictions  # the ones unused for longest, and no more than needed
        del self.cached[: len(expected_evictions)]
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.held)
        self.held.update(dict.fromkeys(blocks, 1))
        self.holders.update({block: [Holder.SEQUENCE] for block in blocks})

    @precondition(lambda self: self.held or self.cached)
    @rule(data=st.data(), holder=st.sampled_from(Holder))
    def retain(self, data: st.DataObject, holder: Holder) -> None:
        block = data.draw(st.sampled_from(sorted({*self.held, *self.cached})))
        self.pool.retain([block], holder)
        self.holders.setdefault(block, []).append(holder)
        if block in self.cached:
            self.cached.remove(block)
        self.held[block] = self.held.get(block, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        holder = data.draw(st.sampled_from(self.holders[block]))
        self.pool.release([block], holder)
        self.holders[block].remove(holder)
        self.held[block] -= 1
        if self.held[block] == 0:
            del self.held[block]
            if block in self.known:
                self.cached.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), after=st.sampled_from(Holder))
    def hand_over(self, data: st.DataObject, after: Holder) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        before = data.draw(st.sampled_from(self.holders[block]))
        self.pool.hand_over([block], before, after)
        self.holders[block].remove(before)
        self.holders[block].append(after)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        self.known.add(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.known)))
        self.known.remove(block)
        self.pool.forget(block)
        if block in self.cached:
            self.cached.remove(block)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        kinds = [min(self.holders[block]) for block in self.held]
        expected = [kinds.count(holder) for holder in Holder]
        assert [counts.in_use, counts.reserved, counts.sending, counts.pinned, counts.quarantined] == expected
        assert counts.cached == len(self.cached)
        assert counts.free + counts.cached + len(self.held) == counts.total == 12
        assert self.pool.num_available == counts.free + counts.cached


class KVMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork and go. A model of what each block holds is kept by replaying writes and copies, so a block
    that is written while shared, or found under a wrong prefix, shows at once."""

    SIZE = 3

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache(num_blocks=14, block_size=self.SIZE, prefix_cache=True, cache_seed="model")
        self.live: list[Sequence] = []
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> the tokens up to and with this one
        self.keys = 0

    def new_sequence(self, tokens: list[int], salt: str) -> Sequence:
        submit = Submit(request_id=new_request_id(), external_id="", prompt=tokens, params=SamplingParams(), cache_salt=salt)
        self.keys += 1
        return Sequence(self.keys, Request(submit, self.keys), 0, list(tokens), len(tokens))

    def write(self, sequence: Sequence, count: int, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            for offset in range(self.SIZE):
                if (source, offset) in self.content:
                    self.content[target, offset] = self.content[source, offset]
        salt = sequence.request.cache_salt
        for position in range(sequence.num_computed, sequence.num_computed + count):
            place = (sequence.block_table[position // self.SIZE], position % self.SIZE)
            self.content[place] = (hash(salt), *sequence.tokens[: position + 1])
        self.kv.computed(sequence, count)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from(["", "tenant"]))
    def attach(self, tokens: list[int], salt: str) -> None:
        sequence = self.new_sequence(tokens, salt)
        available = self.kv.pool.num_available
        if not self.kv.attach(sequence, headroom=0):
            assert self.kv.pool.num_available == available
            assert not sequence.block_table
            return
        assert sequence.num_computed < len(tokens)
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 8))
    def compute(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        count = min(count, sequence.num_uncomputed)
        copies: list[tuple[int, int]] = []
        if count and self.kv.grow(sequence, sequence.num_computed + count, copies):
            self.write(sequence, count, copies)

    @rule()
    def compute_all(self) -> None:
        for sequence in self.live:
            copies: list[tuple[int, int]] = []
            if sequence.num_uncomputed and self.kv.grow(sequence, len(sequence.tokens), copies):
                self.write(sequence, sequence.num_uncomputed, copies)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def sample(self, data: st.DataObject, token: int) -> None:
        data.draw(st.sampled_from(self.live)).tokens.append(token)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.live))
        child = self.new_sequence(parent.tokens, parent.request.cache_salt)
        self.kv.fork(parent, child)
        self.live.append(child)
        parent.tokens.append(0)  # from here on they differ
        child.tokens.append(1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.kv.free(sequence)

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        self.kv.pool.check()
        for sequence in self.live:
            for position in range(sequence.num_computed):
                place = (sequence.block_table[position // self.SIZE], position % self.SIZE)
                assert self.content[place] == (hash(sequence.request.cache_salt), *sequence.tokens[: position + 1])

    @invariant()
    def references_are_exact(self) -> None:
        held = [0] * self.kv.pool.num_blocks
        for sequence in self.live:
            for block in sequence.block_table:
                held[block] += 1
        assert held == self.kv.pool.references

    def teardown(self) -> None:
        for sequence in self.live:
            self.kv.free(sequence)
        assert self.kv.pool.counts().in_use == 0


class TestPool(PoolMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=35, stateful_step_count=40, deadline=None)


class TestKV(KVMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=35, stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestPoolForLong(PoolMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=500, stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestKVForLong(KVMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=500, stateful_step_count=40, deadline=None)


def test_a_collision_is_a_miss_and_the_newer_block_replaces_the_older() -> None:
    cache = PrefixCache(2)
    cache.recorder = recorder = EventRecorder(cache.chains, 4)
    assert cache.add(7, b"digest", [1, 2], b"root") is None
    assert cache.find(b"digest", [3, 4]) is None
    assert cache.num_collisions == 1
    assert cache.add(8, b"digest", [3, 4], b"root") == 7
    assert cache.find(b"digest", [3, 4]) == 8
    assert 7 not in cache
    assert recorder.take() == [
        Stored(hashes=[b"digest"], parent=b"root"),
        Removed(hashes=[b"digest"]),
        Stored(hashes=[b"digest"], parent=b"root"),
    ]
    assert cache.add(9, b"digest", [3, 4], b"root") is None  # the same content twice: the first stays
    assert 9 not in cache
