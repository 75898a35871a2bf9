"""`kvrelay bench kv`: what the life of a request's KV costs. In parts, each by itself with `--only`.

scheduler    a step of the scheduler and its pools, without a model                 kv_scheduler.py
swap         KV to the host and back, against memcpy                                kv_swap.py
overlap      on a GPU: steps with copies to the host beside them                    kv_overlap.py
preempt      giving up KV and going on: from the host, or by computing it again     kv_preempt.py
index        a context index that is stopped, seen from a stream                    kv_index.py
"""

from __future__ import annotations

import functools
import pathlib
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from kvrelay.bench import kv_index, kv_overlap, kv_preempt, kv_scheduler, kv_swap
from kvrelay.bench.parts import Part, all_targets, parse_parts, run_parts


@dataclass(frozen=True, kw_only=True)
class KVBench:
    """What the command line asked for."""

    model: str
    load: Literal["auto", "dummy"]
    rounds: int
    only: tuple[str, ...]
    profile: pathlib.Path

    def measure(self, console: Console) -> dict[str, float]:
        return run_parts(PARTS, self.only, self, console)


PARTS: dict[str, Part[KVBench]] = {
    "scheduler": Part(
        "scheduler: a step of pure Python",
        lambda bench, console: kv_scheduler.measure(bench.rounds, bench.profile, console),
        kv_scheduler.TARGETS,
    ),
    "swap": Part(
        "swap: KV to the host and back",
        lambda bench, console: kv_swap.measure(bench.model, bench.rounds, console),
        kv_swap.TARGETS,
    ),
    "overlap": Part(
        "overlap: steps with copies to the host beside them",
        lambda bench, console: kv_overlap.measure(bench.rounds, console),
        kv_overlap.TARGETS,
    ),
    "preempt": Part(
        "preempt: going on from the host, or by computing again",
        lambda bench, console: kv_preempt.measure(bench.model, bench.load, console),
        kv_preempt.TARGETS,
    ),
    "index": Part(
        "index: a context index that is stopped",
        lambda bench, console: kv_index.measure(bench.model, bench.load, bench.rounds, console),
        kv_index.TARGETS,
    ),
}

DEFAULT_PARTS = tuple(name for name in PARTS if name != "overlap")  # which needs a GPU

TARGETS = all_targets(PARTS)
parse = functools.partial(parse_parts, PARTS)
