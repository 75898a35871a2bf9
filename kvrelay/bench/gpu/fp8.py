"""Weights and KV in fp8: what each costs in precision, beside bfloat16, and what it brings in time.

Errors are those of the small random models that parity is checked with, against transformers in float32. The perplexity is that
of text which the model in float32 draws itself, so its own is the lowest there can be.
"""

from __future__ import annotations

import math
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from kvrelay.bench.gpu.parity import FAMILIES, load_reference, make_checkpoint, our_logits, random_prompt
from kvrelay.bench.gpu.speed import DECODES, PREFILLS, Bench, Decode, open_bench
from kvrelay.config import KVDtypeOption, WeightsOption

_DRAWN_TOKENS = 512
_KV_DECODES = DECODES[-2:]  # whose steps read much KV
_HELD: dict[str, tuple[WeightsOption, KVDtypeOption]] = {
    "bf16": ("auto", "auto"),
    "fp8": ("fp8", "auto"),
    "kv_fp8": ("auto", "fp8"),
}


def measure_fp8(rounds: int, console: Console) -> dict[str, float]:
    """One after the other: an engine has most of the card."""
    precision = measure_precision(console)
    return {**precision, "fp8_samples": float(rounds), **measure_weights(rounds, console), **measure_kv(rounds, console)}


def measure_weights(rounds: int, console: Console) -> dict[str, float]:
    with open_bench(rounds, weights="fp8") as bench:
        results = _decodes(bench, DECODES, "fp8", console)
        for length in PREFILLS:
            with console.status(f"fp8: prefill {length}"):
                bench.seconds(1, length, 1)
                results[f"fp8_prefill_{length}_ms"] = bench.best(1, length, 1) * 1e3
    return results


def measure_kv(rounds: int, console: Console) -> dict[str, float]:
    """Decode steps with KV in fp8 beside weights in bfloat16."""
    with open_bench(rounds, kv_dtype="fp8") as bench:
        return _decodes(bench, _KV_DECODES, "kv_fp8", console)


def _decodes(bench: Bench, works: Sequence[Decode], what: str, console: Console) -> dict[str, float]:
    results: dict[str, float] = {}
    for work in works:
        with console.status(f"{what}: decode {work.batch} x {work.prompt_tokens}"):
            bench.seconds(work.batch, work.prompt_tokens, 4)  # what is slow once
            results[f"{what}_{work.name}"] = bench.decode_ms(work)
    return results


def measure_precision(console: Console) -> dict[str, float]:
    errors = dict.fromkeys(_HELD, 0.0)
    sums = dict.fromkeys(("float32", *_HELD), 0.0)
    largest = 0.0
    with tempfile.TemporaryDirectory(prefix="kvrelay-gpu-") as base:
        for family in FAMILIES:
            with console.status(f"fp8: logits of {family}"):
                folder = pathlib.Path(base) / family
                make_checkpoint(family, folder)
                reference = load_reference(folder, torch.float32)
                tokens = _drawn(reference)
                with torch.inference_mode():
                    exact = reference(torch.tensor([tokens], device="cuda")).logits[0].double()
                largest = max(largest, float(exact.abs().max()))
                sums["float32"] += _surprise(exact, tokens)
                for name, (weights, kv_dtype) in _HELD.items():
                    ours = our_logits(folder, tokens, torch.bfloat16, weights, kv_dtype).double()
                    errors[name] = max(errors[name], float((ours - exact).abs().max()))
                    sums[name] += _surprise(ours, tokens)
    found = {f"{name}_perplexity": math.exp(total / len(FAMILIES)) for name, total in sums.items()}
    found |= {f"{name}_drawn_logit_error": error for name, error in errors.items()}
    return {
        "largest_logit": largest,
        **found,
        "fp8_perplexity_over_bf16": found["fp8_perplexity"] / found["bf16_perplexity"],
        "fp8_logit_error_over_bf16": errors["fp8"] / errors["bf16"],
        "kv_fp8_perplexity_over_bf16": found["kv_fp8_perplexity"] / found["bf16_perplexity"],
        "kv_fp8_logit_error_over_bf16": errors["kv_fp8"] / errors["bf16"],
    }


def _drawn(reference: Any) -> list[int]:
    torch.manual_seed(0)
    prompt = torch.tensor([random_prompt(4, 1)], device="cuda")
    drawn = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, top_p=1.0, min_new_tokens=_DRAWN_TOKENS,
        max_new_tokens=_DRAWN_TOKENS,
    )  # fmt: skip
    tokens: list[int] = drawn[0].tolist()
    return tokens


def _surprise(logits: torch.Tensor, tokens: list[int]) -> float:
    """Nats a token."""
    following = torch.tensor(tokens[1:], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[:-1], following))
