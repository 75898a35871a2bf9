"""What token times and the counts of `GET /cluster` tell of hand-overs. Times are seconds of one clock."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from kvrelay.errors import BenchError


def beyond_steps(requests: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Of each request, whose tokens came at these times: from token 1 to token 2 beyond one of its own decode steps, a moment
    later on the same worker; and these steps."""
    steps = [statistics.median(end - begin for begin, end in itertools.pairwise(times[1:])) for times in requests]
    return [times[1] - times[0] - step for times, step in zip(requests, steps, strict=True)], steps


def gaps_within(streams: Sequence[Sequence[float]], began_at: float, ended_at: float) -> list[tuple[float, float]]:
    """Times between tokens of these streams: when each ended, since the beginning, and its length. Raises BenchError if there
    was none."""
    points = [
        (end - began_at, end - begin)
        for times in streams
        for begin, end in itertools.pairwise(times)
        if began_at <= end <= ended_at
    ]
    if not points:
        raise BenchError(f"no running request got a token in {ended_at - began_at:.0f} s")
    return sorted(points)


def moved(workers: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Bytes handed over so far, and those of them that left late. Raises BenchError if a transfer has failed."""
    transfers = [worker["transfers"] for worker in workers]
    if any(each["failed"] for each in transfers):
        raise BenchError(f"a transfer failed: {transfers}")
    return sum(each["bytes"] for each in transfers), sum(each["late_bytes"] for each in transfers)


def late_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Of what was handed over in between."""
    num_bytes, late_bytes = after[0] - before[0], after[1] - before[1]
    if not num_bytes:
        raise BenchError("no bytes were handed over")
    return late_bytes / num_bytes
