"""vLLM's EngineCore as a `Core`: in this process, driven by the worker's thread. What vLLM raises becomes ours here."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, assert_never

import numpy as np
import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinish
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import KVConnectorOutput

from kvrelay.engine.fence import PASSED
from kvrelay.errors import ConfigError, InvalidRequestError
from kvrelay.log import Log
from kvrelay.sampling import Grammar, GrammarKind, SamplingParams
from kvrelay.states import FinishReason
from kvrelay.wire.serving import TokenLogprobs
from kvrelay.worker.vllm.events import CacheListener
from kvrelay.worker.vllm.forced import FORCED
from kvrelay.worker.vllm.memory import Shared
from kvrelay.worker.vllm.seam import CoreCounts, CoreOutput, CoreRequest

log = Log("engine")

VERSION = str(vllm.__version__)
_REASONS = {
    VllmFinish.STOP: FinishReason.STOP,
    VllmFinish.LENGTH: FinishReason.LENGTH,
    VllmFinish.ABORT: FinishReason.ABORT,
    VllmFinish.ERROR: FinishReason.ERROR,
    VllmFinish.REPETITION: FinishReason.STOP,
}


def open_core(
    arguments: Mapping[str, Any], threads: int, shared: Shared, on_rank_death: Callable[[str], None] | None
) -> VllmCore:
    """`arguments` are fields of vLLM's EngineArgs. Raises ConfigError."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if threads:
        torch.set_num_threads(threads)
    unknown = set(arguments) - set(EngineArgs.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"--engine-args: vLLM {VERSION} has no option {min(unknown)}")
    try:
        config = EngineArgs(**arguments).create_engine_config()
        executor = UniProcExecutor if config.parallel_config.world_size == 1 else Executor.get_class(config)
        if config.model_config.enforce_eager:
            torch._dynamo.config.disable = True  # vLLM compiles parts of its sampler all the same
        core = VllmCore(EngineCore(config, executor, log_stats=False), config, shared)
        if config.parallel_config.world_size > 1 and on_rank_death is not None:
            core.watch_ranks(on_rank_death)
        _warm_up(core)
    except (ValueError, TypeError, RuntimeError, OSError, AssertionError) as error:
        raise ConfigError(f"--engine vllm: {' '.join(str(error).split())}") from error
    return core


def _warm_up(core: VllmCore) -> None:
    """What vLLM compiles or loads when it first meets it keeps other threads from running, up to minutes: then a worker would
    be considered dead."""
    sampled = SamplingParams(temperature=1.0, logprobs=1, max_tokens=2, top_p=0.9, top_k=2)
    for params in (sampled, SamplingParams(max_tokens=2, grammar=Grammar(kind=GrammarKind.JSON_OBJECT))):
        try:
            core.add(CoreRequest(id="warm-up", prompt=[0], params=params, max_tokens=2, seed=0))
        except InvalidRequestError as error:
            log.warning("requests with a grammar will be refused", reason=error)
            continue
        while not any(output.finish for output in core.step()[0]):
            pass


