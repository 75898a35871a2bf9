"""Orders about LoRA adapters, at a worker: an operator's, and those by which a router brings a worker up to date that has
missed some. Files are read beside the engine, and added between two steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvrelay.engine.interfaces import Adapters, LoadedAdapter, NoAdapters
from kvrelay.errors import ModelError
from kvrelay.log import Log
from kvrelay.wire.adapters import AdaptersTold, DropAdapter, LoadAdapter, UnloadAdapter, UseAdapter
from kvrelay.wire.registry import Adapter

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
        self._ordered: set[str] = set()  # names of those that no option has brought
        self._aside: dict[tuple[bytes, str], _Read | None] = {}  # by router and order; None: it is still read
        self._read: queue.SimpleQueue[_Read] = queue.SimpleQueue()

    def records(self) -> list[Adapter]:
        found = self.adapters.records()
        return [msgspec.structs.replace(record, is_ordered=record.name in self._ordered) for record in found]

    def load(self, identity: bytes, order: LoadAdapter) -> None:
        if not order.digest:
            self._aside[identity, order.order] = None
        threading.Thread(target=self._load, args=(identity, order), name="read-adapter", daemon=True).start()

    def use(self, identity: bytes, order: UseAdapter) -> AdaptersTold:
        read = self._aside.pop((identity, order.read), None)
        if read is None:
            return AdaptersTold(order=order.order, adapters=self.records(), error="the worker has not read the adapter")
        self._add(read)
        return AdaptersTold(order=order.order, adapters=self.records(), decided=read.order.name)

    def drop(self, identity: bytes, order: DropAdapter) -> None:
        self._aside.pop((identity, order.read), None)

    def forget(self, identity: bytes) -> None:
        """The router is gone, and will not say whether what it ordered is to be used."""
        self._aside = {key: read for key, read in self._aside.items() if key[0] != identity}

    def unload(self, order: UnloadAdapter) -> AdaptersTold:
        self._ordered.discard(order.name)
        if self.adapters.unload(order.name):
            log.info("LoRA adapter unloaded", name=order.name)
        decided = order.name if order.decides else ""
        return AdaptersTold(order=order.order, adapters=self.records(), decided=decided)

    def take(self) -> list[tuple[bytes, AdaptersTold]]:
        """What is to be said to the routers whose orders have ended."""
        told: list[tuple[bytes, AdaptersTold]] = []
        while not self._read.empty():
            read = self._read.get()
            key = (read.identity, read.order.order)
            if read.adapter is None:
                self._aside.pop(key, None)
            elif read.order.digest:
                self._add(read)
            elif key in self._aside:
                self._aside[key] = read
            answer = AdaptersTold(order=read.order.order, adapters=self.records(), error=read.error)
            told.append((read.identity, answer))
        return told

    def _add(self, read: _Read) -> None:
        assert read.adapter is not None
        self.adapters.add(read.order.name, read.order.path, read.adapter)
        self._ordered.add(read.order.name)
        log.info("LoRA adapter loaded", name=read.order.name, digest=read.adapter.digest)

    def _load(self, identity: bytes, order: LoadAdapter) -> None:
        try:
            adapter = self.adapters.read(order.path)
            if order.digest and adapter.digest != order.digest:
                raise ModelError(f"{order.path} holds another adapter now than when it was loaded")
            read = _Read(identity, order, adapter)
        except ModelError as error:
            read = _Read(identity, order, None, str(error))
        except Exception as error:  # the border to the libraries that read files: the order gets an answer
            log.exception("an adapter could not be read", path=order.path)
            read = _Read(identity, order, None, f"{type(error).__name__}: {error}")
        self._read.put(read)
        self._wake()
