"""KV as the relay's machines see it."""

from __future__ import annotations

from kvrelay.engine.movers import ConsumerNews, ProducerNews
from kvrelay.states import ConsumerState, ProducerState
from kvrelay.transfer.kv.layout import KVLayout, kv_layout
from kvrelay.transfer.relay.desk import Desk
from kvrelay.transfer.relay.kind import Kind
from kvrelay.wire.kv import (
    KV_VERSION,
    NotReady,
    Pull,
    Ready,
    Release,
    Reserve,
    Starting,
    WriteDone,
    decode_for_consumer,
    decode_for_producer,
)
from kvrelay.wire.relay import TransferMessage

ProducerDesk = Desk[KVLayout, ProducerNews]
ConsumerDesk = Desk[KVLayout, ConsumerNews]


def _answer_unknown(message: TransferMessage) -> TransferMessage | None:
    return NotReady(transfer_id=message.transfer_id) if isinstance(message, Pull) else None


KV: Kind[KVLayout] = Kind(
    name="KV",
    version=KV_VERSION,
    decode_for_producer=decode_for_producer,
    decode_for_consumer=decode_for_consumer,
    read_layout=kv_layout,
    held_back=(Reserve, Starting, Ready),
    answer_unknown=_answer_unknown,
    unwanted=(Release,),
    asks=(Reserve, Pull, WriteDone, Ready),
    waits=frozenset({ConsumerState.RESERVED}),
    done=ProducerState.DONE,
)
