"""Which encode workers a request's images go to, and what each worker is told of them."""

from __future__ import annotations

from typing import Any

import pytest
from router.test_failover import StubOwner
from test_plan import PROMPT, Worker, World

from kvrelay.errors import UnavailableError
from kvrelay.ids import new_request_id
from kvrelay.router.attempt import Attempt, OpenRequest, Plan
from kvrelay.router.backend import GenerateRequest
from kvrelay.router.stream import RequestStream
from kvrelay.sampling import SamplingParams
from kvrelay.states import Role
from kvrelay.wire.serving import Encode, Image, Submit


def image(digest: str, start: int, num_tokens: int = 16, data: bytes = b"file") -> Image:
    return Image(digest=digest, start=start, num_tokens=num_tokens, grid=(1, 8, 8), data=data)


def request(*images: Image) -> GenerateRequest:
    return GenerateRequest(external_id="x", prompt=PROMPT, params=SamplingParams(max_tokens=50), images=images)


def plan(world: World, asked: GenerateRequest, *, avoid: set[str] = frozenset(), trust_caches: bool = True) -> Plan:  # type: ignore[assignment]
    chosen = world.planner.plan(asked, frozenset(avoid))
    return world.planner.with_encoders(chosen, asked, frozenset(avoid), trust_caches=trust_caches)


def shares(made: Plan) -> dict[Any, list[str]]:
    return {share.peer: [image.digest for image in share.images] for share in made.encode}


def messages(made: Plan, asked: GenerateRequest) -> dict[Any, Submit | Encode]:
    """What each worker of an attempt is told."""
    entry = OpenRequest(asked, RequestStream(new_request_id(), 1, StubOwner(), prefill="", decode=""))
    return {leg.peer: message for leg, message in Attempt(entry, made, "write").messages(entry, None)}


def cluster(num_encoders: int = 2) -> tuple[World, list[Worker], Worker, Worker]:
    encoders = [Worker(Role.ENCODE) for _ in range(num_encoders)]
    prefill, decode = Worker(Role.PREFILL), Worker(Role.DECODE)
    return World("prefix_aware", *encoders, prefill, decode), encoders, prefill, decode


def test_images_are_spread_by_load_and_each_is_sent_once() -> None:
    world, (first, second), _, _ = cluster()
    first.load_tokens = 100
    made = plan(world, request(image("a", 0), image("b", 20), image("a", 40)))
    assert shares(made) == {second: ["a", "b"]}
    first.load_tokens = 0
    made = plan(world, request(image("c", 0), image("d", 20)))
    assert sorted(shares(made).values()) == [["c"], ["d"]]


def test_the_worker_that_encoded_an_image_before_gets_it_again_unless_overloaded() -> None:
    world, (first, second), _, _ = cluster()
    second.load_tokens = 1
    assert shares(plan(world, request(image("a", 0)))) == {first: ["a"]}
    first.load_tokens = 50
    assert shares(plan(world, request(image("a", 0)))) == {first: ["a"]}
    first.load_tokens = 100_000
    assert shares(plan(world, request(image("a", 0)))) == {second: ["a"]}


def test_images_whose_kv_is_cached_are_not_encoded() -> None:
    world, encoders, prefill, _ = cluster(1)
    world.cache(prefill, PROMPT[:64])
    asked = request(image("a", 0), image("b", 40), image("c", 60))
    assert shares(plan(world, asked)) == {encoders[0]: ["c"]}
    assert shares(plan(world, asked, trust_caches=False)) == {encoders[0]: ["a", "b", "c"]}
    made = plan(world, request(image("a", 0)))
    assert made.encode == ()
    assert made.encode_name == "cached"


def test_without_encode_workers_a_whole_worker_does_it_and_others_cannot() -> None:
    whole = Worker(Role.WHOLE)
    made = plan(World("least_loaded", whole), request(image("a", 0)))
    assert made.encode == ()
    assert made.encode_name == "local"
    (message,) = messages(made, request(image("a", 0))).values()
    assert isinstance(message, Submit)
    assert (message.images, message.embeddings) == ([image("a", 0)], [])
    world, _, _, _ = cluster(0)
    with pytest.raises(UnavailableError, match="no encode worker is up"):
        plan(world, request(image("a", 0)))


def test_one_that_failed_the_request_is_used_only_if_nobody_else_can() -> None:
    world, (first, second), _, _ = cluster()
    assert shares(plan(world, request(image("a", 0)), avoid={first.id})) == {second: ["a"]}
    assert len(shares(plan(world, request(image("a", 0)), avoid={first.id, second.id}))) == 1
    whole = World("least_loaded", Worker(Role.WHOLE), first)
    assert plan(whole, request(image("a", 0)), avoid={first.id}).encode == ()


def test_files_go_to_who_encodes_and_transfers_to_who_computes() -> None:
    world, encoders, prefill, decode = cluster(2)
    asked = request(image("a", 0), image("b", 20))
    made = plan(world, asked)
    told = messages(made, asked)
    assert list(told)[-2:] == [prefill, decode]
    encodes = [told[encoder] for encoder in encoders]
    assert all(isinstance(message, Encode) and message.images[0].data for message in encodes)
    to_prefill, to_decode = told[prefill], told[decode]
    assert isinstance(to_prefill, Submit)
    assert isinstance(to_decode, Submit)
    assert not any(each.data for each in (*to_prefill.images, *to_decode.images))
    assert to_decode.embeddings == []
    assert {each.digest: (each.producer, each.consumer) for each in to_prefill.embeddings} == {
        share.images[0].digest: (share.peer.id, prefill.id) for share in made.encode
    }
    assert [each for message in encodes for each in message.transfers] == to_prefill.embeddings  # type: ignore[union-attr]
