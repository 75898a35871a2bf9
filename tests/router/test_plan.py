"""Where a request goes: which workers, with or without a prefill worker, by what is cached, and by session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from registry_records import make_record

from kvrelay.discovery.base import router_record
from kvrelay.errors import InvalidRequestError, QueueFullError, UnavailableError
from kvrelay.ids import WorkerId, new_router_id, new_worker_id, number_of
from kvrelay.metrics import Metrics
from kvrelay.native.hashing import extend_hashes, root_hash
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.plan import Planner
from kvrelay.router.policy import PolicyName
from kvrelay.router.prefix_index import PrefixIndex
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role
from kvrelay.wire.registry import WorkerRecord

PROMPT = list(range(1000, 1200))  # 200 tokens: 12 full blocks of 16 before the last token


@dataclass
class Breaker:
    passes: bool = True


class Worker:
    """As much of a peer as a planner looks at."""

    def __init__(self, role: Role, block_size: int = 16, rank: int = 0) -> None:
        self.id: WorkerId = new_worker_id(role.value)
        self.record: WorkerRecord = make_record(
            id=self.id,
            role=role,
            block_size=block_size,
            events_address="tcp://127.0.0.1:1",
            fingerprint="model",
            data_parallel_rank=rank,
        )
        self.has_room = True
        self.load_tokens = 0
        self.breaker = Breaker()


class World:
    def __init__(self, policy: PolicyName, *workers: Worker, local_prefill_tokens: int = 64, first_turn: int = 0) -> None:
        self.index = PrefixIndex()
        self.metrics = Metrics()
        index = self.index if policy == "prefix_aware" else None
        self.planner = Planner(policy, local_prefill_tokens, self.metrics, index, first_turn=first_turn)
        self.planner.use(workers)  # type: ignore[arg-type]

    def cache(self, worker: Worker, tokens: list[int], salt: str = "") -> None:
        hashes: list[bytes] = []
        size = worker.record.block_size
        extend_hashes(hashes, root_hash("model", salt), tokens, size, len(tokens) // size)
        self.index.add(worker.id, hashes)

    def plan(
        self, prompt: list[int] = PROMPT, *, avoid: frozenset[str] | set[str] = frozenset(), again: bool = False, **fields: Any
    ) -> tuple[Any, Any]:
        params = fields.pop("params", SamplingParams(max_tokens=50))
        request = GenerateRequest(external_id="x", prompt=prompt, params=params, **fields)
        plan = self.planner.plan(request, frozenset(avoid), again=again)
        return plan.prefill, plan.decode


def split(policy: PolicyName = "prefix_aware", **options: Any) -> tuple[World, list[Worker], list[Worker]]:
    prefills = [Worker(Role.PREFILL) for _ in range(2)]
    decodes = [Worker(Role.DECODE) for _ in range(2)]
    return World(policy, *prefills, *decodes, **options), prefills, decodes


# Conditional disaggregation


@pytest.mark.parametrize(
    ("num_cached", "num_tokens", "local"),
    [
        (0, 64, True),  # a short prompt
        (0, 65, False),
        (128, 192, True),  # 64 tokens are left
        (128, 193, False),
        (192, 200, True),
        (192, 192, True),  # all of it: the last block is computed again for its logits
    ],
)
def test_a_decode_worker_computes_what_little_it_lacks(num_cached: int, num_tokens: int, local: bool) -> None:
    world, _, decodes = split()
    prompt = PROMPT[:num_tokens]
    world.cache(decodes[1], prompt[:num_cached])
    for _ in range(3):
        prefill, decode = world.plan(prompt)
        assert (prefill is None) == local
        assert num_cached == 0 or decode is decodes[1]


def test_without_an_index_only_the_length_counts() -> None:
    world, _, decodes = split("least_loaded")
    world.cache(decodes[0], PROMPT)
    assert world.plan()[0] is not None
    assert world.plan(PROMPT[:64])[0] is None


def test_without_a_prefill_worker_the_decode_worker_does_it() -> None:
    world, prefills, decodes = split()
    world.planner.use(decodes)  # type: ignore[arg-type]
    assert world.plan()[0] is None
    world.planner.use([*prefills, *decodes])  # type: ignore[list-item]
    for prefill in prefills:
        prefill.breaker.passes = False
    assert world.plan()[0] is None
    prefills[1].breaker.passes = True
    assert all(world.plan()[0] is prefills[1] for _ in range(3))


def test_one_token_is_the_prefill_workers_alone() -> None:
    world, prefills, _ = split()
    prefill, decode = world.plan(params=SamplingParams(max_tokens=1))
    assert prefill is None
    assert decode in prefills


# By cache


def test_both_choices_follow_the_cache() -> None:
    world, prefills, decodes = split(local_prefill_tokens=0)
    world.cache(prefills[1], PROMPT[:96])
    world.cache(decodes[0], PROMPT[:32])
    assert all(world.plan() == (prefills[1], decodes[0]) for _ in range(4))
    counted = {
        sample.labels["role"]: sample.value
        for metric in world.metrics.routed_cached_tokens.collect()
        for sample in metric.samples
    }
    assert counted["prefill"] == 4 * 96
    assert counted["decode"] == 4 * 32


def test_a_busy_worker_is_passed_over_though_it_has_the_cache() -> None:
    world, prefills, _ = split()
    world.cache(prefills[1], PROMPT)
    prefills[1].load_tokens = 5000
    assert world.plan()[0] is prefills[0]


def test_another_salt_shares_nothing() -> None:
    world, _, decodes = split()
    world.cache(decodes[1], PROMPT, salt="tenant")
    assert world.plan(cache_salt="tenant") == (None, decodes[1])
    assert world.plan()[0] is not None


def test_prompt_logprobs_need_every_token_computed() -> None:
    world, _, decodes = split()
    world.cache(decodes[1], PROMPT)
    assert world.plan(params=SamplingParams(max_tokens=5, prompt_logprobs=0))[0] is not None


def test_workers_of_different_block_sizes_are_each_looked_up_in_their_own() -> None:
    prefill, decode, other = Worker(Role.PREFILL, 16), Worker(Role.DECODE, 32), Worker(Role.DECODE, 32)
    world = World("prefix_aware", prefill, other, decode)
    world.cache(prefill, PROMPT)
    world.cache(decode, PROMPT[:128])
    assert world.planner.cached_tokens(GenerateRequest(external_id="", prompt=PROMPT, params=SamplingParams())) == {
        prefill.id: 192,
        decode.id: 128,
    }


def test_long_prompts_are_looked_up_to_their_end() -> None:
    worker, other = Worker(Role.WHOLE), Worker(Role.WHOLE)
    world = World("prefix_aware", worker, other)
    prompt = [number % 977 for number in range(10_000)]
    world.cache(worker, prompt)
    world.cache(other, prompt[:4096])
    request = GenerateRequest(external_id="", prompt=prompt, params=SamplingParams())
    assert world.planner.cached_tokens(request) == {worker.id: 9_984, other.id: 4096}


@pytest.mark.parametrize("prompt", [[], [1], list(range(15)), list(range(16))])
def test_prompts_of_less_than_a_block_are_cached_nowhere(prompt: list[int]) -> None:
    world, _, decodes = split()
    world.cache(decodes[0], PROMPT)
    assert world.plan(prompt)[0] is None


def test_a_token_that_cannot_be_is_left_to_the_worker_to_refuse() -> None:
    world, _, decodes = split()
    world.cache(decodes[0], PROMPT)
    assert world.plan([*PROMPT[:100], 2**40, *PROMPT])[1] in decodes


# Turns


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_aware"])
def test_equal_workers_take_turns_and_routers_begin_elsewhere(policy: PolicyName) -> None:
    workers = [Worker(Role.WHOLE) for _ in range(100)]
    worlds = [World(policy, *workers, first_turn=first_turn) for first_turn in (0, 60)]
    chosen = [[world.plan()[1] for _ in workers] for world in worlds]
    assert all(set(each) == set(workers) for each in chosen)
    assert all(one is not other for one, other in zip(*chosen, strict=True))


def test_among_very_many_the_least_loaded_of_those_whose_turn_is_next_is_taken() -> None:
    """And a worker with room, wherever it stands; and one that has the prompt."""
    workers = [Worker(Role.WHOLE) for _ in range(100)]
    world = World("prefix_aware", *workers)
    for number, worker in enumerate(workers):
        worker.load_tokens = 100 * (number % 10)
    assert {world.plan()[1].load_tokens for _ in range(200)} == {0}
    world.cache(workers[77], PROMPT)
    workers[77].load_tokens = 100
    assert all(world.plan()[1] is workers[77] for _ in range(5))
    for worker in workers:
        worker.breaker.passes = worker is workers[60]
    assert all(world.plan()[1] is workers[60] for _ in range(100))
    for worker in workers:
        worker.has_room = worker is workers[50]
    assert all(world.plan()[1] is workers[50] for _ in range(100))


# Several routers


def several(num_routers: int, *workers: Worker, policy: PolicyName = "least_loaded") -> list[World]:
    """A world for each router, none of which knows what the others send."""
    routers = [router_record(new_router_id()) for _ in range(num_routers)]
    worlds = [World(policy, *workers, first_turn=number_of(router.id)) for router in routers]
    for world, router in zip(worlds, routers, strict=True):
        world.planner.share_with(routers, router.id)
    return worlds


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware"])
@pytest.mark.parametrize("num_workers", [4, 10, 200])
def test_routers_send_what_comes_at_once_to_different_workers(policy: PolicyName, num_workers: int) -> None:
    """Whatever turn each is at; and each of them uses all of its share."""
    worlds = several(4, *(Worker(Role.WHOLE) for _ in range(num_workers)), policy=policy)
    chosen = [{world.plan()[1] for _ in range(num_workers)} for world in worlds]
    assert sum(map(len, chosen)) == len(set().union(*chosen)) == num_workers


def test_a_router_goes_beyond_its_share_where_that_is_less_busy_by_a_prompt() -> None:
    workers = [Worker(Role.WHOLE) for _ in range(40)]
    world = several(4, *workers)[0]
    share = {world.plan()[1] for _ in workers}
    for worker in share:
        worker.load_tokens = len(PROMPT)
    assert {world.plan()[1] for _ in workers} == share
    for worker in share:
        worker.load_tokens += 1
    assert share.isdisjoint(world.plan()[1] for _ in workers)
    assert {world.plan(PROMPT * 2)[1] for _ in workers} == share
    for worker in share:
        worker.load_tokens, worker.has_room = 0, False
    assert share.isdisjoint(world.plan()[1] for _ in workers)


def test_the_smaller_its_share_the_sooner_a_router_goes_beyond_it() -> None:
    own, other = [Worker(Role.WHOLE) for _ in range(2)]
    world = several(2, own, other)[0]
    own, other = (own, other) if world.plan()[1] is own else (other, own)
    own.load_tokens = len(PROMPT) // 10
    assert all(world.plan()[1] is own for _ in range(3))
    own.load_tokens = len(PROMPT) // 5
    assert all(world.plan()[1] is other for _ in range(3))


def test_a_router_follows_caches_sessions_and_ranks_beyond_its_share() -> None:
    workers = [Worker(Role.WHOLE, rank=rank) for rank in range(4)]
    world = several(2, *workers, policy="prefix_aware")[0]
    share = {world.plan()[1] for _ in workers}
    far, other = (worker for worker in workers if worker not in share)
    assert world.plan(session="chat", avoid={worker.id for worker in workers if worker is not other})[1] is other
    assert world.plan(session="chat")[1] is other
    assert world.plan(data_parallel_rank=far.record.data_parallel_rank)[1] is far
    world.cache(far, PROMPT)
    assert all(world.plan()[1] is far for _ in range(3))


@pytest.mark.parametrize("num_routers", [1, 2, 3, 5, 9])
def test_with_fewer_workers_than_routers_each_router_has_one_of_them(num_routers: int) -> None:
    workers = [Worker(Role.WHOLE) for _ in range(2)]
    first = [world.plan()[1] for world in several(num_routers, *workers)]
    assert abs(first.count(workers[0]) - first.count(workers[1])) <= 1
    assert all(not world.planner.ready for world in several(num_routers))


def test_shares_follow_workers_and_routers_that_come_and_go() -> None:
    workers = [Worker(Role.WHOLE) for _ in range(12)]
    routers = [router_record(new_router_id()) for _ in range(3)]
    world = World("least_loaded", *workers)
    own = routers[0].id

    def share() -> set[Worker]:
        return {world.plan()[1] for _ in workers}

    assert share() == set(workers)
    world.planner.share_with(routers[1:], own)  # the registry does not know of it yet
    before = share()
    assert len(before) == 4
    world.planner.share_with(routers, own)
    assert share() == before
    left = [worker for worker in workers if worker not in before]
    world.planner.use(left)  # type: ignore[arg-type]
    assert 2 <= len(share()) <= 3
    world.planner.share_with(routers[:1], own)
    assert share() == set(left)


def test_in_turn_means_all_workers_however_many_routers_there_are() -> None:
    workers = [Worker(Role.WHOLE) for _ in range(6)]
    for world in several(3, *workers, policy="round_robin"):
        assert {world.plan()[1] for _ in workers} == set(workers)


# Who is able


def test_full_workers_are_not_chosen() -> None:
    world, prefills, decodes = split()
    decodes[0].has_room = prefills[0].has_room = False
    assert all(world.plan() == (prefills[1], decodes[1]) for _ in range(3))
    prefills[1].has_room = False
    with pytest.raises(QueueFullError, match="prefill"):
        world.plan()
    decodes[1].has_room = False
    with pytest.raises(QueueFullError, match="decode"):
        world.plan()
    with pytest.raises(UnavailableError):
        World("prefix_aware", *prefills).plan()


def test_avoided_workers_are_chosen_only_if_nobody_else_can_be() -> None:
    world, prefills, decodes = split()
    world.cache(decodes[0], PROMPT[:32])
    avoid: set[str] = {decodes[0].id, prefills[1].id}
    assert all(world.plan(avoid=avoid) == (prefills[0], decodes[1]) for _ in range(3))
    assert world.plan(avoid={*avoid, prefills[0].id}) == (None, decodes[1])
    prefill, decode = world.plan(avoid={decodes[0].id, decodes[1].id})
    assert prefill in prefills
    assert decode is decodes[0]  # its cache still counts
    whole = Worker(Role.WHOLE)
    assert World("prefix_aware", whole).plan(avoid={whole.id}) == (None, whole)


def test_a_worker_whose_breaker_is_open_is_passed_over_if_there_is_another() -> None:
    world, _, decodes = split()
    world.cache(decodes[0], PROMPT[:32])
    decodes[0].breaker.passes = False
    assert all(world.plan()[1] is decodes[1] for _ in range(4))
    decodes[1].breaker.passes = False
    assert world.plan()[1] is decodes[0]


# Sessions


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_aware"])
def test_a_session_stays_with_its_workers(policy: PolicyName) -> None:
    world, prefills, decodes = split(policy)
    first = world.plan(session="chat 1")
    for _ in range(5):
        assert world.plan(session="chat 1") == first
        world.plan(session="chat 2")
        world.plan()
    prefill, decode = first
    decode.load_tokens = 50_000
    moved = world.plan(session="chat 1")
    assert moved[1] is not decode
    decode.load_tokens = 0
    assert world.plan(session="chat 1") == moved  # there it is at home now
    assert world.plan(session="chat 1", avoid={moved[1].id})[1] is decode
    world.planner.use([peer for peer in [*prefills, *decodes] if peer is not prefill])  # type: ignore[misc]
    assert world.plan(session="chat 1")[0] is not prefill


def test_sessions_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.router.plan._MAX_SESSIONS", 8)
    world, _, _ = split()
    for number in range(100):
        world.plan(session=f"chat {number}")
    assert len(world.planner._sessions) == 8


# Data parallel ranks


@pytest.mark.parametrize("role", [Role.DECODE, Role.WHOLE])
def test_a_rank_is_the_worker_that_generates_whatever_is_cached_or_short_or_loaded(role: Role) -> None:
    workers = [Worker(role, rank=rank) for rank in range(3)]
    prefills = [Worker(Role.PREFILL, rank=rank) for rank in range(2)] if role is Role.DECODE else []
    world = World("prefix_aware", *prefills, *workers)
    world.cache(workers[0], PROMPT)
    workers[2].load_tokens = 100_000
    for rank, worker in enumerate(workers):
        for prompt, params in ((PROMPT, SamplingParams(max_tokens=1)), (PROMPT[:9], SamplingParams(max_tokens=9))):
            assert world.plan(prompt, data_parallel_rank=rank, params=params)[1] is worker


def test_an_unknown_rank_is_the_clients_mistake_and_one_that_is_away_is_not() -> None:
    workers = [Worker(Role.WHOLE, rank=rank) for rank in range(2)]
    world = World("least_loaded", *workers)
    with pytest.raises(InvalidRequestError, match="there is no rank 2; whole workers have 0, 1"):
        world.plan(data_parallel_rank=2)
    world.planner.use(workers[:1])  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="rank 1: its whole worker is not up"):
        world.plan(data_parallel_rank=1)
    assert world.plan(data_parallel_rank=1, again=True)[1] is workers[0]


def test_a_rank_that_is_full_is_waited_for() -> None:
    workers = [Worker(Role.WHOLE, rank=rank) for rank in range(2)]
    world = World("least_loaded", *workers)
    workers[1].has_room = False
    with pytest.raises(QueueFullError):
        world.plan(data_parallel_rank=1)
