"""`kvrelay bench kv`: what the life of a request's KV costs. In parts, a file each."""

from __future__ import annotations

from kvrelay.bench.harness.scenario import Scenario
from kvrelay.bench.kv import index, overlap, preempt, scheduler, swap

SCENARIO = Scenario(
    scheduler.KVBench,
    {
        "scheduler": scheduler.PART,
        "swap": swap.PART,
        "overlap": overlap.PART,
        "preempt": preempt.PART,
        "index": index.PART,
    },
)
