"""Where a request goes: one worker that does everything, or a prefill worker and a decode worker that are sent it at once.

    whole workers up                   one of them
    prefill and decode workers up      a pair; or the decode worker alone, if it has so much of the prompt in its cache that at
                                       most `local_prefill_tokens` are left (of a short prompt: if it has nothing);
                                       or the prefill worker alone, if one token is all that is wanted, and no KV kept
    only decode workers up             one of them, which computes the prompt itself
    the prompt has images              besides, for each image whose KV is not cached: the encode worker that made its
                                       embedding before, unless it is overloaded, else the least loaded one; with no encode
                                       worker up, a whole worker encodes it itself, and others cannot

The policy chooses among several; a request may name the data parallel rank of the worker that is to generate. Where no worker
has room the client is told to come back; where there is no worker, why.

A router learns late what others have sent to a worker, so two of them would send their next prompts to the same idle one.
Therefore each router has a share of the workers, among which the policy chooses. Workers of other shares are added if they are
less busy by a prompt: that much another router may just have sent them.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvrelay.errors import InvalidRequestError, QueueFullError, UnavailableError
from kvrelay.ids import RouterId, WorkerId
from kvrelay.metrics import Metrics
from kvrelay.native import hashing
from kvrelay.router.attempt import EncodeShare, Plan
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.block_table import PlainBlockTable
from kvrelay.router.peer import Peer
from kvrelay.router.policy import LOAD_WEIGHTS, Policy, PolicyName, overloaded
from kvrelay.router.prefix_index import PrefixIndex
from kvrelay.states import Role
from kvrelay.wire.registry import RouterRecord
from kvrelay.wire.serving import Image

_MOST_CANDIDATES = 32  # among which a policy chooses, besides workers that have something cached
_TELLING_SHARE = 8  # workers: if so many of a router's share are busy, those of other shares probably are, too
_FIRST_LOOK_BLOCKS = 128  # of a prompt; the rest is hashed only if a worker has all of these
_MAX_SESSIONS = 65_536
_MAX_IMAGES = 16_384  # of which it is known which worker encoded them

_GENERATING = frozenset({Role.WHOLE, Role.DECODE})
_ENCODING = frozenset({Role.ENCODE})

K = TypeVar("K")

_root_hash = functools.lru_cache(maxsize=1024)(hashing.root_hash)


class Planner:
    """Chooses among the workers that can be used. Looks at their caches if it is given an index of them. Each router has its
    own `first_turn`, or its requests would go where those of another one have just gone."""

    def __init__(
        self,
        policy: PolicyName,
        local_prefill_tokens: int,
        metrics: Metrics,
        index: PrefixIndex | None = None,
        *,
        first_turn: int = 0,
    ) -> None:
        self._policies = {role: Policy(policy, LOAD_WEIGHTS[role]) for role in Role}
        self._turns = dict.fromkeys(Role, first_turn)
        self._by_load = policy != "round_robin"
        self._place, self._num_routers = 0, 1  # of this router among all
        self._local_prefill_tokens = local_prefill_tokens
        self._cached_tokens = {role: metrics.routed_cached_tokens.labels(role.value) for role in Role}
        self._index = PrefixIndex(PlainBlockTable()) if index is None else index  # an empty one: no cache is known
        self._sessions: _Latest[tuple[str, Role]] = _Latest(_MAX_SESSIONS)  # the worker of each role that a session had last
        self._encoded_by: _Latest[str] = _Latest(_MAX_IMAGES)
        self._by_role: dict[Role, list[Peer]] = {role: [] for role in Role}
        self._by_id: dict[Role, dict[WorkerId, Peer]] = {role: {} for role in Role}
        self._shares: dict[Role, tuple[list[Peer], list[Peer]]] = {role: ([], []) for role in Role}  # this router's, others'
        self._ranks: dict[Role, set[int]] = {role: set() for role in Role}  # that workers have, or had
        self._block_sizes: dict[tuple[str, int], None] = {}  # fingerprint and block size of the workers that publish events
        if index is not None:
            hashing.prepare()

    def use(self, peers: Iterable[Peer]) -> None:
        self._by_role = {role: [] for role in Role}
        self._by_id = {role: {} for role in Role}
        self._block_sizes = {}
        for peer in peers:
            record = peer.record
            self._by_role[record.role].append(peer)
            self._by_id[record.role][peer.id] = peer
            self._ranks[record.role].add(record.data_parallel_rank)
            if record.events_address and record.block_size:
                self._block_sizes[record.fingerprint, record.block_size] = None
        self._share_out_workers()

    def share_with(self, routers: Iterable[RouterRecord], own: RouterId) -> None:
        """`routers` are all that use the same workers. Each sorts them and the workers by id, so all agree on the shares."""
        ids = sorted({own, *(router.id for router in routers)})
        place, num_routers = (ids.index(own), len(ids)) if self._by_load else (0, 1)
        if (place, num_routers) != (self._place, self._num_routers):
            self._place, self._num_routers = place, num_routers
            self._share_out_workers()

    def _share_out_workers(self) -> None:
        """Where there are fewer workers than routers, some routers have the same one."""
        for role, peers in self._by_role.items():
            if self._num_routers == 1 or not peers:
                self._shares[role] = peers, []
                continue
            ordered = sorted(peers, key=lambda peer: peer.id)
            first = self._place % len(peers)
            own = ordered[first :: self._num_routers]
            del ordered[first :: self._num_routers]
            self._shares[role] = own, ordered

    @property
    def ready(self) -> bool:
        return bool(self._by_role[Role.WHOLE] or self._by_role[Role.DECODE])

    def lacking(self, request: GenerateRequest) -> frozenset[Role]:
        """Workers of any of these roles would let the request go on; empty if it is not for want of a worker that it waits."""
        generating = self._by_role[Role.WHOLE] or self._by_role[Role.DECODE]
        if not any(not request.adapter or peer.record.has(request.adapter) for peer in generating):
            return _GENERATING
        needs_encoder = bool(request.images) and not self._by_role[Role.ENCODE] and not self._by_role[Role.WHOLE]
        return _ENCODING if needs_encoder else frozenset()

    def plan(self, request: GenerateRequest, avoid: frozenset[str] = frozenset(), *, again: bool = False) -> Plan:
        """Raises QueueFullError, InvalidRequestError for a data parallel rank that never was, or UnavailableError without a
        reason, which the caller knows better. Workers in `avoid` are chosen only if no other can be; a prefill worker
        among them is not, since the decode worker can do without. `again`: it was sent before, and goes on in another rank if
        its own is gone."""
        if not self.ready:
            raise UnavailableError("no worker can generate")
        choice = _Choice(request, self.cached_tokens(request), avoid, again)
        plan = self._plan(choice)
        for peer in plan.peers if choice.cached else ():
            if tokens := choice.cached.get(peer.id):
                self._cached_tokens[peer.record.role].inc(tokens)
        return plan

    def with_encoders(self, plan: Plan, request: GenerateRequest, avoid: frozenset[str], *, trust_caches: bool) -> Plan:
        """For a request with images, as the last step. Raises UnavailableError."""
        cached = self.cached_tokens(request).get(plan.computing.id, 0) if trust_caches else 0
        uncached = {image.digest: image for image in request.images if image.start + image.num_tokens > cached}
        missing = [image for image in uncached.values() if image.data]
        return replace(plan, encode=self._share_out(missing, plan.computing, avoid)) if missing else plan

    def _share_out(self, images: Iterable[Image], computing: Peer, avoid: frozenset[str]) -> tuple[EncodeShare, ...]:
        encoders = [peer for share in self._shares[Role.ENCODE] for peer in share if peer.has_room]
        able = [peer for peer in encoders if peer.id not in avoid and peer.breaker.passes]
        if not able and computing.record.role is Role.WHOLE:
            return ()
        able = able or encoders
        if not able:
            reason = "the queues of all encode workers are full" if self._by_role[Role.ENCODE] else "no encode worker is up"
            raise UnavailableError(f"{reason}, and the request has images", code="no_encode_worker")
        shares: dict[WorkerId, EncodeShare] = {}
        for image in images:
            peer = self._choose_encoder(image, able, shares)
            shares.setdefault(peer.id, EncodeShare(peer, [])).images.append(image)
            self._encoded_by.put(image.digest, peer.id)
        return tuple(shares.values())

    def _choose_encoder(self, image: Image, able: list[Peer], shares: Mapping[WorkerId, EncodeShare]) -> Peer:
        before = self._encoded_by.get(image.digest)
        peer = next((peer for peer in able if peer.id == before), None)
        if peer is not None and not overloaded(peer, able):
            return peer
        return min(able, key=lambda peer: peer.load_tokens + (shares[peer.id].num_tokens if peer.id in shares else 0))

    def _plan(self, choice: _Choice) -> Plan:
        if self._by_role[Role.WHOLE]:
            return Plan(self._choose(Role.WHOLE, choice))
        num_tokens = len(choice.request.prompt)
        if num_tokens <= self._local_prefill_tokens or not self._prefill_up(choice):
            return Plan(self._choose(Role.DECODE, choice))
        is_addressed = choice.request.data_parallel_rank is not None
        if choice.request.params.max_tokens == 1 and choice.request.keep is None and not is_addressed:
            return Plan(self._choose(Role.PREFILL, choice))
        decode = self._choose(Role.DECODE, choice)
        if num_tokens - choice.cached.get(decode.id, 0) <= self._local_prefill_tokens:
            return Plan(decode)
        prefill = self._choose(Role.PREFILL, choice)
        return Plan(decode, prefill, num_tokens - choice.cached.get(prefill.id, 0))

    def _prefill_up(self, choice: _Choice) -> bool:
        adapter = choice.request.adapter
        for peer in self._by_role[Role.PREFILL]:  # usually the first one is: no generator is made for it
            if peer.id not in choice.avoid and peer.breaker.passes and (not adapter or peer.record.has(adapter)):
                return True
        return False

    def cached_tokens(self, request: GenerateRequest) -> Mapping[WorkerId, int]:
        """How many tokens from the start of the prompt each worker has in its cache, if any. At least one token is left to
        compute, whatever is cached; and prompt logprobs need them all."""
        if not len(self._index) or request.params.prompt_logprobs is not None:
            return {}
        cached: dict[WorkerId, int] = {}
        for fingerprint, block_size in self._block_sizes:
            num_blocks = max(0, len(request.prompt) - 1) // block_size
            root = _root_hash(fingerprint, request.cache_salt, request.adapter)
            try:
                found = _match(self._index, request.prompt, root, block_size, num_blocks)
            except OverflowError:  # a token that no vocabulary has: the worker says so to the client
                return {}
            cached = cached | found if cached else found
        return cached

    def _choose(self, role: Role, choice: _Choice) -> Peer:
        """One whose breaker is open is as good as avoided, but better than none."""
        candidates = self._candidates(role, choice)
        is_any_rank = choice.rank_of(role) is None
        peer = self._pick(role, candidates, choice, self._by_id[role] if is_any_rank else _by_id(candidates))
        if not (peer.breaker.passes and choice.allowed([peer])):  # seldom, so only then are all of them asked
            wherever = choice.allowed(self._of_rank(role, choice)) or candidates
            candidates = [peer for peer in wherever if peer.breaker.passes] or candidates
            peer = self._pick(role, candidates, choice, _by_id(candidates))
        if choice.request.session:
            self._sessions.put((choice.request.session, role), peer.id)
        return peer

    def _candidates(self, role: Role, choice: _Choice) -> list[Peer]:
        """Those whose turn is next. Where none of them will do, all that will; if none does, those to be avoided. Raises
        UnavailableError, QueueFullError."""
        peers = self._of_rank(role, choice)
        self._turns[role] += 1
        own, others = self._shares[role] if peers is self._by_role[role] else (peers, [])
        near = [peer for peer in choice.allowed(_next_of(own, self._turns[role])) if peer.breaker.passes]
        if others:
            near += self._less_busy(others, near, role, choice)
        candidates = near or choice.allowed(peers) or choice.able(peers)
        if candidates:
            return candidates
        adapter = choice.request.adapter
        if adapter and not any(peer.record.has(adapter) for peer in self._by_role[role]):
            raise UnavailableError(f"no {role.value} worker has the LoRA adapter {adapter}", code="no_adapter")
        raise QueueFullError(f"the queues of all {role.value} workers are full")

    def _less_busy(self, others: list[Peer], near: list[Peer], role: Role, choice: _Choice) -> list[Peer]:
        """Workers of other shares that are less busy than all of `near`, which are of this router's, by about a prompt."""
        least = min([peer.load_tokens for peer in near], default=math.inf)
        enough = least - len(choice.request.prompt) * min(1.0, len(near) / _TELLING_SHARE)
        if enough <= 0:
            return []
        return [peer for peer in choice.allowed(_next_of(others, self._turns[role])) if peer.load_tokens < enough]

    def _of_rank(self, role: Role, choice: _Choice) -> list[Peer]:
        """Raises InvalidRequestError, or UnavailableError if the rank's worker is away."""
        rank, peers = choice.rank_of(role), self._by_role[role]
        if rank is None:
            return peers
        found = [peer for peer in peers if peer.record.data_parallel_rank == rank]
        if found or choice.again:
            return found or peers
        if rank in self._ranks[role]:
            raise UnavailableError(f"data parallel rank {rank}: its {role.value} worker is not up", code="no_worker")
        known = ", ".join(map(str, sorted(self._ranks[role])))
        raise InvalidRequestError(
            f"data_parallel_rank: there is no rank {rank}; {role.value} workers have {known}", param="data_parallel_rank"
        )

    def _pick(self, role: Role, candidates: list[Peer], choice: _Choice, by_id: Mapping[WorkerId, Peer]) -> Peer:
        """Of `by_id`, also one that is no candidate: which has something cached, or had the session last."""
        if choice.request.session:
            kept = self._sessions.get((choice.request.session, role))
            peer = None if kept is None else by_id.get(kept)
            if peer is not None and choice.allowed([peer]):
                if not overloaded(peer, candidates):
                    return peer
                candidates = [other for other in candidates if other is not peer] or candidates
        return self._policies[role].choose(candidates, choice.cached, by_id)


