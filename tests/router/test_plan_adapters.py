"""A worker that lacks a LoRA adapter gets no request for it, and what is cached for one adapter is not for another."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.errors import QueueFullError, UnavailableError
from kvrelay.native.hashing import extend_hashes, root_hash
from kvrelay.router.backend import GenerateRequest
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role
from kvrelay.wire.registry import Adapter
from tests.router.test_plan import PROMPT, Worker, World, split


def give(worker: Worker, *digests: str) -> None:
    adapters = [Adapter(name=f"name of {digest}", digest=digest, path="/x") for digest in digests]
    worker.record = msgspec.structs.replace(worker.record, adapters=adapters)


def test_only_workers_with_the_adapter_are_chosen() -> None:
    world, prefills, decodes = split("round_robin")
    give(prefills[1], "a")
    give(decodes[0], "b", "a")
    for _ in range(4):
        assert world.plan(adapter="a") == (prefills[1], decodes[0])
    assert {world.plan()[1] for _ in range(4)} == set(decodes)


def test_a_decode_worker_does_without_prefill_workers_that_lack_it() -> None:
    world, _, decodes = split("round_robin")
    give(decodes[1], "a")
    assert world.plan(adapter="a") == (None, decodes[1])


def test_an_adapter_that_no_worker_has_is_named() -> None:
    world = World("round_robin", Worker(Role.WHOLE))
    with pytest.raises(UnavailableError, match="no whole worker has the LoRA adapter a"):
        world.plan(adapter="a")


def test_a_worker_that_has_it_and_is_full_is_waited_for() -> None:
    able, other = Worker(Role.WHOLE), Worker(Role.WHOLE)
    give(able, "a")
    able.has_room = False
    with pytest.raises(QueueFullError):
        World("round_robin", able, other).plan(adapter="a")


def test_a_request_lacks_a_worker_that_has_its_adapter() -> None:
    world, prefills, decodes = split("round_robin")
    give(prefills[0], "a")
    request = GenerateRequest(external_id="x", prompt=PROMPT, params=SamplingParams(max_tokens=5), adapter="a")
    assert world.planner.lacking(request) == {Role.WHOLE, Role.DECODE}
    give(decodes[1], "a")
    assert world.planner.lacking(request) == frozenset()


def test_what_is_cached_counts_for_its_own_adapter() -> None:
    first, second = Worker(Role.WHOLE), Worker(Role.WHOLE)
    world = World("prefix_aware", first, second)
    for worker in (first, second):
        give(worker, "a", "b")
    for worker, adapter in ((first, "a"), (second, "b")):
        hashes: list[bytes] = []
        extend_hashes(hashes, root_hash("model", "", adapter), PROMPT, 16, len(PROMPT) // 16)
        world.index.add(worker.id, hashes)
    for _ in range(2):
        assert world.plan(adapter="a")[1] is first
        assert world.plan(adapter="b")[1] is second
