"""The real runner goes on where another worker stopped, token for token: sampler, penalties, grammar, logprobs and all."""

from __future__ import annotations

import functools
import itertools
import json

import msgspec
import pytest
from leaks import check_idle
from parity import assert_parity, reference_tokens
from test_parity import prompts
from tiny_models import reference_model, tiny_model

from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.ids import RequestId, new_request_id, new_worker_id
from kvrelay.progress import Silent
from kvrelay.runner.build import build_runner
from kvrelay.sampling import Grammar, GrammarKind, SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import Failure, Resumed, Submit, TokenLogprobs, of_kind

NUM_TOKENS = 14
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "fox"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
JSON = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA))
KINDS = {
    "penalties": SamplingParams(
        temperature=0.9, seed=4, repetition_penalty=1.4, presence_penalty=1.5, frequency_penalty=0.7, max_tokens=NUM_TOKENS
    ),
    "bias and min_tokens": SamplingParams(
        temperature=1.0, seed=6, logit_bias={2: 60.0, 7: 8.0}, min_tokens=9, top_k=40, max_tokens=NUM_TOKENS
    ),
    "filters": SamplingParams(temperature=1.3, seed=-8, top_k=50, top_p=0.9, min_p=0.01, max_tokens=NUM_TOKENS),
    "stop token": SamplingParams(
        temperature=0.0, logit_bias={9: 60.0}, stop_token_ids=[9], min_tokens=6, max_tokens=NUM_TOKENS
    ),
    "greedy grammar": SamplingParams(temperature=0.0, grammar=JSON, max_tokens=60),
    "drawn grammar": SamplingParams(temperature=1.0, seed=3, grammar=JSON, min_tokens=4, max_tokens=60),
    "samples": SamplingParams(n=3, temperature=1.0, seed=11, repetition_penalty=1.3, max_tokens=NUM_TOKENS),
    "guided samples": SamplingParams(n=3, temperature=1.0, seed=12, grammar=JSON, max_tokens=60),
}


