"""A request that another pair began is handed over with the tokens it had: real movers, real transports, two engines.

There is no router here: the test steps both engines itself, so it decides where the request is cut.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
from cluster import VOCAB
from leaks import check_idle
from patience import PATIENCE_S
from tiny_models import VOCAB_SIZE, tiny_model

from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.engine.interfaces import Runner
from kvrelay.errors import HandOverError, UnavailableError
from kvrelay.ids import RequestId, new_request_id, new_transfer_id, new_worker_id
from kvrelay.progress import Silent
from kvrelay.runner.build import build_runner
from kvrelay.runner.fake import FakeRunner
from kvrelay.sampling import Grammar, GrammarKind, SamplingParams
from kvrelay.states import FinishReason, Role
from kvrelay.transfer.engines.base import TransferEngine
from kvrelay.transfer.engines.choose import make_engine
from kvrelay.transfer.engines.memory import MemoryEngine, MemoryNetwork
from kvrelay.transfer.kv.consumer import RelayConsumer
from kvrelay.transfer.kv.layout import kv_layout
from kvrelay.transfer.kv.producer import RelayProducer
from kvrelay.transfer.region import Region, shared_region
from kvrelay.transfer.relay.link import TransferSettings
from kvrelay.transfer.relay.parts import RelayParts
from kvrelay.wire.kv import Layout
from kvrelay.wire.serving import Failure, Resumed, StepOutputs, Submit, TokenLogprobs, TransferInfo, of_kind

PROMPT = [7 * number % 300 + 3 for number in range(37)]
Mode = Literal["write", "read"]


class Side:
    """One engine with its mover. `whole` is neither: it serves alone, as the reference."""

    def __init__(self, role: Role, checkpoint: str, transport: Callable[[Any], TransferEngine], news: threading.Event) -> None:
        self.id = new_worker_id(role.value)
        options = EngineOptions(
            block_size=24 if role is Role.DECODE else 16,
            kv_blocks=64,
            max_model_len=160,
            token_budget=16,
            check_invariants=True,
            prefix_cache=role is not Role.WHOLE,
        )
        regions: list[Region] = []

        def allocate(size_bytes: int) -> Region:
            regions.append(shared_region(size_bytes))
            return regions[0]

        runner, layout, vocab, eos, fingerprint = _runner(checkpoint, options, allocate)
        self.producer: RelayProducer | None = None
        consumer: RelayConsumer | None = None
        if role is not Role.WHOLE:
            parts = RelayParts(
                worker_id=self.id,
                layout=kv_layout(layout),
                region=regions[0],
                engines=[transport(self.id)],
                fingerprint=fingerprint,
                host="here",
                settings=TransferSettings(),
                on_news=news.set,
            )
            self.producer = RelayProducer(parts) if role is Role.PREFILL else None
            consumer = RelayConsumer(parts) if role is Role.DECODE else None
        self.engine = Engine(
            options=options,
            runner=runner,
            worker_id=self.id,
            eos_token_ids=eos,
            max_model_len=options.max_model_len,
            vocab_size=vocab,
            cache_seed=fingerprint,
            producer=self.producer,
            consumer=consumer,
        )


def _runner(checkpoint: str, options: EngineOptions, allocate: Any) -> tuple[Runner, Layout, int, frozenset[int], str]:
    if checkpoint:
        model = ModelOptions(model=checkpoint, dtype="float32", threads=1)
        real = build_runner(model, options, tiny_model(checkpoint), read_environment(), Silent(), allocate)
        return real, real.layout, VOCAB_SIZE, real.eos_token_ids, real.fingerprint
    fake = FakeRunner(
        num_blocks=options.kv_blocks,
        vocab_size=VOCAB,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        allocate=allocate,
    )
    return fake, fake.layout, VOCAB, frozenset(), fake.fingerprint


class Pair:
    """A prefill worker, a decode worker, and one that is asked what they should say."""

    def __init__(self, transfer: str = "shm", mode: Mode = "write", checkpoint: str = "") -> None:
        self.mode: Mode = mode
        self._network = MemoryNetwork()
        self._news = threading.Event()
        self._transfer = transfer
        self.prefill, self.decode, self.whole = (
            Side(role, checkpoint, self._transport, self._news) for role in (Role.PREFILL, Role.DECODE, Role.WHOLE)
        )

    def _transport(self, worker_id: Any) -> TransferEngine:
        if self._transfer == "memory":
            return MemoryEngine(worker_id, self._network)
        return make_engine(self._transfer, worker_id)

    def alone(self, params: SamplingParams) -> Seen:
        seen = Seen()
        request_id = new_request_id()
        self.whole.engine.submit(Submit(request_id=request_id, external_id="", prompt=PROMPT, params=params))
        while self.whole.engine.has_work:
            seen.take(self.whole.engine.step())
        return seen

    def submit(self, params: SamplingParams, resume: list[Resumed]) -> tuple[RequestId, RequestId]:
        assert self.prefill.producer is not None
        info = TransferInfo(
            transfer_id=new_transfer_id(),
            mode=self.mode,
            producer=self.prefill.id,
            consumer=self.decode.id,
            signal_address=self.prefill.producer.signal_address,
        )
        first, second = new_request_id(), new_request_id()
        for side, request_id in ((self.prefill, first), (self.decode, second)):
            side.engine.submit(
                Submit(
                    request_id=request_id,
                    external_id="",
                    prompt=PROMPT,
                    params=params,
                    transfer=info,
                    resume=resume,
                    attempt=1,
                )
            )
        return first, second

    def step_until(self, done: Callable[[], bool], *seen: Seen) -> None:
        """Steps whoever has work; `seen` is what the prefill worker says and what the decode worker says."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            self._news.clear()
            busy = [(side, one) for side, one in zip((self.prefill, self.decode), seen, strict=True) if side.engine.has_work]
            for side, one in busy:
                one.take(side.engine.step())
            if not busy and not done():
                assert time.monotonic() < deadline, "waited in vain"
                self._news.wait(0.05)

    def check_idle(self) -> None:
        said, heard = Seen(), Seen()
        self.step_until(lambda: self._holds_nothing(), said, heard)
        for side in (self.prefill, self.decode):
            check_idle(side.engine.core)

    def _holds_nothing(self) -> bool:
        loads = [side.engine.load() for side in (self.prefill, self.decode)]
        return all(
            not (one.blocks.sending or one.blocks.reserved or one.blocks.quarantined or one.transfers.in_flight)
            for one in loads
        ) and not (self.prefill.engine.has_work or self.decode.engine.has_work)

    def close(self) -> None:
        for side in (self.prefill, self.decode, self.whole):
            side.engine.close()


