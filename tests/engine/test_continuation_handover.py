"""Leases where prompts come from a prefill worker: the decode worker keeps them, and a child needs nobody else."""

from __future__ import annotations

import pytest
from leaks import check_idle
from test_handover import Pair
from test_handover import run as run_engine

from kvrelay.engine.movers import Arrival
from kvrelay.ids import RequestId, new_kept_id, new_request_id
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import Finish, Inherited, Keep, Submit
from tests.engine.kept_engine import Seen
from tests.engine.test_engine import solo

PROMPT = list(range(10))
SUFFIX = [40, 41]


def parent(pair: Pair, seen: Seen, *, arrives: bool = True, **params: object) -> tuple[RequestId, Keep]:
    keep = Keep([new_kept_id() for _ in range(int(str(params.get("n", 1))))], 60.0)
    request_id = pair.submit(PROMPT, keep=keep, **params)
    first = Seen()
    run_engine(pair.prefill, first)
    assert not first.kept  # the decode worker's word is the only one
    pair.consumer.news.started.append(request_id)
    run_engine(pair.decode, seen)
    if arrives:
        pair.move(request_id)
        run_engine(pair.decode, seen)
    return request_id, keep


def assert_continues(pair: Pair, seen: Seen, keep: Keep, text: list[int]) -> None:
    before = pair.decode.load().prompt_tokens
    params = SamplingParams(temperature=0.0, max_tokens=5)
    child = Submit(
        request_id=new_request_id(), external_id="c", prompt=text + SUFFIX, params=params, inherit=keep.kept_ids[0]
    )  # fmt: skip
    pair.decode.submit(child)
    run_engine(pair.decode, seen)
    assert seen.inherited[child.request_id] == Inherited(child.request_id, len(text) - 1)
    assert pair.decode.load().prompt_tokens - before == len(SUFFIX) + 1
    assert seen.tokens[child.request_id, 0] == solo(text + SUFFIX, max_tokens=5)[0]
    pair.decode.release_kept(keep.kept_ids)
    check_idle(pair.decode.core)
    assert pair.decode.load().blocks.pinned == 0


def test_a_parent_that_was_handed_over_is_kept_by_the_decode_worker() -> None:
    pair, seen = Pair(), Seen()
    request_id, keep = parent(pair, seen)
    assert seen.kept[request_id, 0].kept
    assert_continues(pair, seen, keep, PROMPT + seen.tokens[request_id, 0])


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.ABORT])
def test_a_parent_that_ends_while_its_kv_arrives_is_kept_when_it_is_there(reason: FinishReason) -> None:
    pair, seen = Pair(), Seen()
    request_id, keep = parent(pair, seen, arrives=False)
    pair.decode.finish(Finish(request_id=request_id, sample=0, keep_tokens=1, reason=reason))
    run_engine(pair.decode, seen)
    assert not seen.kept
    assert not pair.consumer.aborted
    pair.move(request_id)
    run_engine(pair.decode, seen)
    news = seen.kept[request_id, 0]
    assert (news.kept, news.num_tokens) == (True, len(PROMPT) + 1)
    assert_continues(pair, seen, keep, PROMPT + solo(PROMPT, max_tokens=1)[0])


def test_a_parent_whose_kv_does_not_arrive_is_not_kept() -> None:
    for aborted in (True, False):
        pair, seen = Pair(), Seen()
        request_id, _ = parent(pair, seen, arrives=False)
        if aborted:
            pair.decode.abort([request_id])
        else:
            pair.consumer.news.arrived.append(Arrival(request_id, [], "the prefill worker is gone"))
        pair.consumer.news.freed.append(request_id)
        run_engine(pair.decode, seen)
        assert not seen.kept[request_id, 0].kept
        check_idle(pair.decode.core)


def test_samples_that_end_while_their_kv_arrives_are_each_kept() -> None:
    pair, seen = Pair(), Seen()
    request_id, keep = parent(pair, seen, arrives=False, n=2, temperature=1.0, seed=4)
    for sample in range(2):
        pair.decode.finish(Finish(request_id=request_id, sample=sample, keep_tokens=1 - sample, reason=FinishReason.STOP))
    pair.move(request_id)
    run_engine(pair.decode, seen)
    assert [seen.kept[request_id, sample].num_tokens for sample in range(2)] == [len(PROMPT) + 1, len(PROMPT)]
    assert_continues(pair, seen, keep, PROMPT + seen.tokens[request_id, 0][:1])


def test_a_prefill_worker_keeps_nothing() -> None:
    pair, seen = Pair(), Seen()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    keep = Keep([new_kept_id()], 60.0)
    request = Submit(request_id=new_request_id(), external_id="x", prompt=PROMPT, params=params, keep=keep)
    pair.prefill.submit(request)
    run_engine(pair.prefill, seen)
    assert "prefill worker" in seen.kept[request.request_id, 0].reason
    assert seen.ends
    check_idle(pair.prefill.core)
