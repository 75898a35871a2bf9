"""The engine with LoRA adapters gives PEFT's tokens: alone, in any company, in any chunks, in beam search, when preempted."""

from __future__ import annotations

import functools
from typing import Any, Literal

import pytest
import torch
from leaks import check_idle
from lora_adapters import ADAPTERS, adapted_model, adapter_folder
from parity import assert_parity, reference_tokens
from test_parity import prompts
from tiny_models import reference_model, tiny_model

from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.engine import Engine
from kvrelay.ids import new_request_id, new_worker_id
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.progress import Silent
from kvrelay.runner.build import build_runner
from kvrelay.runner.kv_pool import KVPool
from kvrelay.runner.loader import load_model
from kvrelay.runner.lora import LoraAdapters
from kvrelay.runner.runner import TorchRunner
from kvrelay.sampling import BeamSearch, SamplingParams
from kvrelay.transfer.region import shared_region
from kvrelay.wire.serving import Failure, SequenceOutput, Submit, of_kind

NUM_TOKENS = 10
FUSED = "mistral"  # its heads are wide enough for the native layer
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def make_engine(
    model: str,
    adapters: list[str],
    tp: int = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int | None = None,
    **options: object,
) -> Engine:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA card")
    settings = EngineOptions(**{"max_model_len": 128, "kv_blocks": 128, "check_invariants": True, **options})  # type: ignore[arg-type]
    lora = tuple(f"{name}={adapter_folder(model, name)}" for name in adapters)
    chosen = ModelOptions(model=model, dtype="float32", threads=threads or tp, lora=lora, tp=tp, device=device)
    allocate = shared_region if tp > 1 else None
    runner = build_runner(chosen, settings, tiny_model(model), read_environment(), Silent(), allocate)
    return Engine(
        options=settings,
        runner=runner,
        worker_id=new_worker_id("whole"),
        eos_token_ids=frozenset(),
        max_model_len=runner.max_model_len,
        vocab_size=runner.spec.vocab_size,
        cache_seed=runner.fingerprint,
        adapters=runner.adapters,
    )


def digests(engine: Engine) -> dict[str, str]:
    return {"": "", **{adapter.name: adapter.digest for adapter in engine.core.limits.adapters.records()}}


@functools.cache
def expected(model: str, adapter: str, index: int) -> tuple[list[int], list[bool]]:
    reference = adapted_model(model, adapter) if adapter else reference_model(model)
    return reference_tokens(reference, prompts()[index], NUM_TOKENS)


def generate(engine: Engine, work: list[tuple[str, int]], params: SamplingParams | None = None) -> list[list[SequenceOutput]]:
    """The outputs of each (adapter, prompt), all of which run together."""
    params = params or SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2)
    known = digests(engine)
    ids = [new_request_id() for _ in work]
    for request_id, (adapter, index) in zip(ids, work, strict=True):
        engine.submit(
            Submit(
                request_id=request_id,
                external_id=request_id,
                prompt=prompts()[index],
                params=params,
                adapter=known[adapter],
            )
        )
    outputs: dict[str, list[SequenceOutput]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        step = engine.step()
        assert not of_kind(Failure, step.news)
        for output in step.outputs:
            outputs[output.request_id].append(output)
    return [outputs[request_id] for request_id in ids]


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def numbers_of(outputs: list[SequenceOutput]) -> list[object]:
    """Tokens, and their logprobs to the last bit."""
    return [(output.tokens, [entry.top for entry in output.logprobs or []]) for output in outputs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("model", "adapter"), [*((FUSED, name) for name in ADAPTERS), ("llama", "all"), ("qwen3", "all"), ("qwen2", "patterns")]
)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)], ids=["some prompts", "every prompt"])
def test_an_adapter_gives_the_tokens_of_peft(model: str, adapter: str, step: int, device: Literal["cpu", "cuda"]) -> None:
    engine = make_engine(model, [adapter], device=device)
    work = [(adapter, index) for index in range(0, len(prompts()), step)]
    for (_, index), outputs in zip(work, generate(engine, work), strict=True):
        assert_parity(tokens_of(outputs), *expected(model, adapter, index), f"{adapter} on {model}, prompt {index}")
    assert expected(model, adapter, 4)[0] != expected(model, "", 4)[0], "an adapter that changes nothing tests nothing"
    check_idle(engine.core)


@pytest.mark.parametrize(
    "options", [{"threads": 2}, {"token_budget": 7, "prefix_cache": False}, {"kv_blocks": 16, "swap_blocks": 32}]
)
def test_adapters_and_the_base_in_one_batch_are_as_alone(options: dict[str, Any]) -> None:
    engine = make_engine(FUSED, ["all", "queries"], **options)
    work = [(adapter, index) for index in (3, 6, 7, 10) for adapter in ("all", "", "queries")]
    together = generate(engine, work)
    alone = make_engine(FUSED, ["all", "queries"])
    for (adapter, index), outputs in zip(work, together, strict=True):
        [solo] = generate(alone, [(adapter, index)])
        assert numbers_of(outputs) == numbers_of(solo), f"{adapter or 'the base'}, prompt {index}"
        assert_parity(tokens_of(outputs), *expected(FUSED, adapter, index), f"{adapter}, prompt {index}")
    check_idle(engine.core)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, {"token_budget": 37, "prefix_cache": False}, {"kv_blocks": 16, "swap_blocks": 32}])
