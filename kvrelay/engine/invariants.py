"""What is true between two steps, whatever happened. An engine that is told to checks it after every step."""

from __future__ import annotations

from collections import Counter

from kvrelay.engine.core import Core
from kvrelay.engine.memory.block_pool import Holder
from kvrelay.engine.memory.swap import Swap
from kvrelay.engine.request import Request, Sequence
from kvrelay.states import KeptState, KVState, RequestState


def check(core: Core) -> None:
    """Fails on the first thing that is wrong."""
    kv = core.kv
    kv.pool.check()
    references: Counter[int] = Counter()
    for request in core.requests.values():
        assert not request.finished, f"{request.request_id} is finished but still known"
        for sequence in request.sequences:
            _check_sequence(sequence, kv.block_size)
            references.update(sequence.block_table)
        _check_search(request)
    for blocks in (*core.outgoing.held.values(), *core.incoming.quarantined.values()):
        references.update(blocks)
    references.update(_check_swap(core.swap))
    references.update(_check_kept(core))
    held = {block: count for block, count in enumerate(kv.pool.references) if count}
    assert dict(references) == held, f"references of sequences {dict(references)} differ from the pool's {held}"
    _check_queues(core)
    counts = kv.pool.counts()
    kinds = counts.free + counts.cached + counts.in_use + counts.reserved + counts.sending + counts.pinned + counts.quarantined
    assert kinds == counts.total, f"block kinds sum to {kinds}, not {counts.total}"


def check_idle(core: Core) -> None:
    """Nothing is going on, and nothing is held."""
    check(core)
    counts = core.kv.pool.counts()
    assert not core.requests, f"requests left behind: {list(core.requests)}"
    assert counts.in_use == counts.reserved == counts.sending == counts.quarantined == 0, f"leaked blocks: {counts}"
    assert not core.scheduler.running
    assert not core.scheduler.swapped
    assert not core.scheduler.loading
    entries, copies = core.swap.on_host.values(), core.swap.copies.values()
    assert all(one.is_kept for one in entries), f"sequences left on the host: {[one.sequence.request_id for one in entries]}"
    host_blocks = {block for entry in entries for block in entry.host_blocks}
    host_blocks |= {block for copy in copies for block in copy.host_blocks}
    assert core.swap.host.pool.counts().in_use == len(host_blocks)
    assert not core.kept.heirs, "children left behind"
    assert not core.scheduler.queue.sequences
    assert core.images.num_held == 0, "images are held for requests that are over"


def _check_swap(swap: Swap) -> Counter[int]:
    """The host blocks; returns the references of copies and of sequences on their way back to blocks."""
    swap.host.pool.check()
    host_blocks: Counter[int] = Counter()
    blocks: Counter[int] = Counter()
    for copy in swap.copies.values():
        host_blocks.update(copy.host_blocks)
        if copy.holder is Holder.QUARANTINED or not copy.expired:
            blocks.update(copy.blocks)
    for entry in swap.on_host.values():
        host_blocks.update(entry.host_blocks)
        blocks.update(entry.table)
        assert entry.tickets <= swap.copies.keys(), "a sequence waits for a copy that is over"
    held = {block: count for block, count in enumerate(swap.host.pool.references) if count}
    assert dict(host_blocks) == held, f"references to host blocks {dict(host_blocks)} differ from the pool's {held}"
    return blocks


def _check_kept(core: Core) -> Counter[int]:
    """Every pin is of kept KV or of a copy for it; returns the former."""
    kept, pool, swap = core.kept, core.kv.pool, core.swap
    blocks: Counter[int] = Counter()
    staying: Counter[int] = Counter()
    holds = Counter(heir.kept.kept_id for heir in kept.heirs.values())
    holds.update(one.kept_id for one in kept.let_go_after_step)
    for one in kept.samples.values():
        on_host = one.state in (KeptState.LEAVING, KeptState.ON_HOST)
        assert on_host == (one.kv.key in swap.on_host), f"{one.kept_id} is {one.state}"
        assert bool(one.kv.block_table) == (one.state is not KeptState.ON_HOST), f"{one.kept_id} is {one.state}"
        assert one.num_holds == holds[one.kept_id], f"{one.kept_id} is held {one.num_holds} times"
        assert one.num_holds or not one.is_over, f"{one.kept_id} is over and no child needs it"
        assert one.kv.num_computed < len(one.kv.tokens), f"{one.kept_id} has KV of its last token"
        blocks.update(one.kv.block_table)
        if one.state is KeptState.ON_DEVICE:
            staying.update(one.kv.block_table)
    assert len(kept) == sum(not one.is_over for one in kept.samples.values()), "kept samples are counted wrongly"
    assert blocks == kept.blocks.pinned, "blocks of kept KV are counted wrongly"
    assert staying == kept.blocks.staying, "blocks of kept KV that stays are counted wrongly"
    assert len(blocks) <= kept.blocks.most, f"kept KV pins {len(blocks)} blocks, which leaves too few for one request"
    pins = Counter(blocks)
    for copy in swap.copies.values():
        if copy.holder is Holder.PINNED and not copy.expired:
            pins.update(copy.blocks)
    assert pins == pool.pins(), f"pins of kept KV {pins} differ from the pool's {pool.pins()}"
    return blocks