class Run:
    """What came of one request: tokens by sample, ends and the logprobs of the tokens."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}


def make_engine(name: str, **options: object) -> Engine:
    settings = EngineOptions(**{"max_model_len": 160, "kv_blocks": 512, "check_invariants": True, **options})  # type: ignore[arg-type]
    model = ModelOptions(model=name, dtype="float32", threads=1)
    runner = build_runner(model, settings, tiny_model(name), read_environment(), Silent())
    return Engine(
        options=settings,
        runner=runner,
        worker_id=new_worker_id("whole"),
        eos_token_ids=runner.eos_token_ids,
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
    )


def run_all(engine: Engine, requests: list[Submit]) -> list[Run]:
    """All at once. Each output must continue what is known of its sample."""
    runs = {request.request_id: Run() for request in requests}
    for request in requests:
        runs[request.request_id].tokens = {one.sample: list(one.tokens) for one in request.resume}
        engine.submit(request)
    while engine.has_work:
        step = engine.step()
        assert not of_kind(Failure, step.news), of_kind(Failure, step.news)
        for output in step.outputs:
            found = runs[output.request_id]
            known = found.tokens.setdefault(output.sample, [])
            assert output.position == len(known)
            known += output.tokens
            found.logprobs.setdefault(output.sample, []).extend(output.logprobs or [])
            if output.finish is not None:
                found.ends[output.sample] = output.finish
    check_idle(engine.core)
    return list(runs.values())


def ask(prompt: list[int], params: SamplingParams, resume: list[Resumed] | None = None) -> Submit:
    request_id: RequestId = new_request_id()
    return Submit(request_id=request_id, external_id="", prompt=prompt, params=params, resume=resume or [])


@functools.cache
def undisturbed(name: str, kind: str) -> Run:
    engine = make_engine(name, prefix_cache=False)
    params = msgspec.structs.replace(KINDS[kind], logprobs=3)
    (run,) = run_all(engine, [ask(prompts()[4], params)])
    engine.close()
    return run


def cuts_of(run: Run) -> list[list[Resumed]]:
    """One sample after every token; of several, each at another one, and each in turn at its end."""
    if len(run.tokens) == 1:
        return [[Resumed(0, run.tokens[0][:length])] for length in range(len(run.tokens[0]))]
    cuts = []
    for length in range(max(map(len, run.tokens.values()))):
        places = {sample: (length + 4 * sample) % len(tokens) for sample, tokens in run.tokens.items()}
        ended = length % (len(places) + 1)  # the last number: none of them
        cuts.append([Resumed(sample, run.tokens[sample][:place]) for sample, place in places.items() if sample != ended])
    return cuts


@pytest.mark.parametrize("kind", list(KINDS))
def test_cut_after_every_token(kind: str) -> None:
    """All the cuts in one batch, so that they would notice each other."""
    name = "qwen3" if "grammar" in kind else "llama"
    whole = undisturbed(name, kind)
    assert all(len(tokens) > 4 for tokens in whole.tokens.values())
    params = msgspec.structs.replace(KINDS[kind], logprobs=3)
    for settings in ({"prefix_cache": False, "token_budget": 37}, {"kv_blocks": 20, "max_batch": 8}):
        engine = make_engine(name, **settings)
        cuts = cuts_of(whole)
        for cut, run in zip(cuts, run_all(engine, [ask(prompts()[4], params, cut) for cut in cuts]), strict=True):
            assert run.tokens == {one.sample: whole.tokens[one.sample] for one in cut}
            assert run.ends == {one.sample: whole.ends[one.sample] for one in cut}
            for one in cut:
                later = whole.logprobs[one.sample][len(one.tokens) :]
                assert [e.logprob for e in run.logprobs[one.sample]] == pytest.approx([e.logprob for e in later], abs=1e-4)
                for mine, wanted in zip(run.logprobs[one.sample], later, strict=True):
                    assert [v for _, v in mine.top] == pytest.approx([v for _, v in wanted.top], abs=1e-4)
        engine.close()


def test_the_kinds_end_as_they_should() -> None:
    """Or else the cuts would not show what they are meant to show."""
    assert undisturbed("llama", "stop token").ends == {0: FinishReason.STOP}
    assert undisturbed("llama", "bias and min_tokens").ends == {0: FinishReason.STOP}
    assert len(undisturbed("llama", "bias and min_tokens").tokens[0]) >= 9
    assert undisturbed("qwen3", "drawn grammar").ends == {0: FinishReason.STOP}
    assert undisturbed("llama", "samples").ends == dict.fromkeys(range(3), FinishReason.LENGTH)


SETTINGS = {
    "1 at a time": {"token_budget": 1},
    "7 at a time": {"token_budget": 7},
    "64 at a time": {"token_budget": 64},
    "preempted": {"kv_blocks": 32, "block_size": 5},
}
QUICK = {
    ("llama", "1 at a time"),
    ("qwen2", "7 at a time"),
    ("qwen3", "64 at a time"),
    ("llama", "preempted"),
    ("qwen3", "preempted"),
}
EVERY = itertools.product(("llama", "qwen2", "qwen3"), SETTINGS)


@functools.cache
def greedy(name: str, index: int) -> tuple[list[int], list[bool]]:
    return reference_tokens(reference_model(name), prompts()[index], NUM_TOKENS)


@pytest.mark.parametrize(
    ("name", "settings"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.long) for case in EVERY]
)
def test_greedy_equals_transformers_in_every_chunk_size_and_under_preemption(name: str, settings: str) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
    engine = make_engine(name, **SETTINGS[settings])
    cuts = [
        (index, ask(prompts()[index], params, [Resumed(0, greedy(name, index)[0][:length])]))
        for index in (0, 3, 6, 10)
        for length in (0, 1, 6, NUM_TOKENS - 1)
    ]
    for (index, _), run in zip(cuts, run_all(engine, [request for _, request in cuts]), strict=True):
        assert_parity(run.tokens[0], *greedy(name, index), f"{name}, {settings}")
    assert settings != "preempted" or engine.load().preemptions > 0
    engine.close()