def test_adapters_and_the_base_in_one_batch_on_a_card(options: dict[str, object]) -> None:
    """Steps of the base alone are replayed, others are not: first some of the base alone, then all together."""
    engine = make_engine(FUSED, ["all", "queries"], device="cuda", **options)
    mixed = [(adapter, index) for index in (3, 6, 7, 10) for adapter in ("all", "", "queries")]
    for work in ([("", 5), ("", 7)], mixed, [("queries", 4)], [("", 4)]):
        for (adapter, index), outputs in zip(work, generate(engine, work), strict=True):
            assert_parity(tokens_of(outputs), *expected(FUSED, adapter, index), f"{adapter or 'the base'}, prompt {index}")
    check_idle(engine.core)


def test_adapters_do_not_find_each_others_kv() -> None:
    engine = make_engine(FUSED, ["all", "queries"])
    for adapter in ("all", "", "queries"):
        for known in (False, True):
            [outputs] = generate(engine, [(adapter, 8)])
            assert (outputs[0].cached_tokens > 0) is known
            assert_parity(tokens_of(outputs), *expected(FUSED, adapter, 8), adapter)


def test_prompt_logprobs_are_the_adapters() -> None:
    engine = make_engine(FUSED, ["all"])
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompt = prompts()[6]
    outputs = generate(engine, [("", 5), ("all", 6), ("", 7)], params)[1]
    with torch.inference_mode():
        logits = adapted_model(FUSED, "all")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = [float(logits[place, token]) for place, token in enumerate(prompt[1:])]
    found = [entry.logprob for entry in outputs[0].prompt_logprobs or [] if entry is not None]
    assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_beam_search_gives_the_hypotheses_of_peft(device: Literal["cpu", "cuda"]) -> None:
    engine = make_engine(FUSED, ["all"], device=device)
    width = 3
    params = SamplingParams(temperature=0.0, max_tokens=6, n=width, beam=BeamSearch(width=width))
    prompt = torch.tensor([prompts()[5]])
    found = adapted_model(FUSED, "all").generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=width, num_return_sequences=width,
        max_new_tokens=6, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    outputs = generate(engine, [("all", 5)], params)[0]
    by_sample = {output.sample: output.tokens for output in outputs if output.tokens}
    assert [by_sample[sample] for sample in range(width)] == [row[len(prompts()[5]) :].tolist() for row in found]
    check_idle(engine.core)


def test_a_worker_without_the_adapter_says_so() -> None:
    engine = make_engine(FUSED, [])
    request_id = new_request_id()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.submit(Submit(request_id=request_id, external_id="x", prompt=[5], params=params, adapter="ab" * 16))
    [failure] = of_kind(Failure, engine.step().news)
    assert "does not have the LoRA adapter" in failure.message
    assert failure.kind == "unavailable_error" or failure.error().status == 503


def test_an_unloaded_adapter_lives_as_long_as_its_requests() -> None:
    engine = make_engine(FUSED, ["all"])
    digest = digests(engine)["all"]
    request_id = new_request_id()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    engine.submit(Submit(request_id=request_id, external_id="x", prompt=prompts()[6], params=params, adapter=digest))
    outputs = [*engine.step().outputs]
    adapters = engine.core.limits.adapters
    assert adapters.unload("all")
    assert not adapters.unload("all")
    assert adapters.find(digest) is None
    while engine.has_work:
        outputs += engine.step().outputs
    assert_parity(tokens_of(outputs), *expected(FUSED, "all", 6), "unloaded")
    check_idle(engine.core)


def test_adapters_beside_steps_that_are_replayed_and_run_ahead() -> None:
    """As on a card, with the code that graphs are captured from: the base alone is replayed ahead of its tokens, and a step in
    which a row has an adapter is computed as it is."""
    folder = tiny_model("llama")
    settings = EngineOptions(max_model_len=128, kv_blocks=128, max_batch=8, token_budget=64, check_invariants=True)
    spec, kernels, cpu = read_spec(folder), TorchKernels(), torch.device("cpu")
    model = load_model(folder, spec, kernels=kernels, device=cpu, dtype=torch.float32, load="auto", progress=Silent())
    adapters = LoraAdapters(spec, kernels.pack_adapter, cpu, torch.float32)
    adapters.add("all", "", adapters.read(str(adapter_folder("llama", "all"))))
    pool = KVPool(spec, num_blocks=129, block_size=settings.block_size, dtype=torch.float32, device=cpu)
    runner = TorchRunner(
        model, pool, spec, block_size=settings.block_size, max_batch=settings.max_batch, token_budget=settings.token_budget,
        max_model_len=128, fingerprint="tiny", folder=folder, adapters=adapters, graph_sizes=[1, 2, 4, 8],
    )  # fmt: skip
    assert runner.runs_ahead
    engine = Engine(
        options=settings, runner=runner, worker_id=new_worker_id("whole"), eos_token_ids=frozenset(), max_model_len=128,
        vocab_size=spec.vocab_size, cache_seed="tiny", adapters=adapters,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    for work in ([("", 5), ("", 7)], [("all", 5)], [("all", 3), ("", 6), ("all", 10), ("", 11)]):
        for (adapter, index), outputs in zip(work, generate(engine, work, params), strict=True):
            assert_parity(tokens_of(outputs), *expected("llama", adapter, index), f"{adapter or 'the base'}, prompt {index}")
    check_idle(engine.core)
    runner.close()