class VllmCore:
    """Uses a few names that vLLM does not promise to keep: the versions that work are stated in pyproject.toml."""

    def __init__(self, core: Any, config: Any, shared: Shared) -> None:
        self._core = core
        self._shared = shared
        self._is_split = config.parallel_config.world_size > 1
        self._scheduler = core.scheduler
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self.block_size = int(config.cache_config.block_size)
        self.max_model_len = int(config.model_config.max_model_len)
        self.vocab_size = int(config.model_config.get_vocab_size())
        self.max_batch = int(config.scheduler_config.max_num_seqs)
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.eos_token_ids = _eos_of(config.model_config)
        self._num_preemptions = 0  # of sequences that have ended by themselves
        self._requests: dict[str, Any] = {}
        self._on_rank_death: Callable[[str], None] = lambda _: None

    def watch_ranks(self, on_rank_death: Callable[[str], None]) -> None:
        """It is called by vLLM's thread, or by a step that fails first: vLLM cancels it before it tells."""
        self._on_rank_death = on_rank_death
        self._core.model_executor.register_failure_callback(self._rank_died)

    def _rank_died(self) -> None:
        self._on_rank_death("a process that runs a part of the model for vLLM has ended")

    def listen(self, listener: CacheListener) -> None:
        """To what the prefix cache does."""
        self._scheduler.kv_event_publisher = listener

    def add(self, request: CoreRequest) -> None:
        try:
            made = EngineCoreRequest(
                request_id=request.id,
                prompt_token_ids=list(request.prompt),
                mm_features=None,
                sampling_params=self._params(request),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=request.cache_salt or None,
                data_parallel_rank=None,
                priority=request.priority,
            )
            added, wave = self._core.preprocess_add_request(made)
            if request.forced:
                added.append_output_token_ids(list(request.forced))
                added.prefill_stats = None  # vLLM counts prompts, and expects no more to be cached
            if added.use_structured_output:
                self._begin_grammar(added, request)
            self._core.add_request(added, wave)
            self._requests[request.id] = added
        except ValueError as error:
            raise InvalidRequestError(f"vLLM: {error}") from error

    def abort(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            self._requests.pop(sequence_id, None)
        self._core.abort_requests(list(sequence_ids))

    def sent(self, sequence_id: str) -> None:
        self._scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_sending={sequence_id}))

    def received(self, sequence_id: str, token: int | None = None) -> None:
        request = self._scheduler.requests.get(sequence_id)
        if request is None:
            return  # aborted before it had blocks
        if token is not None:
            request.append_output_token_ids(token)
            request.sampling_params.extra_args = {FORCED: list(request.output_token_ids)}
            self._core.structured_output_manager.accept_tokens(request, [token])
        self._scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={sequence_id}))

    def step(self) -> tuple[list[CoreOutput], bool]:
        try:
            outputs, computed = self._core.step()
        except RuntimeError:
            if self._is_split and getattr(self._core.model_executor, "is_failed", False):  # Ray's first executor has none
                self._rank_died()
            raise
        if self._is_split:
            self._shared.hooks.passed(PASSED)  # ranks add to the last sum, and stages pass on, after KV is stored
        self._core.post_step(computed)
        found = [one for many in outputs.values() for one in many.outputs]
        for one in found:
            if one.finish_reason is not None and (ended := self._requests.pop(one.request_id, None)) is not None:
                self._num_preemptions += ended.num_preemptions
        return [_output(one) for one in found], bool(computed)

    def counts(self) -> CoreCounts:
        running, waiting = self._scheduler.get_request_counts()
        total = self._pool.num_gpu_blocks - 1  # one stands for no block
        free = self._pool.get_num_free_blocks()
        held = total - free
        cached = max(0, min(free, len(self._pool.cached_block_hash_to_block) - held))
        return CoreCounts(
            running=running, waiting=waiting, total=total, free=free - cached, cached=cached, preemptions=self._num_preemptions
        )

    def _begin_grammar(self, added: Any, request: CoreRequest) -> None:
        """vLLM compiles it in a thread: a sequence that waits for that would look like one that waits for blocks."""
        waited = added.structured_output_request
        if isinstance(waited._grammar, Future):
            wait([waited._grammar])
        if isinstance(waited.grammar, Exception):
            raise ValueError(f"the grammar cannot be used: {waited.grammar}")
        self._core.structured_output_manager.accept_tokens(added, request.forced)

    def close(self) -> None:
        self._core.shutdown()

    def _params(self, request: CoreRequest) -> VllmParams:
        params = request.params
        others = [] if params.ignore_eos else sorted(self.eos_token_ids)
        made = VllmParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias or None,
            allowed_token_ids=params.allowed_token_ids or None,
            seed=None if params.greedy else request.seed,
            max_tokens=request.max_tokens,
            min_tokens=min(params.min_tokens, request.max_tokens),
            stop_token_ids=[*params.stop_token_ids, *others],
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            structured_outputs=None if params.grammar is None else _structured(params.grammar),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={FORCED: request.forced} if request.forced else None,
        )
        if params.bad_tokens:
            made._bad_words_token_ids = params.bad_tokens
        return made


def _structured(grammar: Grammar) -> StructuredOutputsParams:
    source = grammar.source
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            made = StructuredOutputsParams(json_object=True)
        case GrammarKind.JSON_SCHEMA:
            made = StructuredOutputsParams(json=source)
        case GrammarKind.REGEX:
            made = StructuredOutputsParams(regex=source)
        case GrammarKind.CHOICE:
            made = StructuredOutputsParams(choice=json.loads(source))
        case GrammarKind.LARK:
            made = StructuredOutputsParams(grammar=source)
        case _:
            assert_never(grammar.kind)
    made._backend = "guidance"  # llguidance, as in our own engine
    return made


def _output(one: EngineCoreOutput) -> CoreOutput:
    return CoreOutput(
        id=one.request_id,
        tokens=list(one.new_token_ids),
        finish=None if one.finish_reason is None else _REASONS[one.finish_reason],
        cached_tokens=0 if one.prefill_stats is None else int(one.prefill_stats.num_cached_tokens),
        logprobs=None if one.new_logprobs is None else _logprobs(*one.new_logprobs[:3]),
        prompt_logprobs=_prompt_logprobs(one.new_prompt_logprobs_tensors),
    )


def _prompt_logprobs(tensors: Any) -> list[TokenLogprobs]:
    return [] if tensors is None else _logprobs(*(np.asarray(part) for part in tensors[:3]))


def _logprobs(tokens: Any, logprobs: Any, ranks: Any) -> list[TokenLogprobs]:
    """Rows of the token itself and the likeliest."""
    rows = zip(tokens.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    return [TokenLogprobs(values[0], list(zip(ids[1:], values[1:], strict=True)), rank) for ids, values, rank in rows]


def _eos_of(model_config: Any) -> frozenset[int]:
    """As the checkpoint says how to generate, or else its configuration."""
    folder = pathlib.Path(model_config.model)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.exists() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
