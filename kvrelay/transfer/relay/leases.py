"""The reader's lease: how long a consumer may read a producer's blocks. Two views of it, on two clocks that never meet.

    consumer                               producer
      | sent_at: Heartbeat 7 ----------------> | received_at
      |                                        | holds the blocks until received_at + lease_s, at least
      | <----------------------- HeartbeatAck 7|
      | now knows: the blocks are held until sent_at + lease_s, at least, since received_at is not before sent_at

So the consumer's view always ends first, and bytes that it copied before the end of its own view are good. It takes a margin
off for clocks that do not run equally fast. Times are of any monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict

_MARGIN = 0.05  # of the lease
_REMEMBERED_BEATS = 64


class HeldLease:
    """The producer's view of one transfer."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._until: float | None = None

    def extend(self, now: float) -> None:
        self._until = max(self._until or 0.0, now + self._lease_s)

    def over(self, now: float) -> bool:
        """A lease that was never given is not over."""
        return self._until is not None and now >= self._until


class ReaderLease:
    """The consumer's view of one transfer. Knows nothing until a message of its own was answered."""

    def __init__(self, lease_s: float) -> None:
        self._trusted_s = lease_s * (1.0 - _MARGIN)
        self._confirmed_at: float | None = None

    def confirm(self, sent_at: float) -> None:
        """The producer has answered something that was sent at `sent_at`."""
        self._confirmed_at = sent_at if self._confirmed_at is None else max(self._confirmed_at, sent_at)

    def valid(self, now: float) -> bool:
        return self._confirmed_at is not None and now < self._confirmed_at + self._trusted_s

    def forget(self) -> None:
        self._confirmed_at = None


class Beats:
    """The heartbeats a consumer sent to one producer: their numbers, and when each was sent."""

    def __init__(self) -> None:
        self.next_number = 1
        self._sent: OrderedDict[int, float] = OrderedDict()

    def send(self, now: float) -> int:
        number = self.next_number
        self.next_number += 1
        self._sent[number] = now
        while len(self._sent) > _REMEMBERED_BEATS:
            self._sent.popitem(last=False)
        return number

    def sent_at(self, number: int) -> float | None:
        """None: never sent, or too long ago to matter."""
        return self._sent.get(number)


class Answers:
    """What a producer's answers to heartbeats say of one transfer, as its consumer sees it."""

    def __init__(self, beats: Beats, lease_s: float, unknown_s: float) -> None:
        self.lease = ReaderLease(lease_s)
        self._beats = beats
        self._unknown_s = unknown_s
        self._first = beats.next_number
        self._unknown_since: float | None = None
        self._has_known = False  # the producer has told of the transfer

    def restart(self) -> None:
        """The transfer has changed: answers to earlier heartbeats are about an earlier state."""
        self._first = self._beats.next_number

    def is_news(self, number: int) -> bool:
        """Of each heartbeat once, and of none that is older than one that was answered."""
        if number < self._first:
            return False
        self._first = number + 1
        return True

    def known(self, sent_at: float | None = None) -> None:
        """The producer has told of the transfer, in answer to what was sent then."""
        self._has_known = True
        if sent_at is not None:
            self.lease.confirm(sent_at)

    def unknown(self, now: float) -> str:
        """The producer does not know the transfer. Returns why to give up; empty: its request may be on the way."""
        if self._has_known:
            return "the producer does not know it any more"
        if self._unknown_since is None:
            self._unknown_since = now
        waited = now >= self._unknown_since + self._unknown_s
        return f"the producer has not heard of it for {self._unknown_s:g} s" if waited else ""