def _check_sequence(sequence: Sequence, block_size: int) -> None:
    name = f"{sequence.request_id}/{sequence.sample}"
    assert len(set(sequence.block_table)) == len(sequence.block_table), f"{name} holds a block twice"
    match sequence.state:
        case RequestState.RUNNING:
            assert sequence.kv_state in (KVState.ALLOCATED, KVState.ACTIVE), f"{name} runs with {sequence.kv_state}"
            assert 0 <= sequence.num_computed < len(sequence.tokens), f"{name} has nothing to compute"
            assert len(sequence.block_table) * block_size >= sequence.num_computed, f"{name} has computed past its blocks"
        case RequestState.WAITING | RequestState.FINISHED:
            assert sequence.kv_state is KVState.FREED, f"{name} is {sequence.state} but holds KV"
            assert not sequence.block_table, f"{name} is {sequence.state} but holds blocks"
        case RequestState.TRANSFERRING:
            assert sequence.kv_state is KVState.ALLOCATED, f"{name} is being transferred with {sequence.kv_state}"
            assert len(sequence.block_table) * block_size >= len(sequence.tokens), f"{name} has too few blocks"
        case RequestState.SWAPPED:
            assert sequence.kv_state is KVState.SWAPPED, f"{name} is swapped with {sequence.kv_state}"
            assert not sequence.block_table, f"{name} is swapped but holds blocks"


def _check_search(request: Request) -> None:
    """The beams of a search are all in the same state, at the same length, and none of them is forgotten."""
    group = request.search
    if group is None:
        return
    name = request.request_id
    if not group.beams:
        assert len(request.sequences) == 1, f"{name} has several sequences before its search has begun"
        return
    assert {beam.sequence.key for beam in group.beams} == {sequence.key for sequence in request.sequences}
    assert sorted(sequence.sample for sequence in request.sequences) == list(range(group.width)), f"{name} lost a beam"
    assert len({(s.state, s.num_computed, len(s.tokens)) for s in request.sequences}) == 1, f"{name}: its beams are apart"
    assert request.num_unforked == 0, f"{name} keeps batch rows for beams that exist"


def _check_queues(core: Core) -> None:
    scheduler = core.scheduler
    live = [s for request in core.requests.values() for s in request.sequences if s.state is not RequestState.FINISHED]
    running = [s for s in live if s.state is RequestState.RUNNING]
    assert sorted(running, key=lambda s: s.key) == sorted(scheduler.running, key=lambda s: s.key)
    assert scheduler.running == sorted(scheduler.running, key=scheduler.rank), "the batch is out of order"
    assert scheduler.swapped == sorted(scheduler.swapped, key=lambda s: s.order), "the swapped ones are out of order"
    swapped = [s for s in live if s.state is RequestState.SWAPPED]
    coming = [s for s in scheduler.loading if s.state is RequestState.SWAPPED]
    assert sorted(swapped, key=lambda s: s.key) == sorted([*scheduler.swapped, *coming], key=lambda s: s.key)
    waiting = [s for s in live if s.state is RequestState.WAITING]
    queued = [*scheduler.queue.sequences, *core.incoming.waiting]
    assert sorted(waiting, key=lambda s: s.key) == sorted(queued, key=lambda s: s.key)
    assert scheduler.queue.num_waiting == len(scheduler.queue.sequences)
    num_rows = sum(s.num_batch_rows for s in [*scheduler.running, *core.incoming.transferring, *scheduler.loading])
    assert num_rows <= core.options.max_batch, "more sequences run and arrive than the batch holds"
