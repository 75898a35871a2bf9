"""What of a transfer is computed, and what of that still has to move. Pure arithmetic on token counts and layers.

A prompt is computed chunk by chunk, and within a chunk layer by layer, so what exists of its KV is a staircase:

    layers     tokens 0 ......... num_tokens ...... next_tokens
      0        ################################################
      1        ################################################      layers = 2
      2        ######################
      3        ######################

`Progress` is such a staircase. `Coverage` is what has been handed to a transfer engine; the difference of the two is cut into
`LayerPlan`s, each of which is one move.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvrelay.ids import RequestId, TransferId, WorkerId, as_request_id, as_transfer_id, as_worker_id
from kvrelay.wire.serving import TransferInfo


class TransferMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides know of a transfer from the start, and the two names it has: `transfer_id` towards the peer, `request_id`
    towards this worker's scheduler."""

    transfer_id: TransferId
    request_id: RequestId
    peer: WorkerId
    mode: Literal["write", "read"]
    num_tokens: int  # of the prompt
    trace_id: str = ""


def transfer_meta(request_id: RequestId, transfer: TransferInfo, peer: WorkerId, num_tokens: int) -> TransferMeta:
    """Raises WrongIdError."""
    as_worker_id(transfer.producer)
    as_worker_id(transfer.consumer)
    return TransferMeta(
        transfer_id=as_transfer_id(transfer.transfer_id),
        request_id=as_request_id(request_id),
        peer=peer,
        mode=transfer.mode,
        num_tokens=num_tokens,
        trace_id=transfer.trace_id,
    )


class Reservation(msgspec.Struct, frozen=True):
    """The consumer's blocks for the tokens from `skip_tokens` on. In read mode the producer never learns the blocks."""

    skip_tokens: int
    blocks: tuple[int, ...] = ()


class Progress(msgspec.Struct, frozen=True):
    """Tokens [0, num_tokens) are there in all layers, those up to next_tokens in the first `layers` layers."""

    num_tokens: int = 0
    next_tokens: int = 0
    layers: int = 0

    def tokens(self, layer: int) -> int:
        return max(self.num_tokens, self.next_tokens) if layer < self.layers else self.num_tokens

    @property
    def furthest(self) -> int:
        """The largest token count of any layer."""
        return self.tokens(0)


class LayerPlan(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of layers [first, last): the unit that is handed to an engine. One plan may span
    several layers when the engine falls behind the model."""

    transfer_id: TransferId
    tokens: tuple[int, int]
    layers: tuple[int, int]


class Coverage:
    """How many tokens of each layer were handed to an engine. Starts at the tokens that need not move."""

    def __init__(self, transfer_id: TransferId, num_layers: int, skip_tokens: int) -> None:
        self._transfer_id = transfer_id
        self._issued = [skip_tokens] * num_layers
        self._caught_up: Progress | None = None  # nothing more to take of this very progress

    def take(self, progress: Progress, limit: int) -> list[LayerPlan]:
        """Up to `limit` plans for what is new, as large as they can be; they count as handed over."""
        if progress is self._caught_up:
            return []
        plans: list[LayerPlan] = []
        first = 0
        while first < len(self._issued):
            if len(plans) == limit:
                return plans
            last = self._same_until(first, progress)
            start, stop = self._issued[first], progress.tokens(first)
            if start < stop:
                plans.append(LayerPlan(self._transfer_id, (start, stop), (first, last)))
                self._issued[first:last] = [stop] * (last - first)
            first = last
        self._caught_up = progress
        return plans

    def _same_until(self, first: int, progress: Progress) -> int:
        """The end of the run of layers that lack the same tokens as layer `first`."""
        wanted = (self._issued[first], progress.tokens(first))
        last = first + 1
        while last < len(self._issued) and (self._issued[last], progress.tokens(last)) == wanted:
            last += 1
        return last

    def complete(self, num_tokens: int) -> bool:
        return min(self._issued) >= num_tokens
