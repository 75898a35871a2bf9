"""The workers that etcd listed last, and what has changed since: told as joined, changed and left. No sockets here.

    key    /kvrelay/workers/{role}/{worker_id}, under the worker's etcd lease
    value  its WorkerRecord as JSON; in a cluster with a key, the signature and a space before it

Keys and values of strangers are counted and ignored. A worker whose key is missing after a time in which etcd was not heard
stays a member for `grace_s`: if etcd lost its data, the workers register again within that time, and their requests go on.
A worker that really died meanwhile is noticed by the connection to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass

import msgspec

from kvrelay.discovery.base import OnChanged, OnJoined, OnLeft
from kvrelay.discovery.etcd_gateway import Event, KeyValue
from kvrelay.discovery.members import Members, check_record
from kvrelay.errors import ProtocolError
from kvrelay.ids import as_router_id
from kvrelay.log import Log
from kvrelay.planes.curve import current_key
from kvrelay.states import WorkerState
from kvrelay.wire import check_version
from kvrelay.wire.registry import RouterRecord, WorkerRecord

log = Log("discovery")

PREFIX = b"/kvrelay/workers/"
PREFIX_END = b"/kvrelay/workers0"  # "0" comes after "/"


def key_of(record: WorkerRecord) -> bytes:
    return PREFIX + f"{record.role.value}/{record.id}".encode()


def value_of(record: WorkerRecord | RouterRecord) -> bytes:
    value, key = msgspec.json.encode(record), current_key()
    return value if key is None else key.sign(value) + b" " + value


def unsealed(value: bytes) -> bytes:
    """A program that can write to etcd is not thereby a worker or router of this cluster. Raises ProtocolError."""
    key = current_key()
    if key is None:
        return value
    signature, _, message = value.partition(b" ")
    if not key.has_signed(message, signature):
        raise ProtocolError("the record is not signed with this cluster's key")
    return message


def read_record(pair: KeyValue) -> WorkerRecord:
    """Raises ProtocolError."""
    try:
        record = msgspec.json.decode(unsealed(pair.value), type=WorkerRecord)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the value is no worker's record: {error}") from error
    check_record(record)
    if pair.key != key_of(record):
        raise ProtocolError(f"the record of {record.id} is under a key that is not its own")
    return record


def read_router(pair: KeyValue, folder: bytes) -> RouterRecord:
    """`folder` is what all keys of routers begin with. Raises ProtocolError."""
    try:
        record = msgspec.json.decode(unsealed(pair.value), type=RouterRecord)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the value is no router's record: {error}") from error
    check_version("the router", record.version)
    if pair.key != folder + as_router_id(record.id).encode():
        raise ProtocolError(f"the record of {record.id} is under a key that is not its own")
    return record


@dataclass(eq=False)
class EtcdMembers:
    """Follows one etcd through `replace_all` (a snapshot) and `apply` (the watch). The callbacks are told of differences."""

    on_joined: InitVar[OnJoined]
    on_changed: InitVar[OnChanged]
    on_left: InitVar[OnLeft]
    _: KW_ONLY
    grace_s: float
    on_malformed: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, on_joined: OnJoined, on_changed: OnChanged, on_left: OnLeft) -> None:
        self.revision = 0  # of etcd's store, up to which everything was told
        self._members: Members[bytes] = Members(on_joined, on_changed, on_left)
        self._ignored: set[bytes] = set()  # keys in etcd that are no member's
        self._missing: dict[bytes, float] = {}  # members whose keys were not in etcd: until when they may come back

    def replace_all(self, pairs: Iterable[KeyValue], revision: int) -> None:
        """etcd holds exactly these."""
        found = {pair.key: pair for pair in pairs}
        self._ignored &= found.keys()
        for key in self._members:
            if key not in found:
                self._miss(key)  # also those missed before: etcd was away again, and they could not come back
        for pair in found.values():
            self._put(pair)
        self.revision = revision

    def apply(self, events: Iterable[Event]) -> None:
        """In etcd's order."""
        for event in events:
            if event.type == "DELETE":
                self._delete(event.kv.key)
            else:
                self._put(event.kv)
            self.revision = max(self.revision, event.kv.mod_revision)

    def agrees(self, count: int, newest_revision: int) -> bool:
        """Whether etcd, which has so many keys, the newest of that revision, has told us all of it."""
        return count == len(self._members) - len(self._missing) + len(self._ignored) and newest_revision <= self.revision

    def expire(self) -> None:
        """Gives up on missing members whose time is over."""
        now = self.clock()
        for key in [key for key, until in self._missing.items() if until <= now]:
            self._leave(key)

    def _put(self, pair: KeyValue) -> None:
        try:
            self._members.put(pair.key, read_record(pair))
        except ProtocolError as error:
            self._refuse(pair.key, error)
            return
        self._missing.pop(pair.key, None)
        self._ignored.discard(pair.key)

    def _refuse(self, key: bytes, error: ProtocolError) -> None:
        """A member whose key now holds nonsense stays what it was."""
        self.on_malformed()
        is_member = key in self._members
        if is_member or key not in self._ignored:
            log.seldom("ignored in etcd", key=key[:120], reason=error)
        if is_member:
            self._missing.pop(key, None)
        else:
            self._ignored.add(key)

    def _delete(self, key: bytes) -> None:
        self._ignored.discard(key)
        self._leave(key)

    def _miss(self, key: bytes) -> None:
        record = self._members.get(key)
        if record is not None and record.state is WorkerState.DRAINING:
            self._leave(key)
        else:
            self._missing[key] = self.clock() + self.grace_s

    def _leave(self, key: bytes) -> None:
        self._missing.pop(key, None)
        self._members.vanished(key)
