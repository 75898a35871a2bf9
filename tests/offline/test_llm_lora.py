"""The offline API with LoRA adapters gives PEFT's tokens, in this process and with worker processes."""

from __future__ import annotations

import pytest
from lora_adapters import adapted_model, adapter_folder
from parity import assert_parity, reference_tokens
from tiny_models import reference_model, tiny_model

from kvrelay import LLM, SamplingParams
from kvrelay.errors import ConfigError, ModelError, NotFoundError

MODEL = "mistral"
PROMPT = [3 + number * 5 for number in range(30)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def check(tokens: list[int], adapter: str | None, prompt: list[int]) -> None:
    reference = reference_model(MODEL) if adapter is None else adapted_model(MODEL, adapter)
    assert_parity(tokens, *reference_tokens(reference, prompt, 8), f"adapter {adapter}")


@pytest.mark.parametrize("workers", [{}, {"prefill": 1, "decode": 1, "local_prefill_tokens": 0}])
def test_each_prompt_has_its_adapter_and_a_child_its_parents(workers: dict[str, int]) -> None:
    lora = {name: str(adapter_folder(MODEL, name)) for name in ("all", "queries")}
    options = {"kv_blocks": 64, "threads": 1, "progress": False, **workers}
    with LLM(str(tiny_model(MODEL)), lora=lora, **options) as llm:
        names = ["all", None, "queries"]
        outputs = llm.generate([PROMPT] * 3, GREEDY, lora=names, keep_kv=True)
        for name, output in zip(names, outputs, strict=True):
            check(output.outputs[0].token_ids, name, PROMPT)
            child = llm.generate_continuation(output.outputs[0], params=GREEDY, token_ids=[7, 8])
            assert child.continued is not None
            assert child.continued.source == "lease"
            check(child.outputs[0].token_ids, name, [*PROMPT, *output.outputs[0].token_ids, 7, 8])
        with pytest.raises(NotFoundError, match="there are 'all', 'queries'"):
            llm.generate(PROMPT, GREEDY, lora="other")
        with pytest.raises(ConfigError, match="2 names"):
            llm.generate([PROMPT] * 3, GREEDY, lora=["all", "all"])
        llm.load_lora("rslora", str(adapter_folder(MODEL, "rslora")))
        check(llm.generate(PROMPT, GREEDY, lora="rslora")[0].outputs[0].token_ids, "rslora", PROMPT)
        llm.unload_lora("rslora")
        with pytest.raises(NotFoundError, match="rslora"):
            llm.generate(PROMPT, GREEDY, lora="rslora")


def test_an_adapter_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        LLM(str(tiny_model(MODEL)), lora=["x=/nowhere"], kv_blocks=64, progress=False)
