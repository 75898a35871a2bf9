"""LoRA adapters of a worker of several ranks give PEFT's tokens: beside each other and the base, as they come and go."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from leaks import check_idle
from lora_adapters import adapted_model, adapter_folder
from parity import assert_parity
from test_lora_parity import FUSED, NUM_TOKENS, digests, expected, generate, make_engine, numbers_of, tokens_of
from test_parity import prompts
from tiny_models import tiny_model

from kvrelay.checkpoint.spec import read_spec
from kvrelay.engine.engine import Engine
from kvrelay.ids import new_request_id
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.runner.lora import LoraAdapters
from kvrelay.runner.ranks.adapters import HeldAdapters, cut, to_share
from kvrelay.runner.ranks.shares import RankShare
from kvrelay.sampling import BeamSearch, SamplingParams
from kvrelay.wire.ranks import LoraPass
from kvrelay.wire.serving import Submit


@contextlib.contextmanager
def ranks(model: str, adapters: list[str], tp: int = 2, **options: object) -> Iterator[Engine]:
    engine = make_engine(model, adapters, tp, **options)
    try:
        yield engine
        check_idle(engine.core)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("model", "adapter", "tp"),
    [("kv1", "all", 2), ("kv2", "patterns", 2), ("kv3", "all", 2), ("kv8", "rslora", 4)],
)
def test_ranks_with_an_adapter_give_the_tokens_of_peft(model: str, adapter: str, tp: int) -> None:
    """Also where KV heads are repeated (kv1), or cannot be split evenly (kv3)."""
    with ranks(model, [adapter], tp) as engine:
        work = [(adapter, index) for index in (0, 3, 7, 11)]
        for (_, index), outputs in zip(work, generate(engine, work), strict=True):
            assert_parity(tokens_of(outputs), *expected(model, adapter, index), f"{adapter} on {model}, prompt {index}")
        assert expected(model, adapter, 11)[0] != expected(model, "", 11)[0], "an adapter that changes nothing tests nothing"


@pytest.mark.parametrize("options", [{"token_budget": 7, "prefix_cache": False}, {"kv_blocks": 16, "swap_blocks": 32}])
def test_adapters_and_the_base_in_one_batch_of_ranks_are_as_alone(options: dict[str, object]) -> None:
    work = [(adapter, index) for index in (3, 6, 10) for adapter in ("all", "", "queries")]
    with ranks(FUSED, ["all", "queries"], **options) as engine, ranks(FUSED, ["all", "queries"]) as other:
        together = generate(engine, work)
        for (adapter, index), outputs in zip(work, together, strict=True):
            [alone] = generate(other, [(adapter, index)])
            assert numbers_of(outputs) == numbers_of(alone), f"{adapter or 'the base'}, prompt {index}"
            assert_parity(tokens_of(outputs), *expected(FUSED, adapter, index), f"{adapter}, prompt {index}")


def test_beam_search_of_ranks_gives_the_hypotheses_of_peft() -> None:
    width = 3
    prompt = torch.tensor([prompts()[5]])
    found = adapted_model("kv2", "all").generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=width, num_return_sequences=width,
        max_new_tokens=6, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with ranks("kv2", ["all"]) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=6, n=width, beam=BeamSearch(width=width))
        outputs = generate(engine, [("all", 5)], params)[0]
        by_sample = {output.sample: output.tokens for output in outputs if output.tokens}
    assert [by_sample[sample] for sample in range(width)] == [row[len(prompts()[5]) :].tolist() for row in found]


def test_adapters_come_and_go_while_ranks_compute() -> None:
    """One that is unloaded in mid-request lives to its end; its name may mean another one meanwhile."""
    with ranks("kv2", ["all"]) as engine:
        adapters = engine.core.limits.adapters
        request_id = new_request_id()
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
        engine.submit(
            Submit(request_id=request_id, external_id="x", prompt=prompts()[6], params=params, adapter=digests(engine)["all"])
        )
        outputs = [*engine.step().outputs]
        path = str(adapter_folder("kv2", "queries"))
        adapters.add("all", path, adapters.read(path))
        while engine.has_work:
            outputs += engine.step().outputs
        assert_parity(tokens_of(outputs), *expected("kv2", "all", 6), "unloaded")
        for _ in range(3):
            gc.collect()
            [again] = generate(engine, [("all", 6)])
            assert_parity(tokens_of(again), *expected("kv2", "queries", 6), "another of the same name")
            assert adapters.unload("all")
            adapters.add("all", path, adapters.read(path))


def test_a_rank_forgets_what_was_dropped() -> None:
    spec = read_spec(tiny_model("kv3"))
    whole = LoraAdapters(spec, lambda layers: TorchKernels().pack_adapter(layers), torch.device("cpu"), torch.float32)
    layers = whole.read(str(adapter_folder("kv3", "all"))).packed.layers  # type: ignore[attr-defined]
    held = HeldAdapters(TorchKernels(), torch.float32, torch.device("cpu"))
    for number in (0, 1):
        held.hold(to_share(number, cut(layers, RankShare(spec, 1, 2))))
    held.drop([0])
    assert held.batch(None) is None
    found = held.batch(LoraPass(tokens=[(0, 3, 1)], outputs=[]))
    assert found is not None
    assert found.tokens[0].adapter.num_layers == spec.num_layers
    with pytest.raises(KeyError):
        held.batch(LoraPass(tokens=[(0, 3, 0)], outputs=[]))
