"""The same workload on Hugging Face transformers: same weights, precision and threads, in the same process and run."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from kvrelay.bench.engine.work import WARM_STEPS


class TransformersSubject:
    """Decodes with a dynamic cache, as `generate` does, without the overhead of `generate` itself."""

    def __init__(self, folder: str, prompts: list[list[int]], threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train(False)
        self._prompts = prompts
        self._prefilled: Any = None

    @torch.inference_mode()
    def decode(self, batch: int, steps: int) -> list[float]:
        cache, tokens = self._start(batch)
        times = []
        for _ in range(WARM_STEPS + steps):
            start = time.perf_counter()
            logits = self._model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(-1)
            times.append(time.perf_counter() - start)
        return times[WARM_STEPS:]

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self._model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        return time.perf_counter() - start

    def close(self) -> None:
        self._model = None

    def _start(self, batch: int) -> tuple[Any, torch.Tensor]:
        """The prompts, repeated to fill the batch: how fast a step is does not depend on what the tokens are."""
        rows = torch.tensor([self._prompts[row % len(self._prompts)] for row in range(batch)])
        if self._prefilled is None:
            self._prefilled = self._model(
                input_ids=torch.tensor(self._prompts)[:, :-1], use_cache=True, logits_to_keep=1
            ).past_key_values
        cache = copy.deepcopy(self._prefilled)
        if batch < len(self._prompts):
            cache.batch_select_indices(torch.arange(batch))
        else:
            cache.batch_repeat_interleave(batch // len(self._prompts))
        return cache, rows[:, -1:]
