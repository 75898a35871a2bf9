"""How long it takes to choose the workers of one request: `Planner.plan`, as the dispatcher calls it, in this process.

    32 prefill and 32 decode workers (`--workers`), each with requests in flight; a million blocks in the index (`--blocks`)
    prompts of 2048 tokens: hashed, looked up, scored; nothing is sent

A quarter of the prompts is unknown, a quarter is cached for a part, and half is cached as a whole, which takes longest.
"""

from __future__ import annotations

import gc
import os
import pathlib
import random
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
from rich.console import Console

from kvrelay.bench.harness.report import Target, percentile
from kvrelay.bench.harness.scenario import Part, Results
from kvrelay.bench.harness.workload import draw
from kvrelay.bench.router.fake_worker import FINGERPRINT, fake_record
from kvrelay.bench.router.http import RouterBench
from kvrelay.errors import BenchError
from kvrelay.ids import WorkerId, new_router_id
from kvrelay.launch.serve import COLLECTOR_THRESHOLDS
from kvrelay.metrics import Metrics
from kvrelay.native import hashing
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.outside import Outside
from kvrelay.router.peer import Listeners, Peer
from kvrelay.router.plan import Planner
from kvrelay.router.policy import PolicyName
from kvrelay.router.prefix_index import PrefixIndex
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role
from kvrelay.wire.registry import WorkerLoad
from kvrelay.wire.serving import ToWorker


def _ignore(*_: object) -> None:
    """What peers that never answer have to say."""


PROMPT_TOKENS = 2048
PROMPTS = 512
ROUNDS = 9
HOLDERS = 4  # workers of each role that hold a prompt which is cached
POLICIES: tuple[PolicyName, ...] = ("prefix_aware", "least_loaded", "round_robin")
_BLOCK_SIZE = 16
_VOCAB_SIZE = 50_000
_ADDRESS = "nowhere"
_PARAMS = SamplingParams(max_tokens=256)
_PAUSE_S = 0.001
_LISTENERS = Listeners(
    opened=_ignore,
    broken=_ignore,
    outputs=_ignore,
    told=_ignore,
    forgotten=_ignore,
    timelines=_ignore,
    adapters=_ignore,
    malformed=_ignore,
)

Prompt: TypeAlias = "array[int]"


Rounds: TypeAlias = list[list[float]]  # microseconds of each decision


def median_of_rounds(rounds: Rounds, share: int) -> float:
    """A process that takes the processor away spoils a round, not the figure."""
    return statistics.median(percentile(times, share) for times in rounds)


class _Silent:
    """A line to a worker that takes everything and says nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def send(self, message: ToWorker) -> bool:
        return True

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def measure(options: RouterBench, console: Console) -> Results:
    with console.status(f"decisions among {options.workers} workers with {options.blocks:,} blocks"):
        source = random.Random("decision")
        peers = [_peer(number, source) for number in range(options.workers)]
        prompts = [array("i", draw(source, PROMPT_TOKENS, range(_VOCAB_SIZE))) for _ in range(PROMPTS)]
        before = _resident_bytes()
        index = _fill_index(peers, prompts, source, options.blocks)
        grown = _resident_bytes() - before
        planners = {policy: _planner(policy, peers, index) for policy in POLICIES}
        return summarise(_time_all(planners, prompts)) | {"index_bytes_per_block": grown / options.blocks}


def _resident_bytes() -> int:
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peer(number: int, source: random.Random) -> Peer:
    role = Role.PREFILL if number % 2 else Role.DECODE
    record = msgspec.structs.replace(
        fake_record(role, _ADDRESS, "bench", max_model_len=8192),
        load=WorkerLoad(running=source.randrange(32)),
        events_address=_ADDRESS,
        replay_address=_ADDRESS,
        block_size=_BLOCK_SIZE,
        max_batch=64,
        max_queue=512,
    )
    outside = Outside(open_line=_Silent)
    peer = Peer(record, _LISTENERS, router_id=new_router_id(), silence_s=600.0, outside=outside)
    peer.update(record)  # as the registry's news would: now the peer has that load
    return peer


def _fill_index(peers: list[Peer], prompts: Sequence[Prompt], source: random.Random, num_blocks: int) -> PrefixIndex:
    index = PrefixIndex()
    root = hashing.root_hash(FINGERPRINT, "")
    for number, prompt in enumerate(prompts):
        hashes: list[bytes] = []
        hashing.extend_hashes(hashes, root, prompt, _BLOCK_SIZE, cached_blocks(number))
        for worker_id in _holders(peers, source) if hashes else ():
            index.add(worker_id, hashes)
    for peer, count in zip(peers, _shares(num_blocks - len(index), len(peers)), strict=True):
        index.add(peer.id, (source.randbytes(hashing.HASH_BYTES) for _ in range(count)))
    if len(index) != num_blocks:
        raise BenchError(f"the index has {len(index)} blocks, not {num_blocks}")
    return index


def cached_blocks(number: int) -> int:
    """Of the prompt with this number: none, a part, or all of them."""
    all_blocks = (PROMPT_TOKENS - 1) // _BLOCK_SIZE
    return (0, all_blocks // 2, all_blocks, all_blocks)[number % 4]


def _holders(peers: list[Peer], source: random.Random) -> Iterator[WorkerId]:
    for role in (Role.PREFILL, Role.DECODE):
        able = [peer.id for peer in peers if peer.record.role is role]
        yield from source.sample(able, min(HOLDERS, len(able)))


def _shares(total: int, workers: int) -> list[int]:
    return [total // workers + (number < total % workers) for number in range(workers)]


def _planner(policy: PolicyName, peers: list[Peer], index: PrefixIndex) -> Planner:
    """As the router makes it."""
    planner = Planner(policy, 64, Metrics(), index if policy == "prefix_aware" else None)
    planner.use(peers)
    return planner


def _time_all(planners: dict[PolicyName, Planner], prompts: Sequence[Prompt]) -> dict[PolicyName, Rounds]:
    """The policies in turns, after a round that does not count. A server, too, keeps what it has away from the collector."""
    gc.collect()
    gc.freeze()
    usual = gc.get_threshold()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    try:
        rounds = [{policy: _time(planner, prompts) for policy, planner in planners.items()} for _ in range(ROUNDS + 1)][1:]
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
    return {policy: [each[policy] for each in rounds] for policy in planners}


def _time(planner: Planner, prompts: Sequence[Prompt]) -> list[float]:
    """A router's prompt comes from the tokenizer that moment: its numbers are new, and near."""
    times = []
    for prompt in prompts:
        request = GenerateRequest(external_id="bench", prompt=prompt.tolist(), params=_PARAMS)
        began_at = time.perf_counter_ns()
        planner.plan(request)
        times.append((time.perf_counter_ns() - began_at) / 1e3)
    time.sleep(_PAUSE_S)
    return times


def summarise(times: dict[PolicyName, Rounds]) -> Results:
    return {"decision_samples": float(min(map(len, times.values())))} | {
        f"decision_us_p{share}{'' if policy == 'prefix_aware' else f'_{policy}'}": median_of_rounds(each, share)
        for policy, each in times.items()
        for share in (50, 99)
    }


PART = Part("choosing workers for a prompt", measure, {"decision_us_p99": Target("<=", 100.0)})
