"""The event plane: what a worker's prefix cache holds and what becomes of requests' KV. One worker publishes, many subscribe.

worker: PUB                                subscriber: SUB
  | Events(sequence=7, [Stored, Removed]) ----> |   one batch per engine step that changed the cache
  | Events(sequence=8, [Stored]) ------ lost    |
  | Beat(sequence=8) -------------------------> |   from an idle worker now and then: 8 was the last batch, so it was missed

worker: ROUTER                             subscriber: DEALER
  | <------------------------- Replay(first=8)  |   also the first word of a subscriber, which has nothing: first=1
  | Events(sequence=8, ...) ------------------> |   the missing batches again, if the worker still has them, and a Beat
  | or Snapshot(sequence=8, hashes) ----------> |   else everything that is in the cache after that batch

A worker id names one incarnation, so sequence numbers never start again under the same id. A batch is applied whole and in
order, or not at all. Later versions may add kinds of events: a subscriber skips those that it does not know, which is why
they are read one by one (`read_events`), and the version of the plane does not change for them.
"""

from __future__ import annotations

import msgspec

from kvrelay.errors import ProtocolError
from kvrelay.ids import WorkerId
from kvrelay.states import FreeReason

EVENTS_VERSION = 1
MAX_REPLAY_BYTES = 4096  # what a worker takes from a subscriber
MAX_EVENTS_BYTES = 64 << 20  # what a subscriber takes from a worker: a snapshot of three million blocks


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what can happen to a worker's prefix cache."""


class Stored(Event, frozen=True, kw_only=True):
    """Blocks that can be found from now on, each the parent of the next (`kvrelay/native/hashing.py`)."""

    hashes: list[bytes]
    parent: bytes  # the hash before the first of them; where a chain starts, its root


class Removed(Event, frozen=True, kw_only=True):
    """Blocks that cannot be found any more, in any order."""

    hashes: list[bytes]


class Cleared(Event, frozen=True, kw_only=True):
    """Nothing is cached any more."""


class Swapped(Event, frozen=True, kw_only=True):
    """A request's KV is on the host for now: nothing is lost. `request` is the id that the client gave or was given."""

    request: str
    num_blocks: int


class Restored(Event, frozen=True, kw_only=True):
    """The KV of a swapped request is back on the device."""

    request: str
    num_blocks: int


class FreedForNow(Event, frozen=True, kw_only=True):
    """A request's KV is gone, but the request goes on here and will compute it again. Not its end."""

    request: str
    reason: FreeReason


class Freed(Event, frozen=True, kw_only=True):
    """The end of a request on this worker. `hashes` are its full blocks that the prefix cache can still find."""

    request: str
    reason: FreeReason
    hashes: list[bytes]


LifeEvent = Swapped | Restored | FreedForNow | Freed
CacheEvent = Stored | Removed | Cleared | LifeEvent


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages of this channel."""

    worker_id: WorkerId
    version: int = EVENTS_VERSION


# worker -> subscribers


class Events(Message, frozen=True, kw_only=True):
    """One batch. The first has the number 1, and no number is left out."""

    sequence: int
    time: float | None = None  # as of time.time(), when it happened; a batch that is sent again keeps it
    events: list[msgspec.Raw]  # read by `read_events`, made by `pack_events`


class Beat(Message, frozen=True, kw_only=True):
    """Nothing new: `sequence` was the last batch (0: there was none)."""

    sequence: int


class Snapshot(Message, frozen=True, kw_only=True):
    """Everything that is in the cache after batch `sequence`. Takes the place of all batches up to that one."""

    sequence: int
    hashes: list[bytes]


# subscriber -> worker


class Replay(Message, frozen=True, kw_only=True):
    """Asks for the batches from `first` on."""

    first: int


ToSubscriber = Events | Beat | Snapshot
ToPublisher = Replay


class _AnyEvent(msgspec.Struct, frozen=True):
    type: str


_encoder = msgspec.msgpack.Encoder()
_event_decoder: msgspec.msgpack.Decoder[CacheEvent] = msgspec.msgpack.Decoder(CacheEvent)
_any_decoder = msgspec.msgpack.Decoder(_AnyEvent)
_KNOWN = frozenset(kind.__name__ for kind in (Stored, Removed, Cleared, Swapped, Restored, FreedForNow, Freed))


def pack_events(events: list[CacheEvent]) -> list[msgspec.Raw]:
    return [msgspec.Raw(_encoder.encode(event)) for event in events]


def read_events(batch: Events) -> list[CacheEvent]:
    """Those that this version knows, in order. Raises ProtocolError if one of these is malformed."""
    return [event for raw in batch.events if (event := _read_event(raw)) is not None]


def _read_event(raw: msgspec.Raw) -> CacheEvent | None:
    try:
        return _event_decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if _kind(raw) in _KNOWN:
            raise ProtocolError(f"malformed event: {error}") from error
        return None  # of a later version


def _kind(raw: msgspec.Raw) -> str:
    try:
        return _any_decoder.decode(raw).type
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"an event without a kind: {error}") from error
