"""Embeddings as the relay's machines see them."""

from __future__ import annotations

import msgspec

from kvrelay.ids import TransferId
from kvrelay.states import EmbeddingState
from kvrelay.transfer.embedding.arrival import EmbeddingArrival
from kvrelay.transfer.embedding.layout import EmbeddingLayout, embedding_layout
from kvrelay.transfer.relay.desk import Desk
from kvrelay.transfer.relay.kind import Kind
from kvrelay.wire.embedding import EMBEDDING_VERSION, Done, Init, Resume, decode_for_consumer, decode_for_producer
from kvrelay.wire.relay import Abort, TransferMessage


class EmbeddingSent(msgspec.Struct, frozen=True):
    """How an expected transfer ended. `error` is empty when every consumer has everything."""

    transfer_id: TransferId
    error: str = ""
    is_unwanted: bool = False  # it was a consumer that ended it
    size_bytes: int = 0  # that each consumer has


SendingDesk = Desk[EmbeddingLayout, list[EmbeddingSent]]
ReceivingDesk = Desk[EmbeddingLayout, list[EmbeddingArrival]]


def _answer_unknown(message: TransferMessage) -> TransferMessage | None:
    unknown = Abort(transfer_id=message.transfer_id, reason="the producer does not know it")
    return unknown if isinstance(message, Resume) else None


EMBEDDINGS: Kind[EmbeddingLayout] = Kind(
    name="embedding",
    version=EMBEDDING_VERSION,
    decode_for_producer=decode_for_producer,
    decode_for_consumer=decode_for_consumer,
    read_layout=embedding_layout,
    held_back=(Init,),
    answer_unknown=_answer_unknown,
    unwanted=(),
    asks=(Init, Resume, Done),
    waits=frozenset(),  # a consumer says Init or Resume again with every heartbeat
    done=EmbeddingState.SUCCESS,
)
