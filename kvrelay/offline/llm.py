"""The offline API: a model without a server.

    llm = LLM("smollm2")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
        print(output.outputs[0].text)

`LLM` computes in the calling thread. `AsyncLLM` computes in a thread of its own and gives asynchronous streams. With counts of
workers, as in `LLM("smollm2", prefill=1, decode=1)`, both start worker processes and relay through them as `kvrelay serve`
does; this process then computes nothing and does not load PyTorch. `close()`, or the end of the process, ends the workers.

What was generated with `keep_kv` can be continued from: `generate_continuation` computes its suffix only.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

from kvrelay.errors import ConfigError, EngineClosedError
from kvrelay.ids import RequestId, new_request_id
from kvrelay.offline.async_llm import AsyncLLM
from kvrelay.offline.backends import ClusterQueue, EngineHere, Turns, open_cluster, open_engine, split_options
from kvrelay.offline.base import Base, KeepKV, Prompt, origin_of, shown_progress, submit_of, take_words
from kvrelay.offline.outputs import Answers, Assembly, CompletionOutput, Job, RequestOutput, prepare
from kvrelay.offline.parents import ParentName
from kvrelay.progress import Progress
from kvrelay.sampling import BeamSearch, SamplingParams
from kvrelay.wire.serving import Abort, Failure, ReleaseKept, of_kind

__all__ = ["LLM", "AsyncLLM"]

ParentNames = list[str] | Sequence[CompletionOutput | RequestOutput]


class LLM(Base):
    """Generates for lists of prompts. One call at a time."""

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        """Returns when the model is loaded. With worker processes it raises WorkerDiedError if one of them cannot start."""
        chosen = split_options(model, options)
        super().__init__(chosen)
        self._progress = shown_progress(progress)
        self._turns: Turns
        if not chosen.relay:
            self.tokenizer, self._engine = open_engine(chosen, self._progress)
            self._turns = EngineHere(self._engine)
            return
        self._turns = answers = ClusterQueue()
        self.tokenizer, self.relay = open_cluster(chosen, self._progress, answers.put, shown=progress)
        answers.cluster = self.relay
        weakref.finalize(self, self.relay.close)  # an LLM that is dropped leaves no process either

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        best_of: int | None = None,
        priority: int = 0,
        keep_kv: KeepKV = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in their order. Prompts are texts or lists of token ids; a single one may stand alone.

        A seed of 0, the default, draws a new one for each prompt that is sampled. The first prompt that cannot be served
        raises, and nothing of the others is left behind. With `keep_kv` each output has a `continuation`.
        """
        self._check_open()
        batch = _as_batch(prompts)
        settings = _as_params(params, len(batch))
        ttl_s = self._keep_ttl_s(keep_kv)
        pairs = zip(batch, settings, strict=True)
        jobs = [prepare(self.tokenizer, prompt, sampling, best_of, ttl_s) for prompt, sampling in pairs]
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
        origins = [origin_of(self._parents.find(one)) for one in parents]
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
        **settings: Any,
    ) -> list[RequestOutput]:
        """The likeliest `n` (default: all `width`) continuations of each prompt, best first. `settings` are SamplingParams'."""
        beam = BeamSearch(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        sampling = SamplingParams(temperature=0.0, n=n or width, max_tokens=max_tokens, beam=beam, **settings)
        return self.generate(prompts, sampling)

    def release(self, parent: ParentName) -> None:
        """Nobody will continue from it: its KV need not be kept. Raises NotFoundError if it is not."""
        self._check_open()
        kept_id = self._parents.lease_of(parent)
        self._turns.send(ReleaseKept(kept_ids=[kept_id]))
        self._parents.forget(kept_id, "it was released")

    def _generate(self, jobs: list[Job], priority: int, progress: bool | None) -> list[RequestOutput]:
        assemblies: dict[RequestId, Assembly] = {}
        for index, job in enumerate(jobs):
            request_id = new_request_id()
            assemblies[request_id] = Assembly(self.tokenizer, f"offline-{index}", request_id, job)
        shown = self._progress if progress is None else shown_progress(progress)
        shown.start("generating", len(jobs), unit="prompts")
        try:
            self._run(assemblies, priority, shown)
        except BaseException:  # also Ctrl-C: the next call must not meet what is left of this one
            self._abandon(assemblies)
            raise
        finally:
            shown.done()
        self._turns.settle()
        for request_id, assembly in assemblies.items():
            self._remember(request_id, assembly)
        return [assembly.output() for assembly in assemblies.values()]

    def _remember(self, request_id: RequestId, assembly: Assembly) -> None:
        if assembly.job.keep is not None:
            self._parents.begun(request_id, assembly.job.keep.kept_ids)
            for news in assembly.news:
                self._parents.told(news)
            for kept_id, tokens in assembly.kept_tokens():
                self._parents.ended(kept_id, tokens)

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **settings: Any) -> RequestOutput:
        """The model's answer to a conversation."""
        text = self.tokenizer.render_chat(messages)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return self.generate([tokens], params, **settings)[0]

    def close(self) -> None:
        """May be called twice."""
        if not self._closed:
            self._closed = True
            self._turns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, assemblies: Mapping[RequestId, Assembly], priority: int, progress: Progress) -> None:
        waiting = list(assemblies.items())[::-1]
        open_requests: set[RequestId] = set()
        while waiting or open_requests:
            while waiting and self._turns.has_room:
                request_id, assembly = waiting.pop()
                self._turns.send(submit_of(request_id, f"{request_id}", assembly, priority, {}))
                open_requests.add(request_id)
            self._take(assemblies, self._turns.next())
            ended = {request_id for request_id in open_requests if assemblies[request_id].finished}
            open_requests -= ended
            progress.advance(len(ended))

    def _take(self, assemblies: Mapping[RequestId, Assembly], answers: Answers) -> None:
        for failure in of_kind(Failure, answers.news):
            if failure.request_id in assemblies:
                raise failure.error()
        take_words(assemblies, answers)
        for output in answers.outputs:
            assembly = assemblies.get(output.request_id)
            if assembly is None or assembly.ended:
                continue  # of a call that was given up, or a sample that ran a little further than its stop string
            finish = assembly.take(output)
            if finish is not None:
                self._turns.send(finish)

    def _abandon(self, assemblies: Mapping[RequestId, Assembly]) -> None:
        with contextlib.suppress(EngineClosedError):  # worker processes that are gone hold nothing
            self._turns.send(Abort(request_ids=list(assemblies)))
            kept_ids = [kept_id for assembly in assemblies.values() for kept_id, _ in assembly.kept_tokens()]
            if kept_ids:  # nobody has their handles
                self._turns.send(ReleaseKept(kept_ids=kept_ids))
            self._turns.settle()


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