class Seen:
    """What one worker said of one request."""

    def __init__(self, resume: list[Resumed] | None = None) -> None:
        self.tokens = {one.sample: list(one.tokens) for one in resume or []}
        self.ends: dict[int, FinishReason] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.failures: list[Failure] = []

    def take(self, step: StepOutputs) -> None:
        self.failures += of_kind(Failure, step.news)
        for output in step.outputs:
            known = self.tokens.setdefault(output.sample, [])
            assert output.position == len(known)
            known += output.tokens
            self.logprobs.setdefault(output.sample, []).extend(output.logprobs or [])
            if output.finish is not None:
                self.ends[output.sample] = output.finish


def hand_over(pair: Pair, params: SamplingParams, sample: int, length: int, wanted: Seen) -> None:
    """Cut after `length` tokens, prefilled by one worker and finished by the other."""
    resume = [Resumed(sample, wanted.tokens[sample][:length])]
    pair.submit(params, resume)
    first, rest = Seen(resume), Seen(resume)
    pair.step_until(lambda: bool(rest.ends or rest.failures or first.failures), first, rest)
    assert not first.failures + rest.failures
    assert first.tokens == {sample: wanted.tokens[sample][: length + 1]}
    assert rest.tokens == {sample: wanted.tokens[sample]}
    assert rest.ends == {sample: wanted.ends[sample]}
    later = [entry.logprob for entry in wanted.logprobs[sample][length:]]
    assert [entry.logprob for entry in rest.logprobs[sample]] == pytest.approx(later, abs=1e-4)


