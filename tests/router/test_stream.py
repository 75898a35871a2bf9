"""One request's stream: everything once, in order, with exactly one end."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from kvrelay.errors import InternalError, UnavailableError
from kvrelay.ids import new_request_id
from kvrelay.router.stream import RequestStream
from kvrelay.states import FinishReason
from kvrelay.wire.serving import SequenceOutput, TokenLogprobs


class Owner:
    """Remembers what the stream asked for."""

    def __init__(self) -> None:
        self.num_finished = 0
        self.finishes: list[tuple[int, int, FinishReason]] = []
        self.num_aborts = 0

    def stream_finished(self, stream: RequestStream) -> None:
        self.num_finished += 1

    def send_finish(self, stream: RequestStream, sample: int, keep_tokens: int, reason: FinishReason) -> None:
        self.finishes.append((sample, keep_tokens, reason))

    def send_abort(self, stream: RequestStream) -> None:
        self.num_aborts += 1


def new_stream(num_samples: int = 1) -> tuple[RequestStream, Owner]:
    owner = Owner()
    return RequestStream(new_request_id(), num_samples, owner, prefill="p", decode="d"), owner


def output(stream: RequestStream, position: int, tokens: list[int], *, sample: int = 0, last: bool = False) -> SequenceOutput:
    logprobs = [TokenLogprobs(-float(token), []) for token in tokens]
    reason = FinishReason.LENGTH if last else None
    return SequenceOutput(stream.request_id, sample, position, tokens, reason, logprobs=logprobs)


async def drain(stream: RequestStream) -> list[int]:
    tokens: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while outputs := await stream.next():
            for piece in outputs:
                assert [-entry.logprob for entry in piece.logprobs or []] == piece.tokens
                assert piece.position == len(tokens)
                tokens += piece.tokens
    return tokens


@settings(max_examples=200, deadline=None)
@given(data=st.data())
async def test_any_order_with_any_repeats_gives_each_token_once(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 12))
    stream, owner = new_stream()
    spans = [(start, end) for start in range(length) for end in range(start + 1, length + 1)]
    repeats = data.draw(st.lists(st.sampled_from(spans), max_size=20))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, length - 1)))), length] if length > 1 else [0, 1]
    whole = list(itertools.pairwise(cuts))
    for start, end in data.draw(st.permutations([*repeats, *whole])):
        stream.deliver(output(stream, start, list(range(start, end)), last=end == length))
    assert await drain(stream) == list(range(length))
    assert owner.num_finished == 1


async def test_an_error_comes_after_what_was_delivered_and_only_once() -> None:
    stream, owner = new_stream()
    stream.deliver(output(stream, 0, [4]))
    stream.fail(UnavailableError("gone"))
    stream.fail(UnavailableError("gone again"))
    stream.deliver(output(stream, 1, [5]))
    assert [piece.tokens for piece in await stream.next()] == [[4]]
    with pytest.raises(UnavailableError, match=r"^gone$"):
        await stream.next()
    assert owner.num_finished == 1


async def test_nothing_is_asked_of_a_worker_for_a_stream_that_failed() -> None:
    stream, owner = new_stream(2)
    stream.fail(UnavailableError("gone"))
    stream.finish(0, 1, FinishReason.STOP)
    stream.abort()
    assert (owner.finishes, owner.num_aborts, owner.num_finished) == ([], 0, 1)


async def test_a_finished_sample_gets_nothing_more_while_others_go_on() -> None:
    stream, owner = new_stream(2)
    stream.finish(0, 3, FinishReason.STOP)
    stream.finish(0, 3, FinishReason.STOP)
    stream.deliver(output(stream, 0, [1], sample=0))
    stream.deliver(output(stream, 0, [2], sample=1, last=True))
    assert [piece.sample for piece in await stream.next()] == [1]
    assert await stream.next() == []
    assert owner.finishes == [(0, 3, FinishReason.STOP)]
    assert owner.num_finished == 1


async def test_whoever_waits_learns_that_the_last_sample_was_finished() -> None:
    stream, _ = new_stream()
    waiting = asyncio.create_task(drain(stream))
    await asyncio.sleep(0)
    stream.finish(0, 0, FinishReason.STOP)
    assert await waiting == []


async def test_an_abort_ends_the_stream_at_once() -> None:
    stream, owner = new_stream()
    stream.deliver(output(stream, 0, [1]))
    stream.abort()
    stream.abort()
    assert await stream.next() == []
    assert (owner.num_aborts, owner.num_finished) == (1, 1)


async def test_outputs_behind_a_gap_that_never_closes_end_in_an_error() -> None:
    stream, owner = new_stream()
    for position in range(1, 3000):
        stream.deliver(output(stream, position, [position]))
    with pytest.raises(InternalError, match="lost"):
        await stream.next()
    assert owner.num_finished == 1
