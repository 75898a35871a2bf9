"""How much of its pool a consumer gives to an embedding whose length it does not know, and what it does when there is no room.

- The first time: a default, fixed or learnt from the lengths that came before.
- For a resume: the rest, besides the blocks that the embedding has, if there is so much room. Else as much of the rest as the
  pool can ever hold, beginning with the blocks that it has: what was in them has been moved out, and they were never given up.
  So a full pool makes a resume smaller but cannot stop it, unless the policy is to fail.

| policy | no room for the default | no room for the rest |
|---|---|---|
| wait   | wait, after `wait_s` take what there is, fail if there is nothing | take what there is besides its own blocks |
| shrink | take what there is; wait while there is nothing, fail after `wait_s` | the same |
| fail   | fail | fail |
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Literal

import msgspec

from kvrelay.errors import KVRelayError
from kvrelay.ids import TransferId
from kvrelay.transfer.embedding.pool import EmbeddingPool
from kvrelay.transfer.relay.link import TransferSettings

_REMEMBERED_LENGTHS = 64
_SHARE_THAT_FITS = 0.9  # of the remembered lengths, in the adaptive default


class NoRoomError(KVRelayError):
    """The pool is full, and the policy says not to wait, or not any longer."""


class EmbeddingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Every choice and deadline of the embedding relay. Both sides of a pair must have the same `transfer.lease_s`."""

    buffer_tokens: int = 8192  # a consumer's first allocation
    buffer: Literal["fixed", "adaptive"] = "fixed"
    full: Literal["wait", "shrink", "fail"] = "wait"
    wait_s: float = 10.0  # for room, at most
    transfer: TransferSettings = TransferSettings()


class Room(msgspec.Struct, frozen=True):
    """Blocks, and the tokens that may be put into them: the last block may be used in part."""

    blocks: tuple[int, ...]
    tokens: int


class Rooms:
    """Of one consumer. Takes from the pool; giving back is its caller's business. Transfers that wait for their first room get
    it in the order in which they queued: none is overtaken."""

    def __init__(self, pool: EmbeddingPool, settings: EmbeddingSettings) -> None:
        self.pool = pool
        self._settings = settings
        self._queue: OrderedDict[TransferId, None] = OrderedDict()
        self._lengths: deque[int] = deque(maxlen=_REMEMBERED_LENGTHS)

    def note_length(self, total_tokens: int) -> None:
        self._lengths.append(total_tokens)

    def default_tokens(self) -> int:
        """Never more than the pool can hold."""
        tokens = self._settings.buffer_tokens
        if self._settings.buffer == "adaptive" and self._lengths:
            ordered = sorted(self._lengths)
            tokens = ordered[min(len(ordered) - 1, int(len(ordered) * _SHARE_THAT_FITS))]
        return min(tokens, self.pool.layout.num_tokens)

    def queue(self, transfer_id: TransferId) -> None:
        self._queue[transfer_id] = None

    def leave_queue(self, transfer_id: TransferId) -> None:
        self._queue.pop(transfer_id, None)

    def deadline(self, asked_at: float) -> float:
        """Of one that waits."""
        return asked_at + self._settings.wait_s

    def first(self, transfer_id: TransferId, asked_at: float, now: float) -> Room | None:
        """For one that queued. None: wait. Raises NoRoomError."""
        if next(iter(self._queue)) != transfer_id:
            return None
        wanted, policy = self.default_tokens(), self._settings.full
        waited = now >= self.deadline(asked_at)
        blocks = self.pool.take(wanted) or ()
        if not blocks and (policy == "shrink" or (policy == "wait" and waited)):
            blocks = self.pool.take_up_to(wanted)
        if blocks:
            self.leave_queue(transfer_id)
            return self._room(blocks, wanted)
        if policy == "fail":
            raise NoRoomError(f"the embedding pool has no room for {wanted} tokens")
        if waited:
            raise NoRoomError(f"the embedding pool had no room for {self._settings.wait_s:g} s")
        return None

    def besides(self, remaining_tokens: int) -> Room | None:
        """For all of the rest, leaving the blocks that it has alone; none if there is not so much."""
        blocks = self.pool.take(remaining_tokens)
        return Room(blocks, remaining_tokens) if blocks is not None else None

    def more(self, held: tuple[int, ...], remaining_tokens: int) -> Room:
        """For the rest, with the blocks that it has. Raises NoRoomError; then it still has them."""
        wanted = min(remaining_tokens, self.pool.layout.num_tokens)
        missing = self.pool.layout.blocks_for(wanted) - len(held)
        if missing <= 0:
            kept = len(held) + missing
            self.pool.give_back(held[kept:])
            return self._room(held[:kept], wanted)
        missing_tokens = missing * self.pool.layout.block_size
        extra = self.pool.take(missing_tokens)
        if extra is None and self._settings.full == "fail":
            raise NoRoomError(f"the embedding pool has no room for the {remaining_tokens} tokens that remain")
        return self._room(held + (extra or self.pool.take_up_to(missing_tokens)), wanted)

    def _room(self, blocks: tuple[int, ...], wanted_tokens: int) -> Room:
        return Room(blocks, min(wanted_tokens, len(blocks) * self.pool.layout.block_size))
