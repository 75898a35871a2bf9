"""What tests of the etcd registry share: a router's view of it, a hand that writes past it, and a line that can be cut."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import urllib.request
from typing import Any

import msgspec
from etcd_server import EtcdServer
from patience import PATIENCE_S, eventually
from registry_records import make_record

from kvrelay.discovery.base import Loss
from kvrelay.discovery.etcd import EtcdMembership, EtcdRegistration
from kvrelay.discovery.etcd_members import PREFIX, key_of, value_of
from kvrelay.ids import WorkerId
from kvrelay.states import WorkerState
from kvrelay.wire.registry import WorkerLoad, WorkerRecord

LEASE_S = 1.0


class View:
    """What a router sees of one etcd. Checks that every worker joins before it changes or leaves."""

    def __init__(self, address: str, **settings: Any) -> None:
        self.members: dict[WorkerId, WorkerRecord] = {}
        self.events: list[tuple[str, WorkerId]] = []
        self.losses: dict[WorkerId, Loss] = {}
        self.num_malformed = 0
        self.reachable: list[bool] = []
        self.membership = EtcdMembership(
            address,
            **{"registration_s": LEASE_S, "timeout_s": 5.0, "probe_every_s": 0.2, **settings},
            on_malformed=self._malformed,
            on_reachable=self.reachable.append,
        )
        self.membership.start(self._joined, self._changed, self._left)

    def _joined(self, record: WorkerRecord) -> None:
        assert record.id not in self.members
        self.members[record.id] = record
        self.events.append(("joined", record.id))

    def _changed(self, record: WorkerRecord) -> None:
        assert self.members[record.id] != record
        self.members[record.id] = record
        self.events.append(("changed", record.id))

    def _left(self, worker_id: WorkerId, loss: Loss) -> None:
        del self.members[worker_id]
        self.losses[worker_id] = loss
        self.events.append(("left", worker_id))

    def _malformed(self) -> None:
        self.num_malformed += 1

    async def until_members(self, *records: WorkerRecord) -> None:
        await eventually(lambda: self.members == {record.id: record for record in records})


class Etcdctl:
    """Writes and deletes keys past the registry, as an operator or a stranger would."""

    def __init__(self, server: EtcdServer) -> None:
        self._url = server.url

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self._url + path, msgspec.json.encode(body))
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.loads(response.read())

    def put(self, key: bytes, value: bytes) -> None:
        self.post("/v3/kv/put", {"key": key, "value": value})

    def put_all(self, records: list[WorkerRecord]) -> None:
        """In one transaction, so that a watch tells them in one line."""
        puts = [{"request_put": {"key": key_of(record), "value": value_of(record)}} for record in records]
        self.post("/v3/kv/txn", {"success": puts})

    def delete(self, key: bytes) -> None:
        self.post("/v3/kv/deleterange", {"key": key})

    def delete_all(self) -> None:
        self.post("/v3/kv/deleterange", {"key": PREFIX, "range_end": b"/kvrelay/workers0"})

    def get(self, key: bytes) -> dict[str, Any]:
        """The pair, with its value as text."""
        (pair,) = self.post("/v3/kv/range", {"key": key})["kvs"]
        return {**pair, "value": base64.b64decode(pair["value"]).decode()}


class Relay:
    """Between a client and etcd. Cut connections end; muted ones stay open and carry nothing any more."""

    def __init__(self, server: EtcdServer) -> None:
        self._server = server
        self._open: set[asyncio.StreamWriter] = set()
        self._muted: set[asyncio.StreamWriter] = set()
        self._watches: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"etcd://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._server.host, self._server.client_port)
        except OSError:
            writer.close()
            return
        self._open |= {writer, far_writer}
        await asyncio.gather(self._pump(reader, far_writer, writer), self._pump(far_reader, writer, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if b"POST /v3/watch" in data:
                    self._watches.add(client)
                if writer not in self._muted:
                    writer.write(data)
                    await writer.drain()
        writer.close()
        self._open.discard(writer)

    def mute(self) -> None:
        """Every connection of now; new ones work."""
        self._muted |= self._open

    def mute_watches(self) -> None:
        self._muted |= self._watches

    def cut(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def close(self) -> None:
        self._listener.close()
        self.cut()


async def register(registration: EtcdRegistration, ttl_s: float = 30.0) -> WorkerRecord:
    record = make_record()
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(registration.register, record, ttl_s):
            pass
    return record


async def renewed(registration: EtcdRegistration, load: WorkerLoad | None = None) -> bool:
    return await asyncio.to_thread(registration.renew, WorkerState.READY, load or WorkerLoad())


async def until_renewed(registration: EtcdRegistration) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await renewed(registration):
            await asyncio.sleep(0.05)
