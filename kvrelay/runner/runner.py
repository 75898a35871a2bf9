"""The runner on PyTorch.

launch    forget released sequences; copy blocks; build the batch; start the forward pass; read what sampling needs
collect   choose tokens from the logits, oldest launch first; results leave as plain Python numbers

Copies of whole blocks to and from the host run beside the passes (`host_pool.py`).

On a GPU `launch` returns while the device works; on a CPU the forward pass is done when it returns. Sampling happens in
`collect`. At most two plans may be under way, so their input buffers never meet.
"""

from __future__ import annotations

import pathlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvrelay.checkpoint.spec import ModelSpec
from kvrelay.engine.interfaces import RowResult, StepPlan, StepResult
from kvrelay.models.registry import Model
from kvrelay.runner.batch import BatchBuilder
from kvrelay.runner.host_pool import HostPool
from kvrelay.runner.kv_pool import KVPool, blocks_for
from kvrelay.runner.sampling.edits import EditState
from kvrelay.runner.sampling.grammar import Grammars
from kvrelay.runner.sampling.sampler import Prepared, Sampler
from kvrelay.runner.vision.features import FeatureStore
from kvrelay.runner.vision.images import ImageRows
from kvrelay.wire.kv import Layout

MAX_LAUNCHED = 2
TOKENIZER_NAME = "tokenizer.json"


@dataclass(slots=True)
class _Launched:
    logits: torch.Tensor | None  # None when the plan had no rows
    prepared: Prepared


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
    ) -> None:
        """`features` holds those of images; without it the runner takes none."""
        self.spec = spec
        self.features = features
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(spec.eos_token_ids)
        self.fingerprint = fingerprint
        self._model = model
        self._pool = pool
        self._host_pool = host_pool
        self._builder = BatchBuilder(
            block_size=block_size,
            max_tokens=token_budget,
            max_rows=max_batch,
            max_blocks=blocks_for(max_model_len, block_size),
            device=pool.tensor.device,
            images=_image_rows(spec, features, pool.tensor.device),
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
        self._on_layer: Callable[[int], None] | None = None

    @property
    def layout(self) -> Layout:
        return self._pool.layout

    @property
    def kv(self) -> torch.Tensor:
        """KV memory, for whoever moves it."""
        return self._pool.tensor

    def on_layer(self, listener: Callable[[int], None]) -> None:
        self._on_layer = listener

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return 0 if self._host_pool is None else self._host_pool.num_blocks

    def begin_copies(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> int:
        assert self._host_pool is not None, "there are no host blocks"
        return self._host_pool.begin(saves, loads)

    def finished_copies(self, wait_s: float = 0.0) -> list[int]:
        return [] if self._host_pool is None else self._host_pool.finished(wait_s)

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
        if not plan.rows:
            self._launched.append(_Launched(None, Prepared(num_plan_rows=0)))
            return
        batch, layout = self._builder.build(plan)
        logits = self._model.forward(batch, self._pool.tensor, self._on_layer)
        self._launched.append(_Launched(logits, self._sampler.prepare(plan, layout)))

    @torch.inference_mode()
    def collect(self) -> StepResult:
        assert self._launched, "nothing was launched"
        oldest = self._launched.popleft()
        rows: list[RowResult] = [] if oldest.logits is None else self._sampler.finish(oldest.logits, oldest.prepared)
        return StepResult(rows=rows)

    def close(self) -> None:
        """Drops what is under way. Weights and KV memory go with the runner."""
        self._launched.clear()
        if self._host_pool is not None:
            self._host_pool.close()


def _image_rows(spec: ModelSpec, features: FeatureStore | None, device: torch.device) -> ImageRows | None:
    return None if spec.vision is None or features is None else ImageRows(spec.vision, features, device)
