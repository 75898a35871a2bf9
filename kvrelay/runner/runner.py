"""The runner on PyTorch.

launch    forget released sequences; copy blocks; build the batch; start the forward pass; read what sampling needs
collect   choose tokens from the logits, oldest launch first; results leave as plain Python numbers

Copies of whole blocks to and from the host run beside the passes (`host_pool.py`).

On a CPU the forward pass is done when `launch` returns, and sampling happens in `collect`. On a GPU `launch` returns while the
device works; a step that only decodes is one replay of a captured graph (`graphs.py`), as is that of one short prompt
(`prompt_graphs.py`). Where each row takes one token and reports nothing besides, sampling is part of the launch: `collect`
waits for one small copy. At most two plans are under way.

A runner with graphs `runs_ahead`: a row may start where its sequence's tokens end, if the plan launched before it chooses that
token. The device takes it from there, so the host does not wait for it.
"""

from __future__ import annotations

import functools
import pathlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.engine.fence import PASSED, Fence
from kvrelay.engine.interfaces import Adapters, LayerListener, NoAdapters, Row, RowResult, SequenceView, StepPlan, StepResult
from kvrelay.models.registry import Model
from kvrelay.progress import Progress, Silent
from kvrelay.runner.batch import BatchBuilder, LateTokens, LogitLayout
from kvrelay.runner.cuda_fence import CudaFence
from kvrelay.runner.graphs import DecodeGraphs, compile_passes
from kvrelay.runner.host_pool import HostPool, NoHostPool
from kvrelay.runner.kv_pool import KVPool, blocks_for
from kvrelay.runner.prompt_graphs import PromptGraphs
from kvrelay.runner.ranks.group import RankGroup
from kvrelay.runner.sampling.draw import NOT_RESOLVED
from kvrelay.runner.sampling.edits import EditState
from kvrelay.runner.sampling.grammar import Grammars
from kvrelay.runner.sampling.sampler import Prepared, Sampler
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.runner.vision.images import ImageRows
from kvrelay.wire.kv import Layout
from kvrelay.wire.ranks import KVShare

MAX_LAUNCHED = 2
TOKENIZER_NAME = "tokenizer.json"
_FENCED_LAYERS = 4  # of a card, behind one fence, which takes the host as long as a kernel. The last so many have one each


@dataclass(slots=True)
class _Launched:
    """A plan under way: its tokens are chosen by the device, or will be from its logits."""

    rows: list[Row]
    prepared: Prepared
    logits: torch.Tensor | None = None  # None where no one will look at them any more
    chosen: ChosenTokens | None = None
    results: list[RowResult] | None = None

    @property
    def is_certain(self) -> bool:
        """Whether the device has its tokens, without a second look."""
        return self.chosen is not None and self.logits is None

    @property
    def needs_host(self) -> bool:
        """Whether the host has to choose tokens, or to look at them, before the next plan can have them."""
        return bool(self.prepared.wanted) and self.results is None and not self.is_certain


