"""The registry plane: who is alive, in which role, where, and how loaded. A worker's DEALER talks to the registry's ROUTER, and
so does that of a router that joins the registry of another process.

worker                                     registry
  | Register(record, ttl_s) ----------------> |   STARTING, before it loads anything; then, once more, READY
  | <------------ Registered | RegistryRefused |
  | Renew(worker_id, state, load) every ttl/3 > |   not renewed for ttl_s: the worker is considered dead
  | <--------------- Registered | Unknown      |   Unknown: register again (the registry restarted)
  | Leave(worker_id) -----------------------> |

router                                     registry
  | Watch(router) every registration/3 -----> |   not heard for `silence_s`: the router is considered gone
  | <-- Listing(workers, routers, leader) ---- |   everything, as answer to each Watch
  | <----------------- Seen(record), Gone(id) |   what changes in between
"""

from __future__ import annotations

import msgspec

from kvrelay.ids import RouterId, WorkerId
from kvrelay.states import Role, WorkerState


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks of a worker by what holds them. The seven kinds sum to `total`."""

    total: int = 0
    free: int = 0
    cached: int = 0  # unreferenced, KV reusable
    in_use: int = 0  # of live sequences
    reserved: int = 0  # waiting for a transfer to land
    sending: int = 0  # held for a peer
    pinned: int = 0  # kept for continuations
    quarantined: int = 0  # a writer may still touch them


class HostCounts(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks that a worker has on the host. The first four are of this moment, the rest since the start."""

    total: int = 0
    free: int = 0
    cached: int = 0  # evicted on the device or about to be, KV reusable
    in_use: int = 0  # of swapped sequences, and of copies under way
    hit_tokens: int = 0  # prompt tokens found here and not on the device
    swapped_out: int = 0  # sequences
    swapped_in: int = 0  # sequences
    timeouts: int = 0  # copies that took too long


class TransferCounts(msgspec.Struct, frozen=True, kw_only=True):
    in_flight: int = 0
    done: int = 0
    failed: int = 0
    bytes: int = 0  # since the start; counted by the side that moves them
    late_bytes: int = 0  # of these, moved after the prompt was computed: what the hand-over had to wait for
    reconnects: int = 0  # connections to a prefill worker that were opened again
    repeats: int = 0  # messages of the relay that were said again, since no answer had come
    set_aside: int = 0  # computed prompts whose blocks were given back, since their peer had no room
    recomputed: int = 0  # of these, computed again
    by_peer: dict[WorkerId, int] = {}  # bytes, by the worker at the other end; only those of late


class ImageCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`in_flight` and `held` are of this moment, the rest since the start."""

    in_flight: int = 0  # embeddings on their way to or from a peer
    held: int = 0  # images that requests here still need
    encoded: int = 0  # images that went through the vision tower
    hits: int = 0  # images that were wanted and found: neither encoded nor transferred
    relayed: int = 0  # images whose embeddings a peer was given, or gave
    failed: int = 0  # that ended otherwise
    bytes: int = 0  # of embeddings, counted by the side that moves them
    resumes: int = 0  # rounds beyond the first, where the receiver had less room than it needed
    reconnects: int = 0  # connections to an encode worker that were opened again
    repeats: int = 0  # messages of the relay that were said again, since no answer had come
    malformed: int = 0  # frames of the relay that were no message
    by_peer: dict[WorkerId, int] = {}  # bytes that a receiver moved, by the encode worker that had them


class MappingCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Of the table that translates transfer ids and request ids. `size` and `held_back` are of this moment, the rest since
    the start."""

    size: int = 0
    held_back: int = 0  # messages about transfers that are not known yet
    lookups: int = 0
    duplicates: int = 0  # messages about what was said before
    unknown: int = 0  # messages about unknown transfers
    foreign: int = 0  # messages from a worker that is not the transfer's peer: another attempt or incarnation
    malformed: int = 0  # frames that were no message


class PlaneCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong between a worker and those it talks to, since its start. Its relays count for themselves."""

    serving_malformed: int = 0  # messages that were refused, since they made no sense or came out of turn
    events_malformed: int = 0  # likewise, where events that were missed are asked for
    refused_peers: int = 0  # connections of peers that do not hold the cluster key
    registry_retries: int = 0  # attempts to reach the registry that failed and are made again


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    running: int = 0
    waiting: int = 0
    transferring: int = 0
    swapped: int = 0
    blocks: BlockCounts = BlockCounts()
    host: HostCounts = HostCounts()
    transfers: TransferCounts = TransferCounts()
    mapping: MappingCounts = MappingCounts()
    planes: PlaneCounts = PlaneCounts()
    prompt_tokens: int = 0  # since the start: prompt tokens computed
    cached_tokens: int = 0  # since the start: prompt tokens found in the prefix cache, or inherited
    output_tokens: int = 0  # since the start
    preemptions: int = 0  # since the start
    steps: int = 0  # since the start
    connections: int = 0  # routers that are connected, and workers that KV is exchanged with
    kept: int = 0  # finished samples whose KV is kept for a continuation
    inherited_tokens: int = 0  # since the start: prompt tokens whose KV was inherited
    images: ImageCounts | None = None  # of a worker whose model takes none


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that a worker has loaded."""

    name: str  # what clients ask for it by, as for a model
    digest: str  # of its content: adapters that compute the same have the same
    path: str  # where the worker read it
    is_ordered: bool = False  # by an operator, at run time: the worker's options do not say it


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What others know of a worker. `id` names one incarnation of its process. One that is STARTING has no address, fingerprint
    and length yet."""

    id: WorkerId
    role: Role
    state: WorkerState
    host: str
    pid: int
    model: str
    max_batch: int
    max_queue: int
    version: int  # protocol version
    serving_address: str = ""
    fingerprint: str = ""  # equal for workers that can replace each other: model, dtype, layout
    max_model_len: int = 0
    load: WorkerLoad = WorkerLoad()
    signal_address: str = ""  # where a prefill worker's consumers connect
    events_address: str = ""  # where the worker publishes what its cache holds (wire/events.py); empty: it does not
    replay_address: str = ""  # where events that were missed are asked for
    block_size: int = 0  # tokens per KV block, for routers, which hash prompts; 0: not told
    device: str = "cpu"  # where its model runs
    kv_dtype: str = "auto"  # of its KV: "auto" is the model's
    data_parallel_rank: int = 0  # by which requests can address it, among the workers of its role
    adapters: list[Adapter] = []

    def has(self, digest: str) -> bool:
        """Whether the worker has that LoRA adapter."""
        return any(adapter.digest == digest for adapter in self.adapters)


class RouterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a router that shares its workers with others."""

    id: RouterId
    host: str
    pid: int
    version: int  # protocol version
    may_lead: bool = False  # whether it takes decisions of which a cluster needs exactly one


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages of this channel."""


class Register(Message, frozen=True, kw_only=True):
    record: WorkerRecord
    ttl_s: float


class Renew(Message, frozen=True, kw_only=True):
    worker_id: WorkerId
    state: WorkerState
    load: WorkerLoad


class Leave(Message, frozen=True, kw_only=True):
    worker_id: WorkerId


class Registered(Message, frozen=True, kw_only=True):
    version: int


class Unknown(Message, frozen=True, kw_only=True):
    worker_id: WorkerId


class RegistryRefused(Message, frozen=True, kw_only=True):
    reason: str


class Watch(Message, frozen=True, kw_only=True):
    router: RouterRecord
    silence_s: float


class Listing(Message, frozen=True, kw_only=True):
    workers: list[WorkerRecord]
    routers: list[RouterRecord]  # the oldest first
    leader: RouterId | None = None


class Seen(Message, frozen=True, kw_only=True):
    """A worker that is new, or has changed."""

    record: WorkerRecord


class Gone(Message, frozen=True, kw_only=True):
    worker_id: WorkerId
    said_so: bool  # else it did not renew its registration


ToRegistry = Register | Renew | Leave | Watch
FromRegistry = Registered | Unknown | RegistryRefused  # to workers
ToWatcher = Listing | Seen | Gone | RegistryRefused  # to routers
