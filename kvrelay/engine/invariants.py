"""What is true between two steps, whatever happened. Tests call `check` after every step and `check_idle` at the end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvrelay.engine.block_pool import Holder
from kvrelay.engine.request import Request, Sequence
from kvrelay.engine.swap import Swap
from kvrelay.states import KeptState, KVState, RequestState

if TYPE_CHECKING:
    from kvrelay.engine.engine import Engine


def check(engine: Engine) -> None:
    """Fails on the first thing that is wrong."""
    kv = engine.kv
    kv.pool.check()
    references: Counter[int] = Counter()
    for request in engine.requests.values():
        assert not request.finished, f"{request.request_id} is finished but still known"
        for sequence in request.sequences:
            _check_sequence(sequence, kv.block_size)
            references.update(sequence.block_table)
        _check_search(request)
    if engine.outgoing is not None:
        for blocks in engine.outgoing.held.values():
            references.update(blocks)
    if engine.incoming is not None:
        for blocks in engine.incoming.quarantined.values():
            references.update(blocks)
    if engine.swap is not None:
        references.update(_check_swap(engine.swap))
    references.update(_check_leases(engine))
    held = {block: count for block, count in enumerate(kv.pool.references) if count}
    assert dict(references) == held, f"references of sequences {dict(references)} differ from the pool's {held}"
    _check_queues(engine)
    counts = kv.pool.counts()
    kinds = counts.free + counts.cached + counts.in_use + counts.reserved + counts.sending + counts.pinned + counts.quarantined
    assert kinds == counts.total, f"block kinds sum to {kinds}, not {counts.total}"


def check_idle(engine: Engine) -> None:
    """The leak check: nothing is going on, and nothing is held."""
    check(engine)
    counts = engine.kv.pool.counts()
    assert not engine.requests, f"requests left behind: {list(engine.requests)}"
    assert counts.in_use == counts.reserved == counts.sending == counts.quarantined == 0, f"leaked blocks: {counts}"
    assert not engine.scheduler.running
    assert not engine.scheduler.swapped
    assert not engine.scheduler.loading
    if engine.swap is not None:
        kept = engine.swap.kept.values()
        assert all(one.leased for one in kept), f"sequences left on the host: {[one.sequence.request_id for one in kept]}"
        slots = {slot for one in kept for slot in one.slots} | {s for copy in engine.swap.copies.values() for s in copy.slots}
        assert engine.swap.slots.counts().in_use == len(slots)
    assert not engine.leases.heirs, "children left behind"
    assert not engine.scheduler.waiting
    assert engine.images is None or engine.images.num_held == 0, "images are held for requests that are over"


def _check_swap(swap: Swap) -> Counter[int]:
    """The slots; returns the references of copies and of sequences on their way back to blocks."""
    swap.slots.check()
    slots: Counter[int] = Counter()
    blocks: Counter[int] = Counter()
    for copy in swap.copies.values():
        slots.update(copy.slots)
        if copy.holder is Holder.QUARANTINED or not copy.expired:
            blocks.update(copy.blocks)
    for kept in swap.kept.values():
        slots.update(kept.slots)
        blocks.update(kept.table)
        assert kept.tickets <= swap.copies.keys(), "a sequence waits for a copy that is over"
    held = {slot: count for slot, count in enumerate(swap.slots.references) if count}
    assert dict(slots) == held, f"references to slots {dict(slots)} differ from the pool's {held}"
    return blocks


def _check_leases(engine: Engine) -> Counter[int]:
    """Every pin is a lease's or that of a copy for one; returns the leases'."""
    leases, pool, swap = engine.leases, engine.kv.pool, engine.swap
    blocks: Counter[int] = Counter()
    staying: Counter[int] = Counter()
    holds = Counter(heir.lease.kept_id for heir in leases.heirs.values())
    holds.update(lease.kept_id for lease in leases.let_go_after_step)
    for lease in leases.leases.values():
        on_host = lease.state in (KeptState.LEAVING, KeptState.ON_HOST)
        assert on_host == (swap is not None and lease.kv.key in swap.kept), f"{lease.kept_id} is {lease.state}"
        assert bool(lease.kv.block_table) == (lease.state is not KeptState.ON_HOST), f"{lease.kept_id} is {lease.state}"
        assert lease.num_holds == holds[lease.kept_id], f"{lease.kept_id} is held {lease.num_holds} times"
        assert lease.num_holds or not lease.is_over, f"{lease.kept_id} is over and nobody needs it"
        assert lease.kv.num_computed < len(lease.kv.tokens), f"{lease.kept_id} has KV of its last token"
        blocks.update(lease.kv.block_table)
        if lease.state is KeptState.ON_DEVICE:
            staying.update(lease.kv.block_table)
    assert len(leases) == sum(not lease.is_over for lease in leases.leases.values()), "leases are counted wrongly"
    assert blocks == leases.pinned, "blocks of leases are counted wrongly"
    assert staying == leases.staying, "blocks of leases that stay are counted wrongly"
    assert len(blocks) <= leases.most, f"leases pin {len(blocks)} blocks, which leaves too few for one request"
    pins = Counter(blocks)
    for copy in [] if swap is None else swap.copies.values():
        if copy.holder is Holder.PINNED and not copy.expired:
            pins.update(copy.blocks)
    assert pins == pool.pins(), f"pins of leases {pins} differ from the pool's {pool.pins()}"
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
    group = request.group
    if group is None:
        return
    name = request.request_id
    if not group.beams:
        assert len(request.sequences) == 1, f"{name} has several sequences before its search has begun"
        return
    assert {beam.sequence.key for beam in group.beams} == {sequence.key for sequence in request.sequences}
    assert sorted(sequence.sample for sequence in request.sequences) == list(range(group.width)), f"{name} lost a beam"
    assert len({(s.state, s.num_computed, len(s.tokens)) for s in request.sequences}) == 1, f"{name}: its beams are apart"
    assert request.num_unforked == 0, f"{name} keeps places for beams that exist"


def _check_queues(engine: Engine) -> None:
    scheduler = engine.scheduler
    live = [s for request in engine.requests.values() for s in request.sequences if s.state is not RequestState.FINISHED]
    running = [s for s in live if s.state is RequestState.RUNNING]
    assert sorted(running, key=lambda s: s.key) == sorted(scheduler.running, key=lambda s: s.key)
    assert scheduler.running == sorted(scheduler.running, key=scheduler.rank), "the batch is out of order"
    assert scheduler.swapped == sorted(scheduler.swapped, key=lambda s: s.order), "the swapped ones are out of order"
    swapped = [s for s in live if s.state is RequestState.SWAPPED]
    coming = [s for s in scheduler.loading if s.state is RequestState.SWAPPED]
    assert sorted(swapped, key=lambda s: s.key) == sorted([*scheduler.swapped, *coming], key=lambda s: s.key)
    waiting = [s for s in live if s.state is RequestState.WAITING]
    expected = [] if engine.incoming is None else engine.incoming.waiting
    transferring = [] if engine.incoming is None else engine.incoming.transferring
    assert sorted(waiting, key=lambda s: s.key) == sorted([*scheduler.waiting, *expected], key=lambda s: s.key)
    assert scheduler.num_waiting == len(scheduler.waiting)
    slots = sum(s.num_slots for s in [*scheduler.running, *transferring, *scheduler.loading])
    assert slots <= engine.options.max_batch, "more sequences run and arrive than the batch holds"
