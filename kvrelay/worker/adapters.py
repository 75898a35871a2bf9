"""An operator's orders about LoRA adapters, at a worker. Files are read beside the engine, and added between two steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.interfaces import Adapters, LoadedAdapter, NoAdapters
from kvrelay.errors import ModelError
from kvrelay.log import Log
from kvrelay.wire.adapters import AdaptersTold, LoadAdapter, UnloadAdapter

log = Log("worker")


@dataclass(frozen=True, slots=True)
class _Read:
    """An order whose files were read, or could not be."""

    identity: bytes  # of the router that gave it
    order: LoadAdapter
    adapter: LoadedAdapter | None
    error: str = ""


class AdapterOrders:
    """`wake` is called from another thread when there is something to take."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.adapters: Adapters = NoAdapters()
        self._wake = wake
        self._read: queue.SimpleQueue[_Read] = queue.SimpleQueue()

    def load(self, identity: bytes, order: LoadAdapter) -> None:
        threading.Thread(target=self._load, args=(identity, order), name="read-adapter", daemon=True).start()

    def unload(self, order: UnloadAdapter) -> AdaptersTold:
        if self.adapters.unload(order.name):
            log.info("LoRA adapter unloaded", name=order.name)
        return AdaptersTold(order=order.order, adapters=self.adapters.records())

    def take(self) -> list[tuple[bytes, AdaptersTold]]:
        """What is to be said to the routers whose orders have ended."""
        told: list[tuple[bytes, AdaptersTold]] = []
        while not self._read.empty():
            read = self._read.get()
            if read.adapter is not None:
                self.adapters.add(read.order.name, read.order.path, read.adapter)
                log.info("LoRA adapter loaded", name=read.order.name, digest=read.adapter.digest)
            told.append(
                (read.identity, AdaptersTold(order=read.order.order, adapters=self.adapters.records(), error=read.error))
            )
        return told

    def _load(self, identity: bytes, order: LoadAdapter) -> None:
        try:
            read = _Read(identity, order, self.adapters.read(order.path))
        except ModelError as error:
            read = _Read(identity, order, None, str(error))
        except Exception as error:  # the border to the libraries that read files: the order gets an answer
            log.exception("an adapter could not be read", path=order.path)
            read = _Read(identity, order, None, f"{type(error).__name__}: {error}")
        self._read.put(read)
        self._wake()
