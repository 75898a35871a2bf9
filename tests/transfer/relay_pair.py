"""Real movers, with their threads and sockets, over the memory engine or any other."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from memory_faults import Fate, FaultyEngine

from kvrelay.engine.fence import PASSED
from kvrelay.engine.movers import Arrival
from kvrelay.ids import RequestId, new_transfer_id, new_worker_id
from kvrelay.transfer.engines.base import Mover, TransferEngine
from kvrelay.transfer.engines.memory import MemoryNetwork
from kvrelay.transfer.kv.consumer import RelayConsumer
from kvrelay.transfer.kv.layout import KVLayout
from kvrelay.transfer.kv.producer import RelayProducer
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.wire.serving import FirstToken, TransferInfo
from tests.transfer_peers import engine_of, floats, region_of

TINY = KVLayout(num_layers=2, num_blocks=32, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32", item_bytes=4)


class Side:
    """A region with values in it, and the parts of a mover."""

    def __init__(
        self,
        role: str,
        network: MemoryNetwork | None,
        *,
        layout: KVLayout = TINY,
        mover: Mover = Mover.PRODUCER,
        faults: Iterable[Fate] = (),
        fingerprint: str = "tiny/float32",
        settings: TransferSettings | None = None,
        engines: Sequence[TransferEngine] | None = None,
        transport: str = "",
    ) -> None:
        """`transport` is a real one, by the name of its case in the contract of transfer engines."""
        self.network = network or MemoryNetwork()
        self.id = new_worker_id(role)
        self.layout = layout
        self.region = region_of(transport, layout.size_bytes)
        shape = (layout.num_layers, 2, layout.num_blocks, layout.block_size, layout.head_dim)
        self.memory = floats(self.region).reshape(shape)
        if transport:
            engines = [engine_of(transport, self.id)]
        self.news = threading.Event()
        self.parts = RelayParts(
            worker_id=self.id,
            layout=layout,
            region=self.region,
            engines=engines or [FaultyEngine(self.id, self.network, mover=mover, faults=faults)],
            fingerprint=fingerprint,
            host="here",
            settings=settings or TransferSettings(),
            on_news=self.news.set,
        )


class Producer(Side):
    def __init__(self, network: MemoryNetwork | None = None, **options: object) -> None:
        super().__init__("prefill", network, **options)  # type: ignore[arg-type]
        self.relay = RelayProducer(self.parts)
        self.released: list[RequestId] = []
        self.set_aside: list[RequestId] = []
        self.restart: list[RequestId] = []
        self._failures: dict[RequestId, str] = {}

    def poll(self) -> None:
        news = self.relay.poll()
        self.released += news.released
        self.set_aside += news.set_aside
        self.restart += news.restart
        self._failures.update(news.failed)

    def failures(self) -> dict[RequestId, str]:
        self.poll()
        return self._failures

    def is_released(self, request: RequestId) -> bool:
        self.poll()
        return request in self.released

    def compute(self, request: RequestId, blocks: list[int], num_tokens: int, value: float, chunk: int = 5) -> None:
        """As an engine does: chunk by chunk and layer by layer. Every token's KV is its own number."""
        size = self.layout.block_size
        for start in range(0, num_tokens, chunk):
            stop = min(num_tokens, start + chunk)
            self.relay.begin_step([(request, stop)])
            for layer in range(self.layout.num_layers):
                for token in range(start, stop):
                    self.memory[layer, :, blocks[token // size], token % size] = kv(value, token, layer)
                if self.region.device != "cpu" and torch.cuda.is_available():
                    torch.cuda.synchronize()
                self.relay.layer_done(layer, PASSED)
            self.relay.end_step()
        self.relay.finish(request, [FirstToken(0, int(value))])

    def close(self) -> None:
        self.relay.close()


class Consumer(Side):
    def __init__(self, network: MemoryNetwork | None = None, **options: object) -> None:
        super().__init__("decode", network, **options)  # type: ignore[arg-type]
        self.relay = RelayConsumer(self.parts)
        self.started: list[RequestId] = []
        self.freed: list[RequestId] = []
        self._arrivals: dict[RequestId, Arrival] = {}

    def poll(self) -> None:
        news = self.relay.poll()
        self.started += news.started
        self.freed += news.freed
        self._arrivals.update({arrival.request_id: arrival for arrival in news.arrived})

    def arrivals(self) -> dict[RequestId, Arrival]:
        self.poll()
        return self._arrivals

    def is_started(self, request: RequestId) -> bool:
        self.poll()
        return request in self.started

    def is_freed(self, request: RequestId) -> bool:
        self.poll()
        return request in self.freed

    def holds(self, blocks: list[int], skip: int, num_tokens: int, value: float) -> bool:
        size = self.layout.block_size
        return all(
            (self.memory[layer, :, blocks[(token - skip) // size], (token - skip) % size] == kv(value, token, layer)).all()
            for token in range(skip, num_tokens)
            for layer in range(self.layout.num_layers)
        )

    def close(self) -> None:
        self.relay.close()


def kv(value: float, token: int, layer: int) -> float:
    return value * 1000 + token * 10 + layer


def info(producer: Producer, consumer: Consumer, mode: str = "write") -> TransferInfo:
    return TransferInfo(
        transfer_id=new_transfer_id(),
        mode=mode,  # type: ignore[arg-type]
        producer=producer.id,
        consumer=consumer.id,
        signal_address=producer.relay.signal_address,
    )
