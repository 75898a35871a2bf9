"""What keeping weights quantised is worth: the same checkpoint with `--weights auto` and `--weights float32`, in turns."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from statistics import median

import msgspec
import torch
from rich.console import Console

from kvrelay.bench.engine.own import EngineSubject, build_subject
from kvrelay.bench.engine.work import BATCHES, PREFILL_TOKENS, STEPS
from kvrelay.bench.harness.report import Target
from kvrelay.bench.harness.scenario import Results
from kvrelay.bench.harness.workload import draw
from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import ModelOptions, WeightsOption, read_environment
from kvrelay.errors import BenchError
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.models.registry import Model
from kvrelay.progress import Silent
from kvrelay.runner.loader import load_model

TARGETS = {"quantised_over_float32_b1": Target("<=", 0.45)}


def measure(model: ModelOptions, prompts: list[list[int]], rounds: int, console: Console) -> Results:
    held = {choice: held_mib(model, choice) for choice in _CHOICES}
    quantised, floats = (build_subject(msgspec.structs.replace(model, weights=choice), prompts)[1] for choice in _CHOICES)
    results: Results = {"weights_quantised_mib": held["auto"], "weights_float32_mib": held["float32"]}
    results["weights_samples"] = float(rounds)
    try:
        for batch in BATCHES:
            with console.status(f"decoding {batch} sequences with quantised weights and with floats"):
                results |= _compare(f"b{batch}", rounds, quantised, floats, _decode(batch))
        with console.status("computing prompts with quantised weights and with floats"):
            results |= _compare(f"prefill_{PREFILL_TOKENS}", rounds, quantised, floats, _prefill)
    finally:
        quantised.close()
        floats.close()
    return results


_CHOICES: tuple[WeightsOption, WeightsOption] = ("auto", "float32")
Timed = Callable[[EngineSubject, int], float]  # of a subject in one of the rounds


def _compare(name: str, rounds: int, quantised: EngineSubject, floats: EngineSubject, timed: Timed) -> Results:
    pairs = [(timed(quantised, number), timed(floats, number)) for number in range(rounds + 1)][1:]  # the first fills caches
    return {
        f"quantised_ms_{name}": median(ours for ours, _ in pairs) * 1e3,
        f"float32_ms_{name}": median(theirs for _, theirs in pairs) * 1e3,
        f"quantised_over_float32_{name}": median(ours / theirs for ours, theirs in pairs),
    }


def _decode(batch: int) -> Timed:
    return lambda subject, number: median(subject.decode(batch, STEPS[batch]))


def _prefill(subject: EngineSubject, number: int) -> float:
    return subject.prefill(draw(3_000_000 + number, PREFILL_TOKENS))


def held_mib(model: ModelOptions, weights: WeightsOption) -> float:
    """What the matrices take in memory."""
    return load_weights(model, weights)[1].weight_bytes / 2**20


def load_weights(model: ModelOptions, weights: WeightsOption) -> tuple[Model, NativeKernels]:
    folder, device = pathlib.Path(model.model), torch.device("cpu")
    kernels = choose_kernels(device, torch.float32, read_environment())
    if not isinstance(kernels, NativeKernels):
        raise BenchError("weights stay quantised in the native kernels only, which need a C compiler")
    spec, dtype = read_spec(folder), torch.float32
    loaded = load_model(
        folder, spec, kernels=kernels, device=device, dtype=dtype, load=model.load, progress=Silent(), weights=weights
    )
    return loaded, kernels
