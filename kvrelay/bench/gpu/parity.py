"""Whether the engine on the card computes what transformers computes, on a small random model of every family.

- In float32 every greedy token must be the reference's best, given the same tokens before it. Where the reference's own best
  logit is less than 1e-4 above, it is a tie; ties are counted.
- In bfloat16 the largest error of a logit, against the reference in float32, may be twice that of the reference in bfloat16.
"""

from __future__ import annotations

import pathlib
import random
import tempfile
from typing import Any

import torch
from rich.console import Console

from kvrelay.bench.gpu.requests import generate, greedily
from kvrelay.bench.harness.engine import build_engine
from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import EngineOptions, KVDtypeOption, ModelOptions, WeightsOption, read_environment
from kvrelay.engine.interfaces import Row, StepPlan
from kvrelay.errors import ConfigError
from kvrelay.ids import RequestId
from kvrelay.kernels.choose import choose_kernels
from kvrelay.progress import Silent
from kvrelay.runner.batch import BatchBuilder
from kvrelay.runner.kv_dtype import choose_kv_dtype
from kvrelay.runner.kv_pool import KVPool, blocks_for
from kvrelay.runner.loader import load_model
from kvrelay.sampling import SamplingParams
from kvrelay.wire.serving import Image

_TIE = 1e-4
_BLOCK_SIZE = 16
_OUTPUT_TOKENS = 48
_PROMPT_LENGTHS = (1, 5, 16, 33, 100, 257)
_SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def check_families(console: Console) -> dict[str, float]:
    mismatches = ties = 0
    error = own_error = worst = 0.0
    with tempfile.TemporaryDirectory(prefix="kvrelay-gpu-") as base:
        for family in FAMILIES:
            with console.status(f"parity with transformers: {family}"):
                folder = pathlib.Path(base) / family
                make_checkpoint(family, folder)
                wrong, tied = compare_tokens(folder)
                ours, theirs = logit_errors(folder)
                mismatches, ties = mismatches + wrong, ties + tied
                worst = max(worst, ours / theirs)
                error, own_error = max(error, ours), max(own_error, theirs)
    return {
        "parity_families": float(len(FAMILIES)),
        "parity_mismatches": float(mismatches),
        "parity_ties": float(ties),
        "bf16_logit_error": error,
        "bf16_logit_error_transformers": own_error,
        "bf16_error_over_transformers": worst,
    }


def make_checkpoint(family: str, folder: pathlib.Path) -> None:
    transformers = _transformers()
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    shape = {**_SHAPE, **({"sliding_window": None} if family == "mistral" else {})}
    if family == "qwen2":  # its heads always split the hidden size
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 1}
    torch.manual_seed(FAMILIES.index(family))
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shape)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)


def compare_tokens(folder: pathlib.Path) -> tuple[int, int]:
    """Tokens that are not the reference's, and ties among those that are: of prompts that are computed together, then of
    others alone, some of which begin with what is cached."""
    prompts = [random_prompt(length, length) for length in _PROMPT_LENGTHS]
    engine, _ = build_engine(
        ModelOptions(model=str(folder), device="cuda", dtype="float32"),
        EngineOptions(kv_blocks=512, block_size=_BLOCK_SIZE, max_batch=32, token_budget=128),
    )
    outputs = generate(engine, prompts, greedily(_OUTPUT_TOKENS))
    alone = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    alone += [random_prompt(length, 1000 + length) for length in _PROMPT_LENGTHS]
    outputs += [generate(engine, [prompt], greedily(_OUTPUT_TOKENS))[0] for prompt in alone]
    prompts += alone
    engine.close()
    reference = load_reference(folder, torch.float32)
    mismatches = ties = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output[:-1]], device="cuda")).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0]
        behind = logits.amax(dim=-1) - chosen
        mismatches += int((behind >= _TIE).sum())
        ties += int(((behind > 0) & (behind < _TIE)).sum())
    return mismatches, ties


def logit_errors(folder: pathlib.Path) -> tuple[float, float]:
    """The largest of ours and of transformers', both in bfloat16, against transformers in float32."""
    prompt = random_prompt(300, 1)
    tokens = torch.tensor([prompt], device="cuda")
    with torch.inference_mode():
        exact = load_reference(folder, torch.float32)(tokens).logits[0].double()
        rounded = load_reference(folder, torch.bfloat16)(tokens).logits[0].double()
    ours = our_logits(folder, prompt, torch.bfloat16).double()
    return float((ours - exact).abs().max()), float((rounded - exact).abs().max())


@torch.inference_mode()
def our_logits(
    folder: pathlib.Path,
    prompt: list[int],
    dtype: torch.dtype,
    weights: WeightsOption = "auto",
    kv_dtype: KVDtypeOption = "auto",
) -> torch.Tensor:
    """After each token of a prompt computed in one pass, where KV in fp8 is read as it is stored."""
    device, spec = torch.device("cuda"), read_spec(folder)
    options = ModelOptions(kv_dtype=kv_dtype, attention="auto" if kv_dtype == "auto" else "triton")
    kernels = choose_kernels(device, dtype, read_environment(), options)
    model = load_model(
        folder, spec, kernels=kernels, device=device, dtype=dtype, load="auto", progress=Silent(), weights=weights
    )
    num_blocks = blocks_for(len(prompt), _BLOCK_SIZE)
    stored = choose_kv_dtype(options, dtype)
    pool = KVPool(spec, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=stored, device=device)
    builder = BatchBuilder(
        block_size=_BLOCK_SIZE, max_tokens=len(prompt), max_rows=1, max_blocks=num_blocks, device=device, sent=True
    )
    row = Row(_Prompt(prompt, num_blocks), 0, len(prompt), 1, prompt_logprobs=True)
    batch, _ = builder.build(StepPlan(rows=[row]))
    return model.forward(batch, pool.tensor)


class _Prompt:
    """Implements `SequenceView`."""

    def __init__(self, tokens: list[int], num_blocks: int) -> None:
        self.key, self.sample, self.request_id = 0, 0, RequestId("parity")
        self.params = SamplingParams(temperature=0.0)
        self.tokens, self.num_prompt_tokens = tokens, len(tokens)
        self.block_table = list(range(num_blocks))
        self.images: tuple[Image, ...] = ()
        self.adapter = None


def random_prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, _SHAPE["vocab_size"]) for _ in range(length)]


def load_reference(folder: pathlib.Path, dtype: torch.dtype) -> Any:
    return _transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to("cuda")


def _transformers() -> Any:
    try:
        import transformers

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    except ImportError as error:
        raise ConfigError("bench gpu compares with transformers, which is not installed: pip install transformers") from error
    return transformers
