"""The least expensive numbers of prefill and decode workers that meet the targets, each cluster tried by a simulation.

    1. the fewest decode workers that do, beside as many prefill workers as anybody could want
    2. the fewest prefill workers that do, beside as many decode workers
    3. from these two on, clusters by their price, until one meets the targets

More workers never do worse, so nothing below 1 and 2 can meet them, and usually the first cluster of 3 does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import msgspec

from kvrelay.simulate.cluster import Layout

Meets = Callable[[Layout], bool]


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Of a worker of each role, in any unit."""

    prefill: float = 1.0
    decode: float = 1.0

    def of(self, num_prefill: int, num_decode: int) -> float:
        return num_prefill * self.prefill + num_decode * self.decode


def cheapest(meets: Meets, layout: Layout, prices: Prices, most_workers: int) -> Layout | None:
    """None if no cluster of `most_workers` does. It has no whole workers."""
    tried: dict[tuple[int, int], bool] = {}

    def does(num_prefill: int, num_decode: int) -> bool:
        pair = num_prefill, num_decode
        if pair not in tried:
            tried[pair] = meets(_with(layout, num_prefill, num_decode))
        return tried[pair]

    ample = max(1, most_workers // 2)
    if not does(ample, ample):
        return None
    num_decode = _fewest(lambda count: does(ample, count), ample)
    num_prefill = _fewest(lambda count: does(count, ample), ample)
    for pair in by_price(prices, (num_prefill, num_decode), 2 * ample):
        if does(*pair):
            return _with(layout, *pair)
    return None


def _with(layout: Layout, num_prefill: int, num_decode: int) -> Layout:
    return msgspec.structs.replace(layout, prefill=num_prefill, decode=num_decode, whole=0)


def _fewest(does: Callable[[int], bool], enough: int) -> int:
    """Twice as many each time, then halving between the last two."""
    low, high = 0, 1
    while high < enough and not does(high):
        low, high = high, 2 * high
    high = min(high, enough)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return high


def by_price(prices: Prices, least: tuple[int, int], most_workers: int) -> Iterator[tuple[int, int]]:
    """Numbers of prefill and decode workers; of one price, more decode workers first."""
    heap = [(prices.of(*least), -least[1], least)]
    seen = {least}
    while heap:
        _, _, (num_prefill, num_decode) = heapq.heappop(heap)
        yield num_prefill, num_decode
        for further in ((num_prefill + 1, num_decode), (num_prefill, num_decode + 1)):
            if further not in seen and sum(further) <= most_workers:
                seen.add(further)
                heapq.heappush(heap, (prices.of(*further), -further[1], further))