class ChosenTokens:
    """Tokens on their way from the device."""

    def __init__(self, tokens: torch.Tensor) -> None:
        on_card = tokens.device.type == "cuda"
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=on_card)
        self._host.copy_(tokens, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_card else None  # type: ignore[no-untyped-call]
        self._tokens: list[int] | None = None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> list[int]:
        if self._tokens is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._tokens = self._host.tolist()
        return self._tokens


class TorchRunner:
    """Implements `engine.interfaces.Runner`. One thread calls it."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        spec: ModelSpec,
        *,
        block_size: int,
        max_batch: int,
        token_budget: int,
        max_model_len: int,
        fingerprint: str,
        folder: pathlib.Path,
        num_threads: int = 1,
        host_pool: HostPool | None = None,
        features: FeatureStore | None = None,
        adapters: Adapters | None = None,
        graph_sizes: Sequence[int] = (),
        prompt_sizes: Sequence[int] = (),
        progress: Progress | None = None,
        ranks: RankGroup | None = None,
        bulk: bool = False,
    ) -> None:
        """`features` holds those of images; without it the runner takes none. With `graph_sizes`, decode steps are padded to
        them and replayed, and the pool's last block is the runner's own; with `prompt_sizes` besides, so are short prompts.
        `ranks` are ended with the runner. `bulk` is the kernels' `has_bulk`."""
        self.spec = spec
        self.features = features
        self.adapters = adapters or NoAdapters()
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(spec.eos_token_ids)
        self.fingerprint = fingerprint
        self._model = model
        self._pool = pool
        self._host_pool = host_pool or NoHostPool()
        self.ranks = ranks
        device = pool.tensor.device
        self._builder = BatchBuilder(
            block_size=block_size,
            max_tokens=token_budget,
            max_rows=max_batch,
            max_blocks=blocks_for(max_model_len, block_size),
            device=device,
            images=_image_rows(spec, features, device),
            sent=device.type == "cuda" or bool(graph_sizes),
            max_context=max_model_len if graph_sizes else 0,
            bulk=bulk,
        )
        self._graphs = (
            DecodeGraphs(
                model, pool.tensor, self._builder,
                sizes=graph_sizes, max_context=max_model_len, progress=progress or Silent(),
                on_replay=None if ranks is None else ranks.replay,
            )
            if graph_sizes
            else None
        )  # fmt: skip
        self._prompts = (
            None if self._graphs is None or not prompt_sizes else PromptGraphs(self._graphs, prompt_sizes, progress or Silent())
        )
        grammars = Grammars(
            lambda: (folder / TOKENIZER_NAME).read_text(encoding="utf-8"),
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            num_threads=num_threads,
        )
        edits = EditState(
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            grammars=grammars,
            image_token_id=None if spec.vision is None else spec.vision.image_token_id,
        )
        self._sampler = Sampler(edits)
        self._launched: deque[_Launched] = deque()
        self._on_layer: Callable[[int], None] | None = None  # of the model
        self._listener: LayerListener | None = None

    @property
    def layout(self) -> Layout:
        return self._pool.layout

    @property
    def kv(self) -> torch.Tensor:
        """KV memory, for the relay."""
        return self._pool.tensor

    @property
    def kv_of_ranks(self) -> list[tuple[int, KVShare]]:
        """The address here of each other rank's share, where that is on a card, and how other processes reach it."""
        return self._pool.added

    def on_layer(self, listener: LayerListener) -> None:
        every = _FENCED_LAYERS if self._pool.tensor.device.type == "cuda" else 1
        last = self.spec.num_layers - 1

        def on_layer(layer: int) -> None:
            if (layer + 1) % every == 0 or layer > last - every:
                listener(layer, self.fence())

        self._on_layer, self._listener = on_layer, listener

    def fence(self) -> Fence:
        return CudaFence(self._pool.tensor.device) if self._pool.tensor.device.type == "cuda" else PASSED

    def expect(self, sequences: Sequence[SequenceView]) -> None:
        """Where the device is idle, their block tables go there now; else with the next step, as all do."""
        if self._graphs is not None and not self._launched:
            self._graphs.expect(sequences)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks - (self._graphs is not None)

    @property
    def runs_ahead(self) -> bool:
        return self._graphs is not None and self._on_layer is None

    @property
    def num_host_blocks(self) -> int:
        return self._host_pool.num_blocks

    def begin_copies(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> int:
        return self._host_pool.begin(saves, loads)

    def finished_copies(self, wait_s: float = 0.0) -> list[int]:
        return self._host_pool.finished(wait_s)

    @property
    def num_known_sequences(self) -> int:
        """Sequences of which anything is remembered; 0 once all were released."""
        return max(self._builder.num_known_sequences, self._sampler.num_known_sequences)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        assert len(self._launched) < MAX_LAUNCHED, "collect a plan before launching a third"
        self._builder.forget(plan.released)
        self._sampler.forget(plan.released)
        self._pool.copy_blocks(plan.copies)
        if self._graphs is not None and self._launched and self._launched[-1].needs_host:
            self._bring_to_device(self._launched[-1], self._graphs.tokens)
        if not plan.rows:
            self._launched.append(_Launched([], Prepared(num_plan_rows=0), results=[]))
        else:
            self._launched.append(self._replay(plan) or self._pass(plan))

    @torch.inference_mode()
    def compile(self, plans: Sequence[StepPlan], what: str, progress: Progress) -> None:
        """Compiles the Triton kernels of these plans' passes, if the model is on a card. Results are dropped."""
        if self._pool.tensor.device.type == "cuda":
            compile_passes(what, [functools.partial(self._compile_pass, plan) for plan in plans], progress)

    def _compile_pass(self, plan: StepPlan) -> None:
        self._model.forward(self._builder.build(plan)[0], self._pool.tensor)
        self._builder.forget([row.sequence.key for row in plan.rows])

    def _pass(self, plan: StepPlan) -> _Launched:
        batch, layout = self._builder.build(plan, self._late_tokens(plan.rows))
        logits = self._model.forward(batch, self._pool.tensor, self._on_layer)
        prepared = self._sampler.prepare(plan, layout)
        if self._graphs is None or not prepared.takes_one_each or len(prepared.wanted) > self._graphs.max_rows:
            return _Launched(plan.rows, prepared, logits)
        return self._choose(plan, prepared, logits, None, self._graphs)

    def _replay(self, plan: StepPlan) -> _Launched | None:
        """None if there is no graph for it."""
        rows, graphs = plan.rows, self._graphs
        if graphs is None:
            return None
        if self.runs_ahead and graphs.takes(rows):
            graphs.run(rows, self._sources(rows))
        elif self._prompts is not None and self._prompts.takes(rows):
            stored = self._prompts.run(rows[0])
            if self._listener is not None:
                self._listener(self.spec.num_layers - 1, stored)  # all layers, behind one fence
        else:
            return None
        wanted = [(index, index) for index, row in enumerate(rows) if row.samples or row.candidates]
        prepared = self._sampler.prepare(plan, LogitLayout(sampled=wanted, prompts=[], num_rows=len(rows)))
        logits = graphs.logits[: len(rows)]
        if not prepared.takes_one_each or not prepared.is_certain:
            logits = logits.clone()  # the next replay overwrites them
        if not prepared.takes_one_each:
            return _Launched(rows, prepared, logits)
        return self._choose(plan, prepared, logits, graphs.tokens[: len(rows)], graphs)

    def _choose(
        self, plan: StepPlan, prepared: Prepared, logits: torch.Tensor, best: torch.Tensor | None, graphs: DecodeGraphs
    ) -> _Launched:
        tokens = self._sampler.choose(logits, prepared, best)
        if tokens is not best:
            graphs.tokens[: len(tokens)].copy_(tokens)
        return _Launched(plan.rows, prepared, None if prepared.is_certain else logits, ChosenTokens(tokens))

    def _sources(self, rows: list[Row]) -> list[int]:
        """Where each row's token is among those of the plan launched before; -1: the sequence has it."""
        ahead = [row.start == len(row.sequence.tokens) for row in rows]
        if not any(ahead):
            return [-1] * len(rows)
        before = self._launched[-1]
        places = {before.rows[one.plan_row].sequence.key: place for place, one in enumerate(before.prepared.wanted)}
        return [places[row.sequence.key] if is_ahead else -1 for row, is_ahead in zip(rows, ahead, strict=True)]

    def _late_tokens(self, rows: list[Row]) -> LateTokens | None:
        """None: the host has all of them."""
        if not self._launched:
            return None
        sources = self._sources(rows)
        late = [index for index, source in enumerate(sources) if source >= 0]
        if not late:
            return None
        assert self._graphs is not None, "without graphs nothing runs ahead"
        return LateTokens(late, [sources[index] for index in late], self._graphs.tokens)

    def _bring_to_device(self, launched: _Launched, tokens: torch.Tensor) -> None:
        """The host has to choose, or to look whether the device could: it does so now."""
        finished = launched.chosen is not None and NOT_RESOLVED not in launched.chosen.wait()
        launched.results = self._results(launched)
        if finished:
            return
        chosen = [(launched.results[one.plan_row].tokens or [0])[0] for one in launched.prepared.wanted]
        tokens[: len(chosen)].copy_(torch.tensor(chosen))

    @torch.inference_mode()
    def collect(self) -> StepResult:
        assert self._launched, "nothing was launched"
        results = self._results(self._launched.popleft())
        if self.ranks is not None:
            self.ranks.check()
        return StepResult(rows=results)

    def _results(self, launched: _Launched) -> list[RowResult]:
        if launched.results is not None:
            return launched.results
        if launched.chosen is not None and NOT_RESOLVED not in launched.chosen.wait():
            return self._sampler.results(launched.chosen.wait(), launched.prepared)
        assert launched.logits is not None
        return self._sampler.finish(launched.logits, launched.prepared)

    @torch.inference_mode()
    def replay_again(self, num_rows: int) -> None:
        """For measuring the device alone: the last decode step of so many rows once more, its tokens are dropped."""
        assert self._graphs is not None, "there are no graphs"
        self._graphs.replay_again(num_rows)

    def close(self) -> None:
        """Drops what is under way. Weights and KV memory go with the runner."""
        self._launched.clear()
        self._host_pool.close()
        if self.ranks is not None:
            if self._pool.added and not self.ranks.death:
                torch.cuda.synchronize(self._pool.tensor.device)  # ranks take part in what was launched
                self._pool.close()
            self.ranks.close()


def _image_rows(spec: ModelSpec, features: FeatureStore | None, device: torch.device) -> ImageRows | None:
    return None if spec.vision is None or features is None else ImageRows(spec.vision, features, device)
