"""The least expensive numbers of workers of each role that meet the targets, each cluster tried by a simulation.

    1. of each role, the fewest workers that do, beside as many of the others as anybody could want
    2. from these on, clusters by their price, until one meets the targets

More workers never do worse, so nothing below 1 can meet them, and usually the first cluster of 2 does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvrelay.simulate.cluster import Layout

Meets = Callable[[Layout], bool]
Counts = tuple[int, ...]  # of prefill and decode workers; where there are images, of encode workers too


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Of a worker of each role, in any unit."""

    prefill: float = 1.0
    decode: float = 1.0
    encode: float = 1.0

    def of(self, counts: Counts) -> float:
        return sum(count * price for count, price in zip(counts, (self.prefill, self.decode, self.encode), strict=False))


def cheapest(meets: Meets, layout: Layout, prices: Prices, most_workers: int) -> Layout | None:
    """None if no cluster of `most_workers` does. It has no whole workers, and encode workers only if it takes images."""
    tried: dict[Counts, bool] = {}

    def does(counts: Counts) -> bool:
        if counts not in tried:
            tried[counts] = meets(with_counts(layout, counts))
        return tried[counts]

    num_roles = 3 if layout.takes_images else 2
    ample = most_workers // num_roles
    plenty = (ample,) * num_roles
    if not ample or not does(plenty):
        return None

    def does_with(place: int, count: int) -> bool:
        return does((*plenty[:place], count, *plenty[place + 1 :]))

    least = tuple(_fewest(partial(does_with, place), ample) for place in range(num_roles))
    for counts in by_price(prices, least, num_roles * ample):
        if does(counts):
            return with_counts(layout, counts)
    return None


def with_counts(layout: Layout, counts: Counts) -> Layout:
    num_prefill, num_decode, *others = counts
    return msgspec.structs.replace(layout, prefill=num_prefill, decode=num_decode, encode=sum(others), whole=0)


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


def by_price(prices: Prices, least: Counts, most_workers: int) -> Iterator[Counts]:
    """Of one price, more decode workers first."""
    heap = [(prices.of(least), -least[1], least)]
    seen = {least}
    while heap:
        _, _, counts = heapq.heappop(heap)
        yield counts
        for place in range(len(counts)):
            further = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
            if further not in seen and sum(further) <= most_workers:
                seen.add(further)
                heapq.heappush(heap, (prices.of(further), -further[1], further))
