"""Several decode steps at once, where nothing but decoding can happen in them.

A worker whose sequences all decode, which has room for their next blocks, and for which nothing waits, does the same again and
again until one of them ends or somebody wants something. What its engine would do in `count` such steps is done here by the
engine's own parts in one go: blocks, prefix cache, tokens and outputs are the same afterwards.
"""

from __future__ import annotations

from kvrelay.engine.core import Core
from kvrelay.simulate.runner import TOKEN
from kvrelay.wire.serving import SequenceOutput


def possible_steps(core: Core) -> int:
    """How many steps can be taken together now. In the step after them a sequence may end, or blocks may run out."""
    scheduler = core.scheduler
    if scheduler.queue.num_waiting or scheduler.swapped or scheduler.loading or core.incoming.startable or core.outbox:
        return 0
    fewest = 1 << 30
    for sequence in scheduler.running:
        tokens = len(sequence.tokens)
        if tokens - sequence.num_computed != 1:
            return 0
        left = sequence.params.max_tokens - tokens + sequence.num_prompt_tokens
        fewest = min(fewest, left, core.limits.model.max_model_len - tokens)
    room = core.kv.pool.num_available - len(scheduler.running)  # each may be at the end of its last block
    most = room // max(1, len(scheduler.running)) * core.kv.block_size
    return max(0, min(fewest - 1, most)) if scheduler.running else 0


def leaves_room(core: Core, count: int, num_begun: int) -> bool:
    """Whether `count` steps reach their end, should so many prompts take blocks meanwhile."""
    left = core.kv.pool.num_available - num_begun * core.kv.blocks_for(core.limits.model.max_model_len)
    return left >= len(core.scheduler.running) * (count // core.kv.block_size + 2)


def leap(core: Core, count: int) -> None:
    kv, outbox = core.kv, core.outbox
    for sequence in core.scheduler.running:
        position = len(sequence.tokens) - sequence.num_prompt_tokens
        has_room = kv.grow(sequence, len(sequence.tokens) + count - 1, [])
        assert has_room, "a leap went further than the pool reaches"
        sequence.tokens += [TOKEN] * count
        kv.computed(sequence, count)
        outbox.outputs.append(
            SequenceOutput(sequence.request_id, sequence.sample, position, [TOKEN] * count, None, sequence.cached_tokens)
        )
    outbox.num_output_tokens += count * len(core.scheduler.running)
