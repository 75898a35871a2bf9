"""What it costs a sequence to lose its blocks: how long after the pool is free again its next token comes.

    two long sequences decode -> the pool is full -> the less urgent one gives up its KV
    -> the other one ends     -> [ it gets its KV back, and makes one more token ]   <- this is timed

Once with room on the host, from where the KV comes back, once without, when it is computed again. Both in the same run, with
the real engine and the real runner. Without the prefix cache, which would spare both a part of the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from kvrelay.bench.harness.engine import build_engine, run_dry, step
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.workload import draw, submission
from kvrelay.bench.kv.scheduler import KVBench
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.engine.engine import Engine
from kvrelay.errors import BenchError
from kvrelay.ids import RequestId
from kvrelay.wire.serving import StepOutputs

CONTEXTS = (256, 1024, 4096)
_BLOCK_SIZE = 16
_SPARE_BLOCKS = 8  # beside two prompts: each sequence takes one for every 16 tokens. The watermark is less, so both run
_URGENT_TOKENS = 80
_VICTIM_TOKENS = 120
_PATIENCE_S = 600.0


def measure(options: KVBench, console: Console) -> Results:
    model = options.local_model()
    results: Results = {}
    for context in CONTEXTS:
        with console.status(f"{context} tokens: from the host"):
            swapped_s = resume_s(model, context, swap=True)
        with console.status(f"{context} tokens: computed again"):
            recomputed_s = resume_s(model, context, swap=False)
        results |= {
            f"resume_by_swap_ms_{context}": swapped_s * 1e3,
            f"resume_by_recompute_ms_{context}": recomputed_s * 1e3,
            f"swap_faster_{context}": recomputed_s / swapped_s,
        }
    return results


def resume_s(model: ModelOptions, context: int, *, swap: bool) -> float:
    num_blocks = 2 * context // _BLOCK_SIZE + _SPARE_BLOCKS
    options = EngineOptions(
        block_size=_BLOCK_SIZE,
        kv_blocks=num_blocks,
        swap_blocks=num_blocks if swap else 0,
        token_budget=512,
        max_model_len=context + _VICTIM_TOKENS,
        prefix_cache=False,
    )
    engine, _ = build_engine(model, options)
    try:
        return _Race(engine, context).run(swap=swap)
    finally:
        engine.close()


class _Race:
    """Two sequences in a pool that both outgrow."""

    def __init__(self, engine: Engine, context: int) -> None:
        self._engine = engine
        self._context = context
        self._deadline = time.monotonic() + _PATIENCE_S

    def run(self, *, swap: bool) -> float:
        victim = self._submit(seed=1, priority=1, max_tokens=_VICTIM_TOKENS)
        self._until(lambda step: _has_token(step, victim))
        urgent = self._submit(seed=2, priority=0, max_tokens=_URGENT_TOKENS)
        self._until(lambda step: _has_ended(step, urgent))
        load = self._engine.load()
        if not load.preemptions or (swap and not load.swapped):
            raise BenchError("the request was not preempted as it should be, so nothing can be measured")
        start = time.perf_counter()
        self._until(lambda step: _has_token(step, victim))
        seconds = time.perf_counter() - start
        self._engine.abort([victim])
        run_dry(self._engine)
        return seconds

    def _submit(self, *, seed: int, priority: int, max_tokens: int) -> RequestId:
        submit = submission(draw(seed, self._context), max_tokens, priority)
        self._engine.submit(submit)
        return submit.request_id

    def _until(self, condition: Callable[[StepOutputs], bool]) -> None:
        while not condition(step(self._engine)):
            if time.monotonic() > self._deadline:
                raise BenchError(f"no token within {_PATIENCE_S:g} s")


def _has_token(step: StepOutputs, request_id: RequestId) -> bool:
    return any(output.request_id == request_id and output.tokens for output in step.outputs)


def _has_ended(step: StepOutputs, request_id: RequestId) -> bool:
    return any(output.request_id == request_id and output.finish is not None for output in step.outputs)


PART = Part("going on from the host, or by computing again", measure, {})
