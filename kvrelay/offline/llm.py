"""The offline API: a model without a server.

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
        print(output.outputs[0].text)

`LLM` and `AsyncLLM` sit on the same `Backend` as the server, in a thread with an event loop (`service.py`). Alone, that is one
engine in this process. With counts of workers, as in `LLM("smollm2", prefill=1, decode=1)`, it is a router and its worker
processes, which relay as under `kvrelay serve`; this process then computes nothing and does not load PyTorch. `close()`, or the
end of the process, ends the workers.

What was generated with `keep_kv` can be continued from: `generate_continuation` computes its suffix only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

from kvrelay.errors import ConfigError
from kvrelay.offline.async_llm import AsyncLLM
from kvrelay.offline.base import Base, KeepKV, ParentName, Prompt, find_origin, shown_progress
from kvrelay.offline.generation import Generation
from kvrelay.offline.outputs import CompletionOutput, Job, Origin, RequestOutput, prepare
from kvrelay.progress import Progress
from kvrelay.sampling import BeamSearch, SamplingParams
from kvrelay.text.chat_template import Message

__all__ = ["LLM", "AsyncLLM"]

ParentNames = list[str] | Sequence[CompletionOutput | RequestOutput]


class LLM(Base):
    """Generates for lists of prompts. One call at a time."""

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        super().__init__(model, options, progress=progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        best_of: int | None = None,
        priority: int = 0,
        keep_kv: KeepKV = None,
        lora: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in their order. Prompts are texts or lists of token ids; a single one may stand alone.

        A seed of 0, the default, draws a new one for each prompt that is sampled. The first prompt that cannot be served
        raises, and nothing of the others is left behind. With `keep_kv` each output has a `continuation`.
        `lora` names an adapter of the option `lora`, for all prompts or one by one; None is the base model. A child has its
        parent's.
        """
        self._check_open()
        batch = _as_batch(prompts)
        settings = _as_params(params, len(batch))
        ttl_s = self._keep_ttl_s(keep_kv)
        adapters = [self._adapter(name) for name in _as_names(lora, len(batch))]
        jobs = [
            prepare(self.tokenizer, prompt, sampling, best_of, ttl_s, adapter=adapter)
            for prompt, sampling, adapter in zip(batch, settings, adapters, strict=True)
        ]
        return self._generate(jobs, priority, progress)

    @overload
    def generate_continuation(
        self,
        parent: ParentName,
        suffix: str = "",
        params: SamplingParams | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        priority: int = 0,
        keep_kv: KeepKV = None,
        progress: bool | None = None,
    ) -> RequestOutput: ...

    @overload
    def generate_continuation(
        self,
        parent: ParentNames,
        suffix: str = "",
        params: SamplingParams | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        priority: int = 0,
        keep_kv: KeepKV = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]: ...

    def generate_continuation(
        self,
        parent: ParentName | ParentNames,
        suffix: str = "",
        params: SamplingParams | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        priority: int = 0,
        keep_kv: KeepKV = None,
        progress: bool | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Goes on from what was generated, after a suffix: a text, tokenised alone, or `token_ids`. Of a list of parents, each
        has a child.

        A parent is a handle, or what `generate` gave back for it. While its KV is kept, only the suffix is computed, as
        `continued` of the output tells. Raises NotFoundError if its tokens are not known any more.
        """
        self._check_open()
        ttl_s = self._keep_ttl_s(keep_kv)
        alone = isinstance(parent, str | CompletionOutput | RequestOutput)
        parents = [parent] if isinstance(parent, str | CompletionOutput | RequestOutput) else parent
        origins = self._service.run(self._find_origins(parents))
        jobs = [self._child_job(origin, suffix, token_ids, params or SamplingParams(), ttl_s) for origin in origins]
        outputs = self._generate(jobs, priority, progress)
        return outputs[0] if alone else outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        width: int,
        max_tokens: int = 16,
        *,
        n: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        lora: str | Sequence[str | None] | None = None,
        **settings: Any,
    ) -> list[RequestOutput]:
        """The likeliest `n` (default: all `width`) continuations of each prompt, best first. `settings` are SamplingParams'."""
        beam = BeamSearch(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        sampling = SamplingParams(temperature=0.0, n=n or width, max_tokens=max_tokens, beam=beam, **settings)
        return self.generate(prompts, sampling, lora=lora)

    def _generate(self, jobs: list[Job], priority: int, progress: bool | None) -> list[RequestOutput]:
        shown = self._progress if progress is None else shown_progress(progress)
        shown.start("generating", len(jobs), unit="prompts")
        try:
            return self._service.run(self._generate_all(jobs, priority, shown))
        finally:
            shown.done()

    async def _generate_all(self, jobs: list[Job], priority: int, shown: Progress) -> list[RequestOutput]:
        """On the service's loop. The first failure, or Ctrl-C, ends all of them, and nothing of them is left behind."""
        generations = [
            Generation(self._service, self.tokenizer, f"offline-{index}", job, priority) for index, job in enumerate(jobs)
        ]
        tasks = [asyncio.ensure_future(generation.to_end()) for generation in generations]
        for task in tasks:
            task.add_done_callback(lambda _: shown.advance(1))
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for generation in generations:
                await generation.forget()
            raise
        finally:
            await self._service.settle()

    async def _find_origins(self, parents: Sequence[ParentName]) -> list[Origin]:
        return [await find_origin(self._service.backend, parent) for parent in parents]

    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | Sequence[SamplingParams] | None = None, **settings: Any
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """The model's answer to a conversation; of a list of conversations, its answer to each."""
        alone = not messages or isinstance(messages[0], Mapping)
        prompts: list[Prompt] = []
        for conversation in [messages] if alone else messages:
            text = self.tokenizer.render_chat(conversation)  # type: ignore[arg-type]
            prompts.append(self.tokenizer.encode(text, add_special_tokens=False))
        outputs = self.generate(prompts, params, **settings)
        return outputs[0] if alone else outputs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and isinstance(batch[0], int):
        return [batch]  # type: ignore[list-item]
    return batch  # type: ignore[return-value]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts but {len(params)} SamplingParams")
    return list(params)


def _as_names(lora: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    if lora is None or isinstance(lora, str):
        return [lora] * count
    if len(lora) != count:
        raise ConfigError(f"{count} prompts but {len(lora)} names of LoRA adapters")
    return list(lora)
