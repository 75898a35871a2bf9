"""What the parts of an engine share: its memory, its queue, its relay and its outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count as counter

from kvrelay.config import EngineOptions
from kvrelay.engine.interfaces import Runner
from kvrelay.engine.memory.kept import KeptKV
from kvrelay.engine.memory.kv_cache import KVCache
from kvrelay.engine.memory.swap import Swap
from kvrelay.engine.movers import Consumer, Producer
from kvrelay.engine.no_relay import NoRelay
from kvrelay.engine.outbox import Outbox
from kvrelay.engine.request import Request
from kvrelay.engine.requests.admission import Limits
from kvrelay.engine.requests.images import Images, NoFeatures
from kvrelay.engine.requests.incoming import Incoming
from kvrelay.engine.requests.outgoing import Outgoing
from kvrelay.engine.scheduler import Scheduler
from kvrelay.ids import RequestId, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What an engine has to know of its model."""

    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    cache_seed: str


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

    @property
    def relay(self) -> Incoming | Outgoing:
        """The side that this worker has, if it has one."""
        return self.outgoing if self.limits.hands_on else self.incoming


def build_core(
    options: EngineOptions,
    runner: Runner,
    model: ModelLimits,
    worker_id: WorkerId,
    *,
    producer: Producer | None,
    consumer: Consumer | None,
    images: Images | None,
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
    incoming, outgoing = Incoming(consumer or NoRelay(), kv), Outgoing(producer or NoRelay(), kv)
    seen = images or Images(NoFeatures(), timeout_s=0.0, clock=clock)
    limits = Limits(
        worker_id=worker_id,
        max_queue=options.max_queue,
        max_batch=options.max_batch,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        num_blocks=runner.num_blocks,
        block_size=options.block_size,
        hands_on=producer is not None,
        takes_over=consumer is not None,
        takes_images=images is not None,
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
