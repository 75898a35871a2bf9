"""The least expensive numbers of workers of each role that meet the targets, each cluster tried by a simulation.

    1. of each role, the fewest workers that do, beside as many of each other as the limit allows of one
    2. from these on, role by role: for each number of one that could still be cheaper, the fewest of the next

More workers never do worse, so nothing below 1 can meet them, and usually the first cluster of 2 is the one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

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
    """None if no cluster of up to `most_workers` does. It has no whole workers, and encode workers only if it takes images."""
    num_roles = 3 if layout.takes_images else 2
    ample = most_workers - num_roles + 1  # of one role, beside one worker of each other

    @cache
    def does(counts: Counts) -> bool:
        return meets(with_counts(layout, counts))

    plenty = (ample,) * num_roles
    if ample < 1 or not does(plenty):
        return None

    def does_with(place: int, count: int) -> bool:
        return does((*plenty[:place], count, *plenty[place + 1 :]))

    least = tuple(_fewest(partial(does_with, place), 1, ample) for place in range(num_roles))
    found = _search(does, least, prices, most_workers)
    return None if found is None else with_counts(layout, found)


def with_counts(layout: Layout, counts: Counts) -> Layout:
    num_prefill, num_decode, *others = counts
    return msgspec.structs.replace(layout, prefill=num_prefill, decode=num_decode, encode=sum(others), whole=0)


def _search(does: Callable[[Counts], bool], least: Counts, prices: Prices, most_workers: int) -> Counts | None:
    """Of one price, that with the fewest prefill workers."""
    best: Counts | None = None

    def search(begun: Counts) -> None:
        nonlocal best
        fewest, *others = least[len(begun) :]
        room = most_workers - sum(begun) - sum(others)
        if not others:
            while best is not None and room >= fewest and prices.of((*begun, room)) >= prices.of(best):
                room -= 1
            if room >= fewest and does((*begun, room)):
                best = (*begun, _fewest(lambda count: does((*begun, count)), fewest, room))
            return
        for count in range(fewest, room + 1):
            if best is not None and prices.of((*begun, count, *others)) >= prices.of(best):
                return
            search((*begun, count))

    search(())
    return best


def _fewest(does: Callable[[int], bool], least: int, enough: int) -> int:
    """Twice as many each time, then halving between the last two."""
    low, high = least - 1, least
    while high < enough and not does(high):
        low, high = high, min(2 * high, enough)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if does(middle) else (middle, high)
    return high
