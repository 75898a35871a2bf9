"""What it costs a sequence to lose its blocks: how long after the pool is free again its next token comes.

    a long and an urgent sequence decode -> the pool is full -> the long one gives up its KV
    -> the urgent one ends               -> [ it gets its KV back, and makes one more token ]   <- this is timed

With room on the host, from where the KV comes back, and without, when it is computed again: the median of three races each, in
the same run, with the real engine and the real runner. Without the prefix cache, which would spare both a part of the work.
"""

from __future__ import annotations

import statistics
import time

from rich.console import Console

from kvrelay.bench.harness.engine import build_engine, run_dry, step
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.workload import draw, submission
from kvrelay.bench.kv.scheduler import KVBench
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.engine.engine import Engine
from kvrelay.errors import BenchError
from kvrelay.ids import RequestId

CONTEXTS = (256, 1024, 4096)
RACES = 3
_BLOCK_SIZE = 16
_SPARE_BLOCKS = 8  # beside two prompts: each sequence takes one for every 16 tokens. The watermark is less, so both run
_URGENT_PROMPT = 256  # at most: however long the other's is, the urgent one is soon there
_URGENT_TOKENS = 80
_VICTIM_TOKENS = 120
_PATIENCE_S = 600.0


def measure(options: KVBench, console: Console) -> Results:
    model = options.local_model()
    results: Results = {"preempt_samples": float(RACES)}
    for context in CONTEXTS:
        with console.status(f"{context} tokens: from the host"):
            swapped_s = statistics.median(resumes_s(model, context, swap=True))
        with console.status(f"{context} tokens: computed again"):
            recomputed_s = statistics.median(resumes_s(model, context, swap=False))
        results |= {
            f"resume_by_swap_ms_{context}": swapped_s * 1e3,
            f"resume_by_recompute_ms_{context}": recomputed_s * 1e3,
            f"swap_faster_{context}": recomputed_s / swapped_s,
        }
    return results


def resumes_s(model: ModelOptions, context: int, *, swap: bool) -> list[float]:
    """Seconds of each race. The pool is empty again after one."""
    urgent_context = min(context, _URGENT_PROMPT)
    num_blocks = (context + urgent_context) // _BLOCK_SIZE + _SPARE_BLOCKS
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
        return [_race(engine, context, urgent_context, swap=swap) for _ in range(RACES)]
    finally:
        engine.close()


def _race(engine: Engine, context: int, urgent_context: int, *, swap: bool) -> float:
    """Two sequences in a pool that both outgrow."""
    preempted_before = engine.load().preemptions
    victim = submission(draw(1, context), _VICTIM_TOKENS, priority=1)
    engine.submit(victim)
    _until_token(engine, victim.request_id)
    urgent = submission(draw(2, urgent_context), _URGENT_TOKENS, priority=0)
    engine.submit(urgent)
    _until_token(engine, urgent.request_id, last=True)
    load = engine.load()
    if load.preemptions == preempted_before or (swap and not load.swapped):
        raise BenchError("the request was not preempted as it should be, so nothing can be measured")
    start = time.perf_counter()
    _until_token(engine, victim.request_id)
    seconds = time.perf_counter() - start
    engine.abort([victim.request_id])
    run_dry(engine)
    return seconds


def _until_token(engine: Engine, request_id: RequestId, *, last: bool = False) -> None:
    """The next of this request, or its last one."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for output in step(engine).outputs:
            if output.request_id == request_id and (output.finish is not None if last else output.tokens):
                return
    raise BenchError(f"no token within {_PATIENCE_S:g} s")


PART = Part("going on from the host, or by computing again", measure, {})
