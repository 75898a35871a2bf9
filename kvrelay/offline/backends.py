"""What the offline API is made of: its options, and who serves its requests.

                send(message)                   answers
EngineHere      in the calling thread           next(): computes a step
EngineThread    to an engine in a thread        on_answers, in that thread
ClusterQueue    to worker processes             next(): waits for them
LocalCluster    to worker processes             on_answers, in the cluster's thread (cluster.py)
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, assert_never

import msgspec

from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import (
    ClusterOptions,
    EngineOptions,
    ModelOptions,
    Options,
    RouterOptions,
    TransferOptions,
    read_environment,
)
from kvrelay.engine.engine import Engine
from kvrelay.errors import ConfigError
from kvrelay.launch.cluster import LocalCluster, WorkerSettings
from kvrelay.log import Log
from kvrelay.offline.outputs import Answers
from kvrelay.progress import Progress
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.wire.serving import Abort, Finish, ReleaseKept, Submit

log = Log("llm")

Message = Submit | Abort | Finish | ReleaseKept
O = TypeVar("O", bound=Options)

# Of the groups that `kvrelay serve` has besides, what makes sense without HTTP. All of it is about worker processes.
_COUNTS = ("prefill", "decode", "whole")
_RELAY_NAMES = (
    *_COUNTS,
    "registration_s",
    "cluster_key",
    "mode",
    "local_prefill_tokens",
    "policy",
    *TransferOptions.__struct_fields__,
)
_KEEP_NAMES = ("keep_kv_default_s", "max_keep_kv_s", "continuation_cache")  # of RouterOptions; with and without workers
_NO_QUOTA = 2**31 - 1  # leases are counted by API key, of which there are none here


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineOptions:
    """Everything an LLM was asked for. `relay`: with worker processes."""

    model: ModelOptions
    engine: EngineOptions
    transfer: TransferOptions
    router: RouterOptions
    cluster: ClusterOptions
    relay: bool


def split_options(model: str, options: dict[str, Any]) -> OfflineOptions:
    """Raises ConfigError for an option that is unknown, or means nothing without worker processes."""
    known = {*ModelOptions.__struct_fields__, *EngineOptions.__struct_fields__, *_RELAY_NAMES, *_KEEP_NAMES}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; there are {', '.join(sorted(known))}")
    relay = any(options.get(name) for name in _COUNTS)
    misplaced = [name for name in options if name in _RELAY_NAMES and name not in _COUNTS]
    if misplaced and not relay:
        raise ConfigError(f"{misplaced[0]} is about worker processes: give prefill=1, decode=1 (or whole=N) too")
    values = {"model": model, **options}
    return OfflineOptions(
        model=_group(ModelOptions, values),
        engine=_group(EngineOptions, values),
        transfer=_group(TransferOptions, values),
        router=_group(RouterOptions, {**values, "max_kept_per_key": _NO_QUOTA}),
        cluster=_group(ClusterOptions, values),
        relay=relay,
    )


def _group(group: type[O], values: dict[str, Any]) -> O:
    chosen = {name: value for name, value in values.items() if name in group.__struct_fields__}
    try:
        return msgspec.convert(chosen, group)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def open_engine(options: OfflineOptions, progress: Progress) -> tuple[Tokenizer, Engine]:
    """The model in this process."""
    from kvrelay.worker.whole import build_engine  # loads PyTorch, which a process with workers has no use for

    return build_engine(options.model, options.engine, read_environment(), progress)


def open_cluster(
    options: OfflineOptions, progress: Progress, on_answers: Callable[[Answers], None], *, shown: bool
) -> tuple[Tokenizer, LocalCluster]:
    """The model in worker processes, which show their own progress if `shown`."""
    folder = resolve(options.model.model, read_environment(), progress)
    workers = WorkerSettings(
        model=msgspec.structs.replace(options.model, model=str(folder)),
        engine=options.engine,
        transfer=options.transfer,
        registration_s=options.cluster.registration_s,
        cluster_key=options.cluster.cluster_key,
        flags=["--quiet", "--progress=plain" if shown else "--progress=none"],
    )
    return Tokenizer.load(folder), LocalCluster(workers, options.router, options.cluster, on_answers)


class Turns(Protocol):
    """Who serves an `LLM`: it sends, then asks for what is next until all is answered. One thread."""

    @property
    def has_room(self) -> bool:
        """Whether another Submit would not be refused for a full queue."""

    def send(self, message: Message) -> None: ...

    def next(self) -> Answers:
        """Only while something is open. May have nothing to say."""

    def settle(self) -> None:
        """Called when everything has ended or was aborted: nothing of it is left behind."""

    def close(self) -> None: ...


class EngineHere:
    """Computes in the calling thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def has_room(self) -> bool:
        return self._engine.scheduler.queue.num_waiting < self._engine.core.options.max_queue

    def send(self, message: Message) -> None:
        tell(self._engine, message)

    def next(self) -> Answers:
        return Answers.of(self._engine.step())

    def settle(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def close(self) -> None:
        self._engine.close()


class ClusterQueue:
    """Waits for worker processes. Its `put` is what they answer to."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[Answers] = queue.SimpleQueue()
        self.put = self._answers.put
        self.cluster: LocalCluster  # set by whoever starts it, before anything else

    @property
    def has_room(self) -> bool:
        return True  # what is too much waits in the cluster

    def send(self, message: Message) -> None:
        self.cluster.send(message)

    def next(self) -> Answers:
        return self._answers.get()

    def settle(self) -> None:
        """The workers end it by themselves; what they still say is about ids that nobody will ask for."""

    def close(self) -> None:
        self.cluster.close()


class EngineThread:
    """Computes in a thread of its own."""

    def __init__(self, engine: Engine, on_answers: Callable[[Answers], None]) -> None:
        self._engine = engine
        self._on_answers = on_answers
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._work, name="kvrelay-engine", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    def close(self) -> None:
        """What is open gets no answer."""
        self._inbox.put(None)
        self._thread.join()
        self._engine.close()

    def _work(self) -> None:
        engine = self._engine
        while self._take_messages(block=not engine.has_work):
            try:
                step = engine.step()
            except Exception as error:  # the thread's main: every open request gets an answer
                log.exception("the engine failed")
                step = engine.fail_all(f"the engine failed: {error}")
            if answers := Answers.of(step):
                self._on_answers(answers)

    def _take_messages(self, *, block: bool) -> bool:
        """Hands everything that arrived to the engine. False when it is time to end."""
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if message is None:
                return False
            block = False
            tell(self._engine, message)


def tell(engine: Engine, message: Message) -> None:
    match message:
        case Submit():
            engine.submit(message)
        case Abort():
            engine.abort(message.request_ids)
        case Finish():
            engine.finish(message)
        case ReleaseKept():
            engine.release_kept(message.kept_ids)
        case _:
            assert_never(message)
