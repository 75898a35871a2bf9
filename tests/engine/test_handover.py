"""Both sides of a hand-over, driven by hand: the movers are scripted, so each rule of the schedulers shows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from leaks import check_idle
from test_engine import VOCAB, Collected, solo

from kvrelay.config import EngineOptions
from kvrelay.engine.engine import Engine
from kvrelay.engine.fence import Fence
from kvrelay.engine.movers import Arrival, ConsumerNews, ProducerNews
from kvrelay.errors import HandOverError
from kvrelay.ids import RequestId, WorkerId, new_request_id, new_transfer_id
from kvrelay.runner.fake import FakeRunner
from kvrelay.sampling import SamplingParams
from kvrelay.states import FinishReason, RequestState
from kvrelay.wire.events import Freed
from kvrelay.wire.registry import MappingCounts, TransferCounts
from kvrelay.wire.serving import Failure, FirstToken, Keep, Resumed, Submit, TransferInfo, of_kind

PREFILL = WorkerId("prefill-0123456789ab")
DECODE = WorkerId("decode-0123456789ab")
BLOCK = 4


class ScriptedProducer:
    """Records what the engine says; the test puts the news in."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.blocks: dict[RequestId, list[int]] = {}
        self.first_tokens: dict[RequestId, list[FirstToken]] = {}
        self.news = ProducerNews()

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None:
        self.calls.append(("expect", request_id, num_tokens))

    def start(self, request_id: RequestId, blocks: Sequence[int], num_computed: int, fence: Fence) -> None:
        self.calls.append(("start", request_id, num_computed))
        self.blocks[request_id] = list(blocks)

    def begin_step(self, rows: Sequence[tuple[RequestId, int]]) -> None:
        self.calls.append(("begin_step", *rows))

    def layer_done(self, layer: int, fence: Fence) -> None:
        self.calls.append(("layer_done", layer))

    def end_step(self) -> None:
        self.calls.append(("end_step",))

    def finish(self, request_id: RequestId, first_tokens: list[FirstToken]) -> None:
        self.calls.append(("finish", request_id))
        self.first_tokens[request_id] = first_tokens

    def set_aside(self, request_id: RequestId) -> None:
        self.calls.append(("set_aside", request_id))

    def abort(self, request_id: RequestId) -> None:
        self.calls.append(("abort", request_id))

    @property
    def has_news(self) -> bool:
        return bool(self.news.released or self.news.set_aside or self.news.restart)

    def poll(self) -> ProducerNews:
        news, self.news = self.news, ProducerNews()
        return news

    def counts(self) -> TransferCounts:
        return TransferCounts()

    def peer_lost(self, worker_id: WorkerId) -> None:
        raise AssertionError("nobody asked for that")

    def mapping(self) -> MappingCounts:
        return MappingCounts()

    @property
    def num_links(self) -> int:
        return 1

    def close(self) -> None:
        pass


class ScriptedConsumer:
    """Records what the engine says; the test puts the news in."""

    def __init__(self) -> None:
        self.expected: dict[RequestId, int] = {}
        self.reserved: dict[RequestId, tuple[list[int], int]] = {}
        self.aborted: list[RequestId] = []
        self.news = ConsumerNews()

    def expect(self, request_id: RequestId, transfer: TransferInfo, num_tokens: int) -> None:
        self.expected[request_id] = num_tokens

    def reserve(self, request_id: RequestId, blocks: Sequence[int], skip_tokens: int, fence: Fence) -> None:
        self.reserved[request_id] = (list(blocks), skip_tokens)

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    @property
    def has_news(self) -> bool:
        return bool(self.news.started or self.news.arrived or self.news.freed)

    def poll(self) -> ConsumerNews:
        news, self.news = self.news, ConsumerNews()
        return news

    def counts(self) -> TransferCounts:
        return TransferCounts()

    def peer_lost(self, worker_id: WorkerId) -> None:
        raise AssertionError("nobody asked for that")

    def mapping(self) -> MappingCounts:
        return MappingCounts()

    @property
    def num_links(self) -> int:
        return 1

    def close(self) -> None:
        pass


