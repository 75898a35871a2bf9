"""A peer in a process of its own, by an interpreter that has it installed: a script that needs nothing of kvrelay.

    PYTHON peer_process.py vllm|llama.cpp MODEL THREADS

Orders come as lines of JSON on standard input, seconds go back as lines on standard output, and what libraries print goes to
standard error. The first line says that the model is loaded.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from typing import Any, Protocol

MAX_TOKENS = 8192  # of a prompt
_CONTEXT = 256  # of a sequence that decodes
_BATCH_TOKENS = 512  # what llama.cpp computes at once


class Peer(Protocol):
    def decode(self, prompts: list[list[int]], warm: int, steps: int) -> list[float]: ...

    def prefill(self, prompt: list[int]) -> float: ...


class Vllm:
    """vLLM's engine in this process, with its own defaults: one call of `step` is one step."""

    def __init__(self, model: str, threads: int) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        self._vllm: Any = importlib.import_module("vllm")
        self._engine: Any = self._vllm.LLM(
            model=model, dtype="float32", max_model_len=MAX_TOKENS, max_num_seqs=64, max_num_batched_tokens=MAX_TOKENS
        ).llm_engine
        self._names = map(str, itertools.count())

    def decode(self, prompts: list[list[int]], warm: int, steps: int) -> list[float]:
        names = [self._add(prompt, 1024) for prompt in prompts]
        answered: set[str] = set()
        while len(answered) < len(prompts):
            answered.update(output.request_id for output in self._engine.step())
        times = [self._step(len(prompts)) for _ in range(warm + steps)]
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return times[warm:]

    def prefill(self, prompt: list[int]) -> float:
        self._add(prompt, 1)
        begun = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - begun

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        name = next(self._names)
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _step(self, expected: int) -> float:
        begun = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - begun
        if len(outputs) != expected:
            raise RuntimeError(f"a step of {expected} sequences gave {len(outputs)} tokens")
        return seconds


class LlamaCpp:
    """llama.cpp by its own functions: all sequences of a step in one call, each with KV of its own."""

    def __init__(self, model: str, threads: int) -> None:
        self._api: Any = importlib.import_module("llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(model.encode(), self._api.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._threads = threads
        self._vocabulary = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._long = self._context(1, MAX_TOKENS)
        self._decoding: dict[int, tuple[Any, list[int]]] = {}

    def decode(self, prompts: list[list[int]], warm: int, steps: int) -> list[float]:
        context, newest = self._after(prompts)
        times = []
        for step in range(warm + steps):
            lasts = zip(newest, prompts, strict=True)
            rows = [(token, len(prompt) + step, sequence, True) for sequence, (token, prompt) in enumerate(lasts)]
            begun = time.perf_counter()
            newest = self._compute(context, rows)
            times.append(time.perf_counter() - begun)
        return times[warm:]

    def prefill(self, prompt: list[int]) -> float:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._long), True)
        begun = time.perf_counter()
        self._compute_prompt(self._long, 0, prompt)
        return time.perf_counter() - begun

    def _after(self, prompts: list[list[int]]) -> tuple[Any, list[int]]:
        """A context with the KV of these prompts alone, and the token that follows each. Computed once for each number of
        prompts, since a run asks for the same ones again and again."""
        if len(prompts) not in self._decoding:
            context = self._context(len(prompts), _CONTEXT)
            newest = [self._compute_prompt(context, sequence, prompt) for sequence, prompt in enumerate(prompts)]
            self._decoding[len(prompts)] = context, newest
        context, newest = self._decoding[len(prompts)]
        memory = self._api.llama_get_memory(context)
        for sequence, prompt in enumerate(prompts):
            self._api.llama_memory_seq_rm(memory, sequence, len(prompt), -1)
        return context, newest

    def _context(self, sequences: int, tokens: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * tokens, sequences
        params.n_batch, params.n_ubatch = _BATCH_TOKENS, _BATCH_TOKENS
        params.n_threads, params.n_threads_batch = self._threads, self._threads
        return self._api.llama_init_from_model(self._model, params)

    def _compute_prompt(self, context: Any, sequence: int, prompt: list[int]) -> int:
        """The token that follows."""
        rows = [(token, place, sequence, place == len(prompt) - 1) for place, token in enumerate(prompt)]
        found: list[int] = []
        for begin in range(0, len(rows), _BATCH_TOKENS):
            found = self._compute(context, rows[begin : begin + _BATCH_TOKENS])
        return found[0]

    def _compute(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows are token, position, sequence, and whether the next token is wanted."""
        batch = self._api.llama_batch_init(len(rows), 0, 1)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.seq_id[row][0] = token, position, 1, sequence
            batch.logits[row] = wanted
        batch.n_tokens = len(rows)
        status = self._api.llama_decode(context, batch)
        self._api.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")
        return [self._best(context, row) for row, (_, _, _, wanted) in enumerate(rows) if wanted]

    def _best(self, context: Any, row: int) -> int:
        logits = self._numpy.ctypeslib.as_array(self._api.llama_get_logits_ith(context, row), shape=(self._vocabulary,))
        return int(logits.argmax())


def main(kind: str, model: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kinds: dict[str, type[Vllm] | type[LlamaCpp]] = {"vllm": Vllm, "llama.cpp": LlamaCpp}
    peer: Peer = kinds[kind](model, int(threads))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "prefill" in order:
            seconds = [peer.prefill(order["prefill"])]
        else:
            seconds = peer.decode(order["decode"], order["warm"], order["steps"])
        print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
