"""What the parts of an engine share: its memory, its queue, its relay and its outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count as counter

from kvrelay.config import EngineOptions
from kvrelay.engine.interfaces import Adapters, Runner
from kvrelay.engine.memory.kept import KeptKV
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.memory.swap import Swap
from kvrelay.engine.movers import Consumer, Mover, NoRelay, Producer
from kvrelay.engine.outbox import Outbox
from kvrelay.engine.request import Request, Sequence
from kvrelay.engine.requests.admission import Limits, ModelLimits
from kvrelay.engine.requests.images import Images, NoFeatures
from kvrelay.engine.requests.incoming import Incoming
from kvrelay.engine.requests.outgoing import Outgoing
from kvrelay.engine.scheduler import Scheduler
from kvrelay.ids import RequestId, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """Every part is always there. One that has nothing to do (no host memory, no images, no relay) does nothing."""

    options: EngineOptions
    limits: Limits
    kv: KVCache
    swap: Swap
    kept: KeptKV
    incoming: Incoming
    outgoing: Outgoing
    images: Images
    scheduler: Scheduler
    outbox: Outbox
    keys: Iterator[int]  # of sequences
    requests: dict[RequestId, Request] = field(default_factory=dict)  # those that have not ended

    def fork(self, parent: Sequence, sample: int) -> Sequence:
        """Another sample of the parent's request, which goes on from the parent's tokens and shares its blocks."""
        child = Sequence(next(self.keys), parent.request, sample, list(parent.tokens), parent.num_prompt_tokens)
        self.kv.fork(parent, child)
        self.scheduler.run_at_once(child)
        parent.request.sequences.append(child)
        return child

    @property
    def movers(self) -> tuple[Mover, Mover]:
        return self.outgoing.producer, self.incoming.consumer

    @property
    def mover(self) -> Mover:
        """Of the side that this worker has, if it has one."""
        return self.outgoing.producer if self.limits.hands_on else self.incoming.consumer


def build_core(
    options: EngineOptions,
    runner: Runner,
    model: ModelLimits,
    worker_id: WorkerId,
    *,
    producer: Producer | None,
    consumer: Consumer | None,
    images: Images | None,
    adapters: Adapters,
    clock: Callable[[], float],
) -> Core:
    kv = KVCache(
        num_blocks=runner.num_blocks,
        block_size=options.block_size,
        prefix_cache=options.prefix_cache,
        cache_seed=model.cache_seed,
    )
    share = int(options.kept_kv_share * runner.num_blocks)
    most = runner.num_blocks - kv.blocks_for(model.max_model_len)
    assert most >= 0, "the pool cannot hold one longest request"
    outbox, keys = Outbox(), counter()
    swap = Swap(kv, runner, clock=clock, timeout_s=options.swap_timeout_s)
    kept = KeptKV(kv, swap, outbox, clock=clock, keys=keys, share=share, most=most, verify=options.check_invariants)
    incoming = Incoming(consumer or NoRelay(), kv, runner)
    outgoing = Outgoing(producer or NoRelay(), kv, runner.fence)
    seen = images or Images(NoFeatures(), timeout_s=0.0, clock=clock)
    limits = Limits(
        worker_id=worker_id,
        options=options,
        model=model,
        num_blocks=runner.num_blocks,
        hands_on=producer is not None,
        takes_over=consumer is not None,
        takes_images=images is not None,
        adapters=adapters,
        num_pinnable_blocks=min(share, most),
    )
    return Core(
        options=options,
        limits=limits,
        kv=kv,
        swap=swap,
        kept=kept,
        incoming=incoming,
        outgoing=outgoing,
        images=seen,
        scheduler=Scheduler(options, kv, kept, swap, incoming, outgoing, seen),
        outbox=outbox,
        keys=keys,
    )