class Pair:
    """A prefill engine and a decode engine with scripted movers between them."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        max_batch: int = 8,
        token_budget: int = 16,
        max_running_prefills: int = 0,
        host_blocks: int = 0,
        kept_kv_share: float = 0.5,
        runs_ahead: bool = False,
    ) -> None:
        options = EngineOptions(
            block_size=BLOCK,
            kept_kv_share=kept_kv_share,
            max_batch=max_batch,
            token_budget=token_budget,
            check_invariants=True,
            max_running_prefills=max_running_prefills,
        )
        self.producer, self.consumer = ScriptedProducer(), ScriptedConsumer()
        self.runners = [
            FakeRunner(
                num_blocks=num_blocks,
                vocab_size=VOCAB,
                block_size=BLOCK,
                num_host_blocks=host_blocks,
                runs_ahead=runs_ahead and role == "decode",
            )
            for role in ("prefill", "decode")
        ]
        common = {"eos_token_ids": frozenset[int](), "max_model_len": 64, "vocab_size": VOCAB, "cache_seed": "fake"}
        self.prefill = Engine(
            options=options,
            runner=self.runners[0],
            worker_id=PREFILL,
            producer=self.producer,
            **common,  # type: ignore[arg-type]
        )
        self.decode = Engine(
            options=options,
            runner=self.runners[1],
            worker_id=DECODE,
            consumer=self.consumer,
            **common,  # type: ignore[arg-type]
        )

    def submit(
        self, prompt: list[int], resume: Sequence[Resumed] = (), keep: Keep | None = None, **params: object
    ) -> RequestId:
        """To both, as a router does. Both use one id here, so that the test can follow it."""
        request_id = new_request_id()
        info = TransferInfo(
            transfer_id=new_transfer_id(), mode="write", producer=PREFILL, consumer=DECODE, signal_address="tcp://nowhere:1"
        )
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **params})  # type: ignore[arg-type]
        message = Submit(
            request_id=request_id,
            external_id="x",
            prompt=prompt,
            params=sampling,
            transfer=info,
            resume=list(resume),
            keep=keep,
        )
        self.prefill.submit(message)
        self.decode.submit(message)
        return request_id

    def move(self, request_id: RequestId) -> None:
        """What a transport would do: copies the reserved tokens, and tells the decode worker."""
        here, there = (runner._store.planes for runner in self.runners)  # type: ignore[union-attr]
        blocks, skip = self.consumer.reserved[request_id]
        sent = self.producer.blocks[request_id][skip // BLOCK :]
        for block, theirs in zip(blocks, sent, strict=False):  # one more may be reserved, for the next token
            there[:, :, block] = here[:, :, theirs]
        self.consumer.news.arrived.append(Arrival(request_id, self.producer.first_tokens[request_id]))


def run(engine: Engine, seen: Collected) -> None:
    while engine.has_work:
        seen.take(engine.step())


def test_a_request_runs_through_both_and_computes_nothing_twice() -> None:
    pair, first, rest = Pair(), Collected(), Collected()
    prompt = list(range(10))
    request_id = pair.submit(prompt)
    run(pair.prefill, first)
    run(pair.decode, rest)
    expected = solo(prompt, max_tokens=6)[0]
    assert first.tokens[request_id, 0] == expected[:1]  # from prefill, before anything was moved
    assert not rest.tokens
    assert pair.prefill.load().blocks.sending == 3
    pair.consumer.news.started.append(request_id)
    run(pair.decode, rest)
    assert pair.decode.load().transferring == 1
    assert pair.decode.load().blocks.reserved == 3
    pair.move(request_id)
    run(pair.decode, rest)
    assert rest.tokens[request_id, 0] == expected  # the first one is an echo
    assert pair.decode.load().prompt_tokens == 0
    pair.producer.news.released.append(request_id)
    run(pair.prefill, first)
    for engine in (pair.prefill, pair.decode):
        check_idle(engine.core)


def test_the_producer_hears_of_blocks_cached_prefix_chunks_and_the_end_in_order() -> None:
    pair = Pair(token_budget=4)
    first = pair.submit(list(range(8)))
    run(pair.prefill, Collected())
    pair.producer.news.released.append(first)
    run(pair.prefill, Collected())
    pair.producer.calls.clear()
    second = pair.submit(list(range(14)))
    run(pair.prefill, Collected())
    layers = ["layer_done", "layer_done", "end_step"]
    assert [call[0] for call in pair.producer.calls] == [
        "expect",
        "start",
        "begin_step",
        *layers,
        "begin_step",
        *layers,
        "finish",
    ]
    calls = [call for call in pair.producer.calls if call[0] not in ("layer_done", "end_step")]
    assert calls == [
        ("expect", second, 14),
        ("start", second, 8),  # two blocks from the prefix cache can be sent at once
        ("begin_step", (second, 12)),
        ("begin_step", (second, 14)),
        ("finish", second),
    ]


def test_a_decode_worker_reserves_only_what_its_own_cache_lacks() -> None:
    pair = Pair()
    prompt = list(range(11))
    for skip in (0, 8):
        request_id = pair.submit(prompt)
        run(pair.prefill, Collected())
        pair.consumer.news.started.append(request_id)
        run(pair.decode, Collected())
        blocks, skipped = pair.consumer.reserved[request_id]
        assert (skipped, len(blocks)) == (skip, 3 - skip // BLOCK)
        pair.move(request_id)
        seen = Collected()
        run(pair.decode, seen)
        assert seen.tokens[request_id, 0] == solo(prompt, max_tokens=6)[0]


def test_running_and_arriving_sequences_together_are_never_more_than_the_batch() -> None:
    pair = Pair(max_batch=3)
    ids = [pair.submit([i, i + 1], max_tokens=30) for i in range(5)]
    run(pair.prefill, Collected())
    pair.consumer.news.started.extend(ids)
    run(pair.decode, Collected())
    assert list(pair.consumer.reserved) == ids[:3]  # transfers start whenever there is room, and not before
    pair.move(ids[0])
    pair.decode.step()
    assert pair.decode.load().running == 1
    assert list(pair.consumer.reserved) == ids[:3]
    pair.decode.abort([ids[0]])
    pair.decode.step()
    assert list(pair.consumer.reserved) == ids[:4]


def test_a_sequence_runs_only_after_its_transfer_and_others_run_meanwhile() -> None:
    pair = Pair()
    early, late = pair.submit([1, 2, 3], max_tokens=20), pair.submit([4, 5, 6], max_tokens=20)
    run(pair.prefill, Collected())
    pair.consumer.news.started.extend([early, late])
    run(pair.decode, Collected())
    pair.move(early)
    seen = Collected()
    for _ in range(5):
        seen.take(pair.decode.step())
    assert len(seen.tokens[early, 0]) == 6
    assert (late, 0) not in seen.tokens
    assert pair.decode.requests[late].sequences[0].state is RequestState.TRANSFERRING


def test_steps_go_on_running_ahead_while_a_prompt_is_awaited_reserved_and_joins() -> None:
    pair, seen = Pair(runs_ahead=True), Collected()
    early = pair.submit([1, 2, 3], max_tokens=20)
    run(pair.prefill, Collected())
    pair.consumer.news.started.append(early)
    run(pair.decode, seen)
    pair.move(early)
    seen.take(pair.decode.step())
    late = pair.submit(list(range(8, 19)), max_tokens=6)
    ahead: list[int] = []  # rows of the step that is under way after each

    def step() -> None:
        seen.take(pair.decode.step())
        plan = pair.decode._ahead.plan
        ahead.append(0 if plan is None else len(plan.rows))

    step()
    step()  # its peer has not begun
    pair.consumer.news.started.append(late)
    step()
    assert late in pair.consumer.reserved
    run(pair.prefill, Collected())
    pair.move(late)
    step()
    assert ahead == [1, 1, 1, 2]
    run(pair.decode, seen)
    assert seen.tokens[early, 0] == solo([1, 2, 3], max_tokens=20)[0]
    assert seen.tokens[late, 0] == solo(list(range(8, 19)), max_tokens=6)[0]
    check_idle(pair.decode.core)


def test_a_prefill_worker_counts_what_it_sends_as_part_of_its_batch_and_parks_when_it_cannot_go_on() -> None:
    pair = Pair(max_batch=2)
    ids = [pair.submit([i, i + 1, i + 2]) for i in range(3)]
    seen = Collected()
    run(pair.prefill, seen)
    assert set(seen.first) == set(ids[:2])  # the third waits for a place
    assert ("set_aside", ids[0]) in pair.producer.calls
    pair.producer.news.set_aside.append(ids[0])
    run(pair.prefill, seen)
    assert set(seen.first) == set(ids)
    pair.producer.news.restart.append(ids[0])  # the consumer wants the parked one after all
    pair.producer.news.released.append(ids[1])
    run(pair.prefill, seen)
    assert [call for call in pair.producer.calls if call == ("finish", ids[0])] == [("finish", ids[0])] * 2
    assert len(seen.tokens[ids[0], 0]) == 1  # its first token was told once
    pair.producer.news.released.extend([ids[0], ids[2]])
    run(pair.prefill, seen)
    check_idle(pair.prefill.core)


def test_who_was_aborted_is_not_asked_to_park_since_it_would_not_answer() -> None:
    pair = Pair(max_batch=2)
    ids = [pair.submit([i, i + 1, i + 2]) for i in range(2)]
    seen = Collected()
    run(pair.prefill, seen)
    pair.prefill.abort([ids[0]])  # its reader may hold the blocks for a whole lease
    ids.append(pair.submit([7, 8, 9]))
    run(pair.prefill, seen)
    assert [call for call in pair.producer.calls if call[0] == "set_aside"] == [("set_aside", ids[1])]
    pair.producer.news.set_aside.append(ids[1])
    run(pair.prefill, seen)
    assert ids[2] in seen.first


def test_one_prompt_at_a_time_as_in_the_note() -> None:
    pair = Pair(max_running_prefills=1, token_budget=16)
    ids = [pair.submit([i] * 5) for i in range(3)]
    order = []
    while pair.prefill.has_work:
        outputs = pair.prefill.step().outputs
        assert len(outputs) <= 1
        order += [output.request_id for output in outputs]
    assert order == ids


def test_samples_are_forked_on_the_decode_worker_after_one_prefill_and_one_transfer() -> None:
    pair = Pair()
    prompt = list(range(6))
    request_id = pair.submit(prompt, n=3, temperature=1.0, seed=9)
    first, rest = Collected(), Collected()
    run(pair.prefill, first)
    assert pair.prefill.load().prompt_tokens == 6
    pair.consumer.news.started.append(request_id)
    run(pair.decode, rest)
    pair.move(request_id)
    run(pair.decode, rest)
    expected = solo(prompt, n=3, temperature=1.0, seed=9, max_tokens=6)
    assert {sample: rest.tokens[request_id, sample] for sample in range(3)} == expected
    assert {sample: first.tokens[request_id, sample] for sample in range(3)} == {s: t[:1] for s, t in expected.items()}
    assert len(pair.consumer.reserved) == 1


@pytest.mark.parametrize("point", ["queued", "reserved"])
def test_a_failed_transfer_ends_the_request_here_and_its_blocks_wait_in_quarantine(point: str) -> None:
    pair = Pair(num_blocks=16)
    request_id, other = pair.submit(list(range(9)), n=2), pair.submit([1, 2])
    seen = Collected()
    if point == "reserved":
        pair.consumer.news.started.append(request_id)
        run(pair.decode, seen)
    pair.consumer.news.arrived.append(Arrival(request_id, [], "the peer died"))
    failures = [failure for _ in range(2) if pair.decode.has_work for failure in of_kind(Failure, pair.decode.step().news)]
    assert [(one.request_id, one.kind) for one in failures] == [(request_id, HandOverError.kind)]
    assert "the peer died" in failures[0].message
    assert not pair.decode.has_work
    assert pair.runners[1].num_known_sequences == 0
    assert list(pair.decode.requests) == [other]
    assert pair.decode.load().waiting == 1
    assert pair.decode.load().blocks.quarantined == (3 if point == "reserved" else 0)
    pair.consumer.news.freed.append(request_id)
    pair.decode.abort([other])
    run(pair.decode, seen)
    assert not seen.tokens[other, 0]
    check_idle(pair.decode.core)


@pytest.mark.parametrize("told", [[], [FirstToken(0, 5)], [FirstToken(0, 5), FirstToken(1, VOCAB)]])
def test_first_tokens_that_are_missing_or_no_tokens_are_a_failed_hand_over(told: list[FirstToken]) -> None:
    pair = Pair()
    request_id = pair.submit(list(range(9)), n=2)
    run(pair.prefill, Collected())
    pair.consumer.news.started.append(request_id)
    run(pair.decode, Collected())
    pair.producer.first_tokens[request_id] = told
    pair.move(request_id)
    seen = Collected()
    run(pair.decode, seen)
    assert "first token" in seen.failures[request_id]
    assert not seen.tokens
    check_idle(pair.decode.core)


@pytest.mark.parametrize("sample", [0, 2])
def test_one_sample_that_another_worker_began_is_handed_over_with_its_tokens(sample: int) -> None:
    params = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 9, "logprobs": 1}
    prompt = list(range(10))
    expected = solo(prompt, **params)[sample]
    for count in range(9):
        pair = Pair(token_budget=4)
        request_id = pair.submit(prompt, resume=[Resumed(sample, expected[:count])], **params)
        assert ("expect", request_id, 10 + count) in pair.producer.calls
        assert pair.consumer.expected == {request_id: 10 + count}
        first, rest = Collected(), Collected()
        for seen in (first, rest):
            seen.tokens[request_id, sample] = expected[:count]
        run(pair.prefill, first)
        assert first.tokens == {(request_id, sample): expected[: count + 1]}
        assert (first.ends == {(request_id, sample): FinishReason.LENGTH}) == (count == 8)
        pair.consumer.news.started.append(request_id)
        run(pair.decode, rest)
        assert pair.decode.load().blocks.reserved == -(-(10 + count + 1) // BLOCK)  # the next token has room
        pair.move(request_id)
        run(pair.decode, rest)
        assert rest.tokens == {(request_id, sample): expected}
        assert rest.ends == {(request_id, sample): FinishReason.LENGTH}
        assert pair.decode.load().steps == 8 - count + 1  # one for each token after the next, and one to forget the sequence
        pair.producer.news.released.append(request_id)
        run(pair.prefill, first)
        for engine in (pair.prefill, pair.decode):
            check_idle(engine.core)


def test_what_was_parked_is_computed_again_with_the_tokens_of_the_worker_before() -> None:
    pair = Pair(max_batch=1)
    prompt = list(range(6))
    expected = solo(prompt, max_tokens=6)[0]
    seen = Collected()
    first = pair.submit(prompt, resume=[Resumed(0, expected[:3])])
    seen.tokens[first, 0] = expected[:3]
    run(pair.prefill, seen)
    second = pair.submit([7, 8])
    run(pair.prefill, seen)
    pair.producer.news.set_aside.append(first)
    run(pair.prefill, seen)
    pair.producer.news.released.append(second)
    pair.producer.news.restart.append(first)
    run(pair.prefill, seen)
    assert seen.tokens[first, 0] == expected[:4]  # its next token was told once
    assert [one.token for one in pair.producer.first_tokens[first]] == expected[3:4]
    pair.producer.news.released.append(first)
    run(pair.prefill, seen)
    check_idle(pair.prefill.core)


def test_abort_at_every_point_returns_every_block_when_the_peer_is_done_with_it() -> None:
    for point in ("queued", "prefilling", "handed on", "reserved", "decoding"):
        pair = Pair(token_budget=4)
        request_id = pair.submit(list(range(10)), max_tokens=20)
        seen, rest = Collected(), Collected()
        if point != "queued":
            seen.take(pair.prefill.step())
        if point in ("handed on", "reserved", "decoding"):
            run(pair.prefill, seen)
        if point in ("reserved", "decoding"):
            pair.consumer.news.started.append(request_id)
            run(pair.decode, rest)
        if point == "decoding":
            pair.move(request_id)
            rest.take(pair.decode.step())
        for engine in (pair.prefill, pair.decode):
            engine.abort([request_id])
        run(pair.prefill, seen)
        run(pair.decode, rest)
        held = pair.prefill.load().blocks
        assert (held.sending > 0) == (point != "queued")
        assert pair.decode.load().blocks.quarantined == (3 if point == "reserved" else 0)
        assert rest.ends[request_id, 0] is FinishReason.ABORT
        assert ("abort", request_id) in pair.producer.calls
        pair.producer.news.released.append(request_id)
        pair.consumer.news.freed.append(request_id)
        run(pair.prefill, seen)
        run(pair.decode, rest)
        for engine in (pair.prefill, pair.decode):
            check_idle(engine.core)


def test_a_consumer_that_failed_ends_the_prompt_that_is_computed_for_it() -> None:
    pair = Pair(token_budget=4)
    request_id = pair.submit(list(range(10)))
    seen = Collected()
    seen.take(pair.prefill.step())
    pair.producer.news.released.append(request_id)
    pair.producer.news.failed.append((request_id, "the decode worker died"))
    run(pair.prefill, seen)
    assert "the decode worker died" in seen.failures[request_id]
    pair.producer.news.released.append(request_id)  # the abort that followed was answered
    run(pair.prefill, seen)
    check_idle(pair.prefill.core)


@pytest.mark.parametrize("host_blocks", [0, 32])
def test_who_makes_room_after_a_hand_over_goes_on_here_without_a_second_transfer(host_blocks: int) -> None:
    pair, seen = Pair(num_blocks=16, host_blocks=host_blocks), Collected()
    prompts = [[start + index for index in range(10)] for start in (0, 30)]
    ids = [pair.submit(prompt, max_tokens=30) for prompt in prompts]
    run(pair.prefill, Collected())
    pair.consumer.news.started += ids
    run(pair.decode, seen)
    for request_id in ids:
        pair.move(request_id)
    pair.consumer.reserved.clear()
    run(pair.decode, seen)
    load = pair.decode.load()
    assert load.preemptions > 0
    assert (load.host.swapped_in > 0) == (host_blocks > 0)
    assert not pair.consumer.reserved
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert seen.tokens[request_id, 0] == solo(prompt, max_tokens=30)[0]
    check_idle(pair.decode.core)


def test_the_end_of_a_hand_over_is_told_once_and_is_not_the_end_of_the_prompt() -> None:
    pair = Pair()
    recorder = pair.prefill.kv.record_events()
    done, aborted = pair.submit(list(range(9))), pair.submit(list(range(40, 49)))
    run(pair.prefill, Collected())
    assert not [event for event in recorder.take() if isinstance(event, Freed)]  # a peer still reads them
    pair.producer.news.released.append(done)
    pair.prefill.abort([aborted])
    run(pair.prefill, Collected())
    pair.producer.news.released.append(aborted)
    run(pair.prefill, Collected())
    ends = [event for event in recorder.take() if isinstance(event, Freed)]
    assert sorted((str(event.reason), len(event.hashes)) for event in ends) == [("aborted", 2), ("handed_over", 2)]


def test_work_for_another_worker_is_refused() -> None:
    pair = Pair()
    info = TransferInfo(
        transfer_id=new_transfer_id(), mode="write", producer=DECODE, consumer=PREFILL, signal_address="tcp://nowhere:1"
    )
    for engine, transfer in ((pair.prefill, info), (pair.decode, info), (pair.prefill, None)):
        request_id = new_request_id()
        engine.submit(
            Submit(request_id=request_id, external_id="", prompt=[1], params=SamplingParams(max_tokens=4), transfer=transfer)
        )
        seen = Collected()
        run(engine, seen)
        assert request_id in seen.failures