@pytest.mark.parametrize(
    ("transfer", "mode"), [("shm", "write"), ("shm", "read"), ("memory", "write"), ("nixl", "write"), ("nixl", "read")]
)
def test_every_cut_is_handed_over_and_nothing_is_computed_twice(transfer: str, mode: Mode) -> None:
    """Blocks are of unequal sizes, and the cuts fall on all places in them."""
    params = SamplingParams(n=2, temperature=1.0, seed=5, logprobs=0, max_tokens=15)
    pair = Pair(transfer, mode)
    wanted = pair.alone(params)
    for length in range(15):
        hand_over(pair, params, length % 2, length, wanted)
    assert pair.decode.engine.load().prompt_tokens == 0
    assert pair.decode.engine.load().transfers.done == 15
    assert pair.decode.engine.load().connections == pair.prefill.engine.load().connections == 1
    pair.check_idle()
    pair.close()


@pytest.mark.parametrize("mode", ["write", "read"])
def test_real_models_keep_penalties_seeds_and_grammars(mode: Mode) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, source=r"[0-9]{3}-[a-f]{4}x{1,3}")
    kinds = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9),
        SamplingParams(temperature=0.9, seed=4, presence_penalty=1.5, frequency_penalty=1.0, ignore_eos=True, max_tokens=9),
        SamplingParams(temperature=1.0, seed=6, grammar=grammar, max_tokens=14),
    ]
    pair = Pair("shm", mode, "llama")
    for params in kinds:
        wanted = pair.alone(params)
        for length in range(len(wanted.tokens[0])):
            hand_over(pair, params, 0, length, wanted)
    pair.check_idle()
    pair.close()


def test_a_hand_over_that_fails_is_told_as_such_and_goes_on_with_the_tokens_of_both() -> None:
    """The prefill worker has sampled a token and is then lost: the router resumes after that token."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=10, logprobs=0)
    pair = Pair("memory")
    wanted = pair.alone(params)
    resume = [Resumed(0, wanted.tokens[0][:4])]
    _, second = pair.submit(params, resume)
    first, rest = Seen(resume), Seen(resume)
    while len(first.tokens[0]) < 5:
        first.take(pair.prefill.engine.step())
    pair.decode.engine.peer_lost(pair.prefill.id)
    pair.step_until(lambda: bool(rest.failures), first, rest)
    assert [(one.request_id, one.kind) for one in rest.failures] == [(second, HandOverError.kind)]
    assert rest.tokens == {0: wanted.tokens[0][:4]}
    hand_over(pair, params, 0, 5, wanted)  # it was not dead after all
    pair.check_idle()
    pair.close()


def test_several_samples_at_different_tokens_are_not_handed_over() -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10)
    pair = Pair("memory")
    for side_seen, resume in ((Seen(), [Resumed(0, [4]), Resumed(1, [])]), (Seen(), [Resumed(0, []), Resumed(1, [])])):
        pair.submit(params, resume)
        pair.step_until(lambda seen=side_seen: len(seen.failures) == 2, side_seen, side_seen)  # type: ignore[misc]
        assert {failure.kind for failure in side_seen.failures} == {UnavailableError.kind}
    wanted = pair.alone(params)
    first, rest = Seen(), Seen()
    pair.submit(params, [Resumed(sample, []) for sample in range(3)])  # all of them, from the beginning: an ordinary request
    pair.step_until(lambda: len(rest.ends) == 3, first, rest)
    assert rest.tokens == wanted.tokens
    pair.check_idle()
    pair.close()
