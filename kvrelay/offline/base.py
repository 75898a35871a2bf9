"""What `LLM` and `AsyncLLM` have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from kvrelay.engine.engine import Engine
from kvrelay.errors import ConfigError, EngineClosedError, InvalidRequestError
from kvrelay.ids import RequestId
from kvrelay.launch.cluster import LocalCluster
from kvrelay.offline.backends import OfflineOptions
from kvrelay.offline.outputs import Answers, Assembly, Job, Origin, prepare
from kvrelay.offline.parents import OfflineParent, OfflineParents
from kvrelay.progress import Progress, Silent
from kvrelay.sampling import SamplingParams
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.serving import BeamResult, Failure, HandedOver, Inherited, KeptNews, Submit

Prompt = str | list[int]
KeepKV = bool | float | None  # True: for the usual time; or for so many seconds


class Base:
    """Options are those of `kvrelay serve`, with underscores: LLM("smollm2", max_model_len=1024)."""

    tokenizer: Tokenizer
    relay: LocalCluster | None = None  # the worker processes, if there are any
    _engine: Engine | None = None
    _closed = False

    def __init__(self, options: OfflineOptions) -> None:
        self._keep_default_s = options.router.keep_kv_default_s
        self._max_keep_kv_s = options.router.max_keep_kv_s
        self._parents = OfflineParents(options.router.continuation_cache)

    @property
    def engine(self) -> Engine:
        """Of a model in this process."""
        if self._engine is None:
            raise ConfigError("the engines of this model are in worker processes")
        return self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"this {type(self).__name__} is closed")

    def _keep_ttl_s(self, keep_kv: KeepKV) -> float | None:
        if keep_kv is None or keep_kv is False:
            return None
        ttl_s = self._keep_default_s if keep_kv is True else float(keep_kv)
        if not 0.0 < ttl_s <= self._max_keep_kv_s:
            raise InvalidRequestError(f"keep_kv must be above 0 and at most {self._max_keep_kv_s:g} seconds", param="keep_kv")
        return ttl_s

    def _child_job(
        self, origin: Origin, suffix: str, token_ids: Sequence[int] | None, params: SamplingParams, keep_ttl_s: float | None
    ) -> Job:
        if token_ids is not None and suffix:
            raise InvalidRequestError("suffix and token_ids exclude each other", param="token_ids")
        added = self.tokenizer.encode(suffix, add_special_tokens=False) if token_ids is None else token_ids
        return prepare(self.tokenizer, [*origin.tokens, *added], params, None, keep_ttl_s, origin)


def take_words(assemblies: Mapping[RequestId, Assembly], answers: Answers) -> None:
    """All that is said of requests besides their tokens."""
    for news in answers.news:
        assembly = assemblies.get(news.request_id)
        if assembly is None:
            continue
        match news:
            case BeamResult():
                assembly.take_beam(news)
            case Inherited():
                assembly.take_inherited(news)
            case KeptNews():
                assembly.take_news(news)
            case Failure() | HandedOver():  # ends the request: not for its assembly to know
                pass
            case _:
                assert_never(news)


def origin_of(found: OfflineParent | Origin) -> Origin:
    return found.origin if isinstance(found, OfflineParent) else found


def submit_of(request_id: RequestId, external_id: str, assembly: Assembly, priority: int, trace: dict[str, str]) -> Submit:
    return Submit(
        request_id=request_id,
        external_id=external_id,
        prompt=assembly.job.tokens,
        params=assembly.job.params,
        priority=priority,
        trace=trace,
        keep=assembly.job.keep,
        inherit=None if assembly.job.origin is None else assembly.job.origin.kept_id,
    )


def shown_progress(shown: bool) -> Progress:
    if not shown:
        return Silent()
    from kvrelay.launch.console import ConsoleProgress

    return ConsoleProgress()
