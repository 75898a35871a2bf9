"""Passes before the first request: libraries load, threads start, kernels are compiled and chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.config import EngineOptions
from kvrelay.engine.interfaces import LoadedAdapter, Row, StepPlan
from kvrelay.ids import RequestId
from kvrelay.progress import Progress
from kvrelay.runner.kv_pool import blocks_for
from kvrelay.runner.runner import TorchRunner
from kvrelay.sampling import SamplingParams
from kvrelay.wire.kv import heads_per_rank
from kvrelay.wire.serving import Image

_WARM_UP_TOKENS = 32
_GREEDY = SamplingParams(temperature=0.0)
_QUERY_LINES = (32, 64, 65, 16385)  # queries x heads of a KV head: one of each kind of the paged kernel
_FEW_TOKENS = (4, 12, 24, 48, 96)  # of a step: one of each kind of linears of few rows
_DECODING = 16  # rows beside which a prompt begins that takes all the budget
_HEADS = (136, 513, 1, 1)  # KV heads of all rows that decode beside them: one of each kind of the kernel for those


def warm_up(runner: TorchRunner, block_size: int) -> None:
    """One short prompt and one token, greedy and drawn."""
    room = min(runner.max_model_len, runner.num_blocks * block_size)
    for num_tokens in (min(_WARM_UP_TOKENS, room), 1):
        for params in (_GREEDY, SamplingParams(temperature=1.0, top_p=0.9)):
            run_prompt(runner, num_tokens, block_size, params)


def warm_up_mixed(runner: TorchRunner, options: EngineOptions, progress: Progress) -> None:
    """Prompts beside rows that decode, in each of the kernels that attention and linears take for them: the first such step of
    requests would make all streams wait for a compiler."""
    passes = list(_mixed(runner, options))
    runner.compile([StepPlan(rows=rows) for rows in passes], "prompts beside decodes", progress)
    for rows in passes:
        _run(runner, rows)


def _mixed(runner: TorchRunner, options: EngineOptions) -> Iterator[list[Row]]:
    if options.max_batch < 2:
        return  # there is no such step
    spec, block_size = runner.spec, options.block_size
    num_kv_heads = heads_per_rank(spec.num_kv_heads, 1 if runner.ranks is None else runner.ranks.ranks.num_ranks)
    group = spec.num_heads // spec.num_kv_heads
    room = min(runner.max_model_len, runner.num_blocks * block_size) - block_size
    for lines, num_heads in zip(_QUERY_LINES, _HEADS, strict=True):
        num_decoding = min(-(-num_heads // num_kv_heads), options.max_batch - 1)
        count = max(2, -(-lines // group))
        if count <= min(room, options.token_budget - num_decoding):
            yield _mixed_rows(num_decoding, count, block_size, prefix=block_size)
    for num_tokens in _FEW_TOKENS:
        num_decoding = min(num_tokens - 2, options.max_batch - 1)
        if num_tokens - num_decoding <= room and num_tokens <= options.token_budget:
            yield _mixed_rows(num_decoding, num_tokens - num_decoding, block_size, prefix=block_size)
    num_decoding = min(_DECODING, options.max_batch - 1)
    count = min(room, options.token_budget - num_decoding)
    if count > 1:
        yield _mixed_rows(num_decoding, count, block_size, prefix=0)


def run_prompt(runner: TorchRunner, num_tokens: int, block_size: int, params: SamplingParams) -> None:
    """Blocks from the first one are overwritten: no request has used them yet."""
    sequence = _WarmUp(0, [0] * num_tokens, list(range(blocks_for(num_tokens, block_size))), params)
    _run(runner, [Row(sequence=sequence, start=0, count=num_tokens, samples=1)])


def _mixed_rows(num_decoding: int, count: int, block_size: int, prefix: int) -> list[Row]:
    """Rows that decode their second token, and a chunk of so many tokens behind a prefix, all over each other."""
    decoding = [_WarmUp(key, [0, 0], [0], _GREEDY) for key in range(1, num_decoding + 1)]
    chunk = _WarmUp(0, [0] * (prefix + count), list(range(blocks_for(prefix + count, block_size))), _GREEDY)
    rows = [Row(sequence=sequence, start=1, count=1, samples=1) for sequence in decoding]
    return [*rows, Row(sequence=chunk, start=prefix, count=count, samples=1)]


def _run(runner: TorchRunner, rows: list[Row]) -> None:
    runner.launch(StepPlan(rows=rows))
    runner.collect()
    runner.launch(StepPlan(released=[row.sequence.key for row in rows]))
    runner.collect()


@dataclass(frozen=True, slots=True)
class _WarmUp:
    """A sequence that no engine knows."""

    key: int
    tokens: list[int]
    block_table: list[int]
    params: SamplingParams
    request_id: RequestId = RequestId("warm-up")
    sample: int = 0
    images: tuple[Image, ...] = ()
    adapter: LoadedAdapter | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)
