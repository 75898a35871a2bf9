"""The engine around a core that is not ours, with real movers between a prefill and a decode worker; the core is a fake one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
import pytest
from fake_core import BLOCK_SIZE, FakeCore
from patience import PATIENCE_S

from kvrelay.ids import RequestId, new_request_id, new_transfer_id, new_worker_id
from kvrelay.sampling import BeamSearch, SamplingParams
from kvrelay.states import FinishReason, Role
from kvrelay.transfer.engines.memory import MemoryEngine, MemoryNetwork
from kvrelay.transfer.kv.consumer import RelayConsumer
from kvrelay.transfer.kv.producer import RelayProducer
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.wire.registry import WorkerLoad
from kvrelay.wire.serving import Failure, Finish, HandedOver, Keep, LegTimes, Resumed, Submit, TransferInfo, of_kind
from kvrelay.worker.vllm.book import Book
from kvrelay.worker.vllm.engine import CoreEngine, HandOver, NoHandOver
from kvrelay.worker.vllm.receiving import Receiving
from kvrelay.worker.vllm.requests import Limits
from kvrelay.worker.vllm.sending import Sending

Mode = Literal["write", "read"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Worker:
    """An engine, and all that it has said."""

    def __init__(self, role: Role, network: MemoryNetwork | None = None, num_blocks: int = 64) -> None:
        self.id = new_worker_id(role.value)
        self.core = FakeCore(num_blocks)
        book = Book(self.core)
        hand_over: HandOver = NoHandOver()
        if network is not None:
            parts = RelayParts(
                worker_id=self.id, layout=self.core.layout, region=self.core.region,
                engines=[MemoryEngine(self.id, network)], fingerprint="fake", host="here",
            )  # fmt: skip
            if role is Role.PREFILL:
                self.producer = RelayProducer(parts)
                hand_over = self.core.hooks = Sending(self.producer, book, self.core.layout.num_layers)
            else:
                hand_over = self.core.hooks = Receiving(RelayConsumer(parts), book)
        self.engine = CoreEngine(
            book, Limits(worker_id=self.id, role=role, max_queue=64, max_batch=8, core=self.core), hand_over
        )
        self.tokens: dict[tuple[RequestId, int], dict[int, int]] = defaultdict(dict)
        self.finished: dict[tuple[RequestId, int], FinishReason] = {}
        self.failed: dict[RequestId, Failure] = {}
        self.handed_over: set[RequestId] = set()
        self.timed: list[RequestId] = []

    def step(self) -> None:
        step = self.engine.step()
        for output in step.outputs:
            key = output.request_id, output.sample
            self.tokens[key] |= {output.position + index: token for index, token in enumerate(output.tokens)}
            if output.finish is not None:
                assert key not in self.finished
                self.finished[key] = output.finish
        self.failed |= {failure.request_id: failure for failure in of_kind(Failure, step.news)}
        self.handed_over |= {news.request_id for news in of_kind(HandedOver, step.news)}
        self.timed += [news.request_id for news in of_kind(LegTimes, step.news)]

    def text(self, request_id: RequestId, sample: int = 0) -> list[int]:
        return [token for _, token in sorted(self.tokens[request_id, sample].items())]


class Pair:
    def __init__(self, mode: Mode, prefill_blocks: int = 64, decode_blocks: int = 64) -> None:
        network = MemoryNetwork()
        self.mode = mode
        self.prefill = Worker(Role.PREFILL, network, prefill_blocks)
        self.decode = Worker(Role.DECODE, network, decode_blocks)
        self.workers = [self.prefill, self.decode]

    def submit(self, prompt: list[int], params: SamplingParams = GREEDY, resume: list[Resumed] | None = None) -> Submit:
        """The decode worker's. Both get one, under the same transfer."""
        transfer = TransferInfo(
            transfer_id=new_transfer_id(), mode=self.mode, producer=self.prefill.id, consumer=self.decode.id,
            signal_address=self.prefill.producer.signal_address,
        )  # fmt: skip
        submit = submit_of(prompt, params, transfer=transfer, resume=resume or [])
        self.decode.engine.submit(submit)
        self.twin = msgspec.structs.replace(submit, request_id=new_request_id())
        self.prefill.engine.submit(self.twin)
        return submit

    def run(self, until: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, "waited in vain"
            busy = [worker for worker in self.workers if worker.engine.has_work]
            for worker in busy:
                worker.step()
            if not busy:
                time.sleep(0.001)

    def prefill_waits(self, until: Callable[[], object]) -> None:
        """The decode worker does nothing meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, "waited in vain"
            self.prefill.step()

    def close(self) -> None:
        """Nothing is left, on either side."""
        self.run(lambda: all(is_idle(worker) for worker in self.workers))
        for worker in self.workers:
            assert not worker.core.sequences
            worker.engine.drain()
            assert worker.engine.drained
            worker.engine.close()


def is_idle(worker: Worker) -> bool:
    load: WorkerLoad = worker.engine.load()
    blocks = load.blocks
    held = blocks.in_use + blocks.reserved + blocks.sending + blocks.quarantined
    return not worker.engine.has_work and not held and not load.transfers.in_flight and not load.transferring


def submit_of(prompt: list[int], params: SamplingParams = GREEDY, **fields: object) -> Submit:
    return Submit(request_id=new_request_id(), external_id="x", prompt=prompt, params=params, **fields)  # type: ignore[arg-type]


def alone(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    """What a whole worker gives."""
    worker = Worker(Role.WHOLE)
    submit = submit_of(prompt, params)
    worker.engine.submit(submit)
    while worker.engine.has_work:
        worker.step()
    assert not worker.failed
    return worker.text(submit.request_id)


@pytest.fixture(params=["write", "read"])
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pair(mode: Mode) -> Iterator[Pair]:
    pair = Pair(mode)
    yield pair
    pair.close()


@pytest.mark.parametrize("length", [1, BLOCK_SIZE, BLOCK_SIZE + 1, 31])
def test_a_pair_gives_what_a_whole_worker_gives(pair: Pair, length: int) -> None:
    prompt = list(range(1, 1 + length))
    submit = pair.submit(prompt)
    pair.run(lambda: (submit.request_id, 0) in pair.decode.finished)
    assert pair.decode.text(submit.request_id) == alone(prompt)
    assert pair.prefill.text(pair.twin.request_id) == alone(prompt)[:1]
    pair.run(lambda: pair.twin.request_id in pair.prefill.handed_over)
    assert pair.twin.request_id in pair.prefill.timed
    assert pair.decode.engine.load().prompt_tokens == 0


def test_what_the_decode_worker_has_is_not_moved_again(pair: Pair) -> None:
    prompt = list(range(1, 24))
    for expected in (6, 1):
        before = moved(pair)
        submit = pair.submit(prompt)
        pair.run(lambda submit=submit: (submit.request_id, 0) in pair.decode.finished)  # type: ignore[misc]
        assert pair.decode.text(submit.request_id) == alone(prompt)
        pair.run(lambda: is_idle(pair.prefill))
        assert moved(pair) - before == expected * pair.prefill.core.layout.all_heads_bytes


def moved(pair: Pair) -> int:
    return sum(worker.engine.load().transfers.bytes for worker in pair.workers)


def test_samples_share_one_transfer(pair: Pair) -> None:
    prompt = list(range(1, 15))
    submit = pair.submit(prompt, msgspec.structs.replace(GREEDY, n=3))
    pair.run(lambda: all((submit.request_id, sample) in pair.decode.finished for sample in range(3)))
    assert [pair.decode.text(submit.request_id, sample) for sample in range(3)] == [alone(prompt)] * 3
    assert pair.decode.engine.load().transfers.done == 1


def test_a_first_token_may_be_the_last(pair: Pair) -> None:
    prompt = list(range(1, 12))
    submit = pair.submit(prompt, msgspec.structs.replace(GREEDY, stop_token_ids=alone(prompt)[:1]))
    pair.run(lambda: pair.twin.request_id in pair.prefill.handed_over and pair.decode.finished)
    assert pair.decode.finished == {(submit.request_id, 0): FinishReason.STOP}
    assert pair.prefill.finished == {(pair.twin.request_id, 0): FinishReason.STOP}


def test_a_sample_that_another_worker_began_goes_on(pair: Pair) -> None:
    prompt = list(range(1, 12))
    tokens = alone(prompt)
    submit = pair.submit(prompt, resume=[Resumed(0, tokens[:3])])
    pair.run(lambda: (submit.request_id, 0) in pair.decode.finished)
    assert pair.decode.tokens[submit.request_id, 0] == dict(enumerate(tokens[3:], start=3))


def test_a_sample_may_end_before_the_prompt_arrives(pair: Pair) -> None:
    """The other one goes on."""
    prompt = list(range(1, 30))
    submit = pair.submit(prompt, msgspec.structs.replace(GREEDY, n=2))
    pair.run(lambda: pair.decode.engine.load().transferring)
    pair.decode.engine.finish(Finish(request_id=submit.request_id, sample=0, keep_tokens=1, reason=FinishReason.STOP))
    pair.run(lambda: (submit.request_id, 1) in pair.decode.finished)
    assert pair.decode.text(submit.request_id, 1) == alone(prompt)
    assert (submit.request_id, 0) not in pair.decode.finished


STAGES: dict[str, Callable[[Pair, Submit], object]] = {
    "at once": lambda pair, submit: True,
    "while the prompt is computed": lambda pair, submit: pair.prefill.engine.load().running,
    "while blocks are reserved": lambda pair, submit: pair.decode.engine.load().transferring,
    "when the prompt is computed": lambda pair, submit: pair.prefill.text(pair.twin.request_id),
    "while it generates": lambda pair, submit: len(pair.decode.text(submit.request_id)) > 2,
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
@pytest.mark.parametrize("stage", STAGES)
def test_aborts_leave_nothing(pair: Pair, stage: str, who: str, n: int) -> None:
    prompt = list(range(1, 40))
    submit = pair.submit(prompt, msgspec.structs.replace(GREEDY, n=n))
    pair.run(lambda: STAGES[stage](pair, submit))
    if who != "decode":
        pair.prefill.engine.abort([pair.twin.request_id])
    if who != "prefill":
        pair.decode.engine.abort([submit.request_id])
    pair.run(lambda: all(is_idle(worker) for worker in pair.workers))
    again = pair.submit(prompt)
    pair.run(lambda: (again.request_id, 0) in pair.decode.finished)
    assert pair.decode.text(again.request_id) == alone(prompt)


def test_a_prefill_worker_without_room_sets_prompts_aside(mode: Mode) -> None:
    """The decode worker takes nothing for a while; no prompt waits for ever, and all come out right."""
    pair = Pair(mode, prefill_blocks=20, decode_blocks=200)
    prompts = [[number, *range(100, 130)] for number in range(1, 6)]
    submits = [pair.submit(prompt) for prompt in prompts]
    pair.prefill_waits(lambda: len([key for key in pair.prefill.tokens if pair.prefill.text(key[0])]) == len(prompts))
    pair.run(lambda: all((submit.request_id, 0) in pair.decode.finished for submit in submits))
    assert [pair.decode.text(submit.request_id) for submit in submits] == [alone(prompt) for prompt in prompts]
    pair.close()


def test_a_prompt_that_is_computed_again_and_aborted_ends_once(mode: Mode) -> None:
    pair = Pair(mode)
    submit = pair.submit(list(range(1, 30)))
    pair.prefill_waits(lambda: pair.prefill.text(pair.twin.request_id))
    sending = pair.prefill.core.hooks
    assert isinstance(sending, Sending)
    sending.make_room()
    pair.prefill_waits(lambda: not pair.prefill.engine.load().blocks.sending)
    while pair.twin.request_id not in pair.prefill.engine.book.opens:
        pair.decode.step()
        sending.poll()
        time.sleep(0.001)
    pair.prefill.engine.abort([pair.twin.request_id])
    pair.run(lambda: submit.request_id in pair.decode.failed)
    assert pair.prefill.timed.count(pair.twin.request_id) == 1
    pair.close()


def test_a_lost_producer_ends_the_hand_over(pair: Pair) -> None:
    submit = pair.submit(list(range(1, 40)))
    pair.decode.engine.peer_lost(pair.prefill.id)
    pair.run(lambda: submit.request_id in pair.decode.failed)
    assert pair.decode.failed[submit.request_id].kind == "hand_over_error"
    pair.prefill.engine.abort([pair.twin.request_id])


@pytest.mark.parametrize(
    ("param", "changed"),
    [
        ("beam_width", {"params": msgspec.structs.replace(GREEDY, beam=BeamSearch(width=2))}),
        ("keep_kv", {"keep": Keep(["kept-x"], 5.0)}),  # type: ignore[list-item]
        ("continuation_of", {"inherit": "kept-x"}),
        ("model", {"adapter": "digest"}),
        ("logprob_token_ids", {"params": msgspec.structs.replace(GREEDY, logprobs=1, logprob_token_ids=[1])}),
        ("prompt", {"prompt": [10_000]}),
        ("prompt", {"prompt": []}),
        ("resume", {"resume": [Resumed(0, [10_000])]}),
        ("n", {"params": msgspec.structs.replace(GREEDY, n=9)}),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(param: str, changed: dict[str, object]) -> None:
    worker = Worker(Role.WHOLE)
    submit = msgspec.structs.replace(submit_of([1, 2, 3]), **changed)
    worker.engine.submit(submit)
    worker.step()
    failure = worker.failed[submit.request_id]
    assert (failure.kind, failure.param) == ("invalid_request_error", param)


def test_a_worker_that_drains_takes_nothing_new() -> None:
    worker = Worker(Role.WHOLE)
    first, second = submit_of([1, 2, 3]), submit_of([1, 2, 3])
    worker.engine.submit(first)
    worker.engine.drain()
    worker.engine.submit(second)
    while not worker.engine.drained:
        worker.step()
    assert worker.finished == {(first.request_id, 0): FinishReason.LENGTH}
    assert worker.failed[second.request_id].kind == "service_unavailable_error"