@dataclass(frozen=True, slots=True)
class _Choice:
    request: GenerateRequest
    cached: Mapping[WorkerId, int]
    avoid: frozenset[str]
    again: bool

    def rank_of(self, role: Role) -> int | None:
        """That the worker of this role has to have."""
        return None if role is Role.PREFILL else self.request.data_parallel_rank

    def able(self, peers: Iterable[Peer]) -> list[Peer]:
        adapter = self.request.adapter
        return [peer for peer in peers if peer.has_room and (not adapter or peer.record.has(adapter))]

    def allowed(self, peers: Iterable[Peer]) -> list[Peer]:
        avoid, able = self.avoid, self.able(peers)
        return [peer for peer in able if peer.id not in avoid] if avoid else able


class _Latest(OrderedDict[K, WorkerId]):
    """The worker that was used last for each key. The key that was unused for longest is forgotten first."""

    def __init__(self, max_keys: int) -> None:
        super().__init__()
        self._max_keys = max_keys

    def put(self, key: K, worker_id: WorkerId) -> None:
        self[key] = worker_id
        self.move_to_end(key)
        if len(self) > self._max_keys:
            self.popitem(last=False)


@functools.cache
def _stride(count: int) -> int:
    """By steps of so many, each of `count` has its turn before any has another; and few turns are near those just before."""
    return next(step for step in range(round(0.618 * count), count + 1) if math.gcd(step, count) == 1)


def _next_of(peers: list[Peer], turn: int) -> list[Peer]:
    start = turn * _stride(len(peers)) % len(peers)
    near = peers[start : start + _MOST_CANDIDATES]
    return near + peers[: min(start, _MOST_CANDIDATES - len(near))]


def _by_id(peers: Iterable[Peer]) -> dict[WorkerId, Peer]:
    return {peer.id: peer for peer in peers}


def _match(index: PrefixIndex, prompt: Sequence[int], root: bytes, block_size: int, num_blocks: int) -> dict[WorkerId, int]:
    end = min(num_blocks, _FIRST_LOOK_BLOCKS)
    hashes = hashing.hash_prompt(root, prompt, block_size, end)
    found = index.match(hashes, block_size)
    if end < num_blocks and end * block_size in found.values():
        hashes += hashing.hash_prompt(hashes[-hashing.HASH_BYTES :], prompt, block_size, num_blocks, end)
        found = index.match(hashes, block_size)
    return found
