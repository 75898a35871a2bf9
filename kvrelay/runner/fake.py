"""A runner without a model, for tests and for measuring everything around the runner.

Its next token is a hash of all tokens so far (and of seed and sample, unless greedy), so cross-talk between requests, a token
lost, repeated or out of place, or a wrong sample number show as other tokens. It keeps KV too: each slot holds a signature of
the token written there and of everything before it, as real KV does. With `verify` on, every step checks that what each row
would attend to was written for exactly its own tokens, at their positions; block tables, copies, reference counts and the
prefix cache cannot be wrong unnoticed. A violated check is an AssertionError. Copies to and from the host happen at the last
moment, when they are said to have ended, so that whatever was reused too early shows.

It has no probabilities: parameters that shape them (temperature above 0, top_k, penalties, logit_bias, ...) change nothing,
logprobs are made up, and a grammar is refused. The candidates it names for a beam search are made up too, from all tokens so
far, in falling order with unequal logprobs; their end-of-text token comes at any place, first about once in `eos_one_in` times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.fence import PASSED, Fence
from kvrelay.engine.interfaces import Allocate, LayerListener, Row, RowFailure, RowResult, SequenceView, StepPlan, StepResult
from kvrelay.wire.kv import Layout
from kvrelay.wire.serving import Logprob, TokenLogprobs

MAX_LAUNCHED = 2
_NUM_LAYERS = 2
_NO_GRAMMAR = RowFailure("response_format: the fake runner cannot follow a grammar", param="response_format")
_NOTHING_WRITTEN = np.uint64(0)

Hashes = NDArray[np.uint64]


@dataclass(slots=True)
class _Known:
    """How far a sequence's signature was computed."""

    num_tokens: int
    signature: int


@dataclass(slots=True)
class _Copies:
    """Under way."""

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]
    num_polls_left: int


class FakeRunner:
    """Implements `engine.interfaces.Runner`.

    `tokens` are the ids it may give, all by default. End-of-text comes about once in `eos_one_in` tokens (never if 0), as the
    first of `eos_token_ids`. A step takes `step_time_s`, counted from its launch or from the end of the one before it.
    A copy to or from one of the `num_host_blocks` ends when it was asked for as often as `copy_delay` says, at least once;
    `end_copies` ends them all. With `runs_ahead` it takes plans that lack the tokens of the one before.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        vocab_size: int,
        block_size: int = 16,
        verify: bool = True,
        tokens: Sequence[int] | None = None,
        eos_token_ids: Sequence[int] = (),
        eos_one_in: int = 0,
        step_time_s: float = 0.0,
        max_model_len: int | None = None,
        fingerprint: str = "fake",
        allocate: Allocate | None = None,
        num_host_blocks: int = 0,
        copy_delay: Callable[[], int] = lambda: 1,
        runs_ahead: bool = False,
    ) -> None:
        assert not eos_one_in or eos_token_ids, "there is no end-of-text token to give"
        self.vocab_size = vocab_size
        self.max_model_len = num_blocks * block_size if max_model_len is None else max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.fingerprint = fingerprint
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._eos = tuple(eos_token_ids)
        self._eos_one_in = eos_one_in
        self._choices = [
            token for token in (range(vocab_size) if tokens is None else tokens) if token not in self.eos_token_ids
        ]
        self.layout = Layout(
            num_layers=_NUM_LAYERS,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=1,
            head_dim=1,
            dtype="uint64",
            item_bytes=8,
        )
        self._store = _SignatureStore(num_blocks, block_size, allocate, num_host_blocks) if verify else None
        self._num_host_blocks = num_host_blocks
        self._copy_delay = copy_delay
        self._copies: dict[int, _Copies] = {}
        self._num_copies = 0
        self._on_layer: LayerListener | None = None
        self._known: dict[int, _Known] = {}
        self._step_time_s = step_time_s
        self._busy_until_s = 0.0
        self._runs_ahead = runs_ahead
        self._launched: deque[tuple[float, list[Row], StepResult]] = deque()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._num_host_blocks

    @property
    def runs_ahead(self) -> bool:
        return self._runs_ahead and self._on_layer is None

    def begin_copies(self, saves: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> int:
        self._num_copies += 1
        self._copies[self._num_copies] = _Copies(list(saves), list(loads), self._copy_delay())
        return self._num_copies

    def finished_copies(self, wait_s: float = 0.0) -> list[int]:
        for copies in self._copies.values():
            copies.num_polls_left -= 1
        return self._finish([ticket for ticket, copies in self._copies.items() if copies.num_polls_left <= 0])

    def end_copies(self) -> None:
        """Every copy under way ends with the next `finished_copies`."""
        for copies in self._copies.values():
            copies.num_polls_left = 1

    def _finish(self, tickets: list[int]) -> list[int]:
        for ticket in tickets:
            copies = self._copies.pop(ticket)
            if self._store is not None:
                self._store.copy_to_host(copies.saves)
                self._store.copy_from_host(copies.loads)
        return tickets

    @property
    def num_known_sequences(self) -> int:
        return len(self._known)

    def on_layer(self, listener: LayerListener) -> None:
        self._on_layer = listener

    def expect(self, sequences: Sequence[SequenceView]) -> None:
        for sequence in sequences:
            self._known.setdefault(sequence.key, _Known(0, 0))

    def fence(self) -> Fence:
        return PASSED

    def launch(self, plan: StepPlan) -> None:
        assert len(self._launched) < MAX_LAUNCHED, "collect a plan before launching a third"
        for key in plan.released:
            self._known.pop(key, None)
        rows = self._with_chosen_tokens(plan.rows)
        if self._store is not None:
            self._store.copy_blocks(plan.copies)
            self._store.run(rows)
        if self._on_layer is not None and rows:
            for layer in range(_NUM_LAYERS):
                self._on_layer(layer, PASSED)
        signatures = self._signatures(rows)
        result = StepResult(rows=self._answer(rows, signatures))
        self._busy_until_s = max(time.monotonic(), self._busy_until_s) + self._step_time_s
        self._launched.append((self._busy_until_s, rows, result))

    def _with_chosen_tokens(self, rows: list[Row]) -> list[Row]:
        """Rows that start where their sequence ends see the token that the plan before chose for it."""
        if not any(row.start == len(row.sequence.tokens) for row in rows):
            return rows
        assert self.runs_ahead, "a row starts past its sequence's tokens"
        _, before, result = self._launched[-1]
        chosen = {row.sequence.key: answer for row, answer in zip(before, result.rows, strict=True) if row.samples == 1}
        return [
            Row(_Longer(row.sequence, (chosen[row.sequence.key].tokens or [0])[0]), row.start, row.count, row.samples)
            if row.start == len(row.sequence.tokens)
            else row
            for row in rows
        ]

    def collect(self) -> StepResult:
        assert self._launched, "nothing was launched"
        ready_s, _, result = self._launched.popleft()
        if self._step_time_s > 0.0:
            time.sleep(max(0.0, ready_s - time.monotonic()))
        return result

    def close(self) -> None:
        self._launched.clear()
        self._copies.clear()

    def _signatures(self, rows: list[Row]) -> list[int]:
        """Of each row's tokens up to its last computed one. Costs one hash per token that is new since the last step."""
        known = self._known
        fresh_tokens: list[int] = []
        fresh_positions: list[int] = []
        lengths: list[int] = []
        states: list[_Known] = []
        for row in rows:
            sequence, end = row.sequence, row.start + row.count
            state = known.get(sequence.key)
            if state is None or state.num_tokens > end:
                state = known[sequence.key] = _Known(0, 0)
            fresh_tokens += sequence.tokens[state.num_tokens : end]
            fresh_positions += range(state.num_tokens, end)
            lengths.append(end - state.num_tokens)
            state.num_tokens = end
            states.append(state)
        if not rows:
            return []
        sums = np.concatenate([[_NOTHING_WRITTEN], np.cumsum(_hash_tokens(fresh_tokens, fresh_positions))])
        ends = np.cumsum(lengths)
        added = (sums[ends] - sums[ends - lengths]).tolist()
        for state, amount in zip(states, added, strict=True):
            state.signature = (state.signature + amount) % 2**64
        return [state.signature for state in states]

    def _answer(self, rows: list[Row], signatures: list[int]) -> list[RowResult]:
        wanted: list[tuple[int, int, int]] = []  # signature, seed, sample of each token to choose
        for row, signature in zip(rows, signatures, strict=True):
            if row.samples:
                params = row.sequence.params
                if params.greedy:
                    wanted += [(signature, 0, 0)] * row.samples
                else:
                    first = row.sequence.sample
                    wanted += [(signature, params.seed % 2**64, first + 1 + index) for index in range(row.samples)]
        draws = iter(_hash_draws(wanted))
        results = [self._answer_row(row, [next(draws) for _ in range(row.samples)]) for row in rows]
        for row, signature, result in zip(rows, signatures, results, strict=True):
            if row.candidates:
                result.candidates = self._candidates(signature, row.candidates)
        return results

    def _answer_row(self, row: Row, draws: list[int]) -> RowResult:
        sequence = row.sequence
        params = sequence.params
        if draws and params.grammar is not None:
            return RowResult(tokens=[], failure=_NO_GRAMMAR)
        result = RowResult(tokens=[self._choose(draw, sequence) for draw in draws])
        if draws and params.logprobs is not None:
            number = params.logprobs
            result.logprobs = [self._logprobs(h, t, number) for h, t in zip(draws, result.tokens, strict=True)]
        if row.prompt_logprobs:
            result.prompt_logprobs = self._prompt_logprobs(row) or None
        return result

    def _choose(self, draw: int, sequence: SequenceView) -> int:
        params = sequence.params
        too_short = len(sequence.tokens) - sequence.num_prompt_tokens < params.min_tokens
        if self._eos_one_in and not too_short and (draw >> 32) % self._eos_one_in == 0:
            return self._eos[0]
        token = self._choices[draw % len(self._choices)]
        if too_short and params.stop_token_ids:
            while token in params.stop_token_ids:
                draw = _hash_draws([(draw, 0, 0)])[0]
                token = self._choices[draw % len(self._choices)]
        return token

    def _logprobs(self, draw: int, token: int, number: int) -> TokenLogprobs:
        """The token first, then its neighbours, each a little less likely."""
        best = -0.01 - (draw >> 56) / 256
        top = [((token + rank) % self.vocab_size, best - rank) for rank in range(min(number, self.vocab_size))]
        return TokenLogprobs(best, top, 1)

    def _candidates(self, signature: int, number: int) -> list[Logprob]:
        """Tokens from a place in the vocabulary that the signature gives, each a little less likely than the one before."""
        draws = _hash_draws([(signature, 0, 1 + rank) for rank in range(number)])
        first, size = draws[0] % len(self._choices), len(self._choices)
        tokens = [self._choices[(first + rank) % size] for rank in range(min(number, size))]
        if self._eos_one_in:
            tokens.insert((draws[0] >> 32) % self._eos_one_in, self._eos[0])
        gaps = ((np.array(draws, dtype=np.uint64) >> np.uint64(40)) + np.uint64(1)) / 2.0**24
        gaps[1:] *= 1 << draws[0] % 4  # at times it is sure of the first, so not all beams descend from the same few
        logprobs = -np.cumsum(gaps)
        return list(zip(tokens[:number], logprobs.tolist(), strict=False))

    def _prompt_logprobs(self, row: Row) -> list[TokenLogprobs]:
        tokens, number = row.sequence.tokens, row.sequence.params.prompt_logprobs or 0
        last = min(row.start + row.count, row.sequence.num_prompt_tokens - 1)
        signatures = _signatures_of(tokens[:last]).tolist()
        return [self._logprobs(signatures[p - 1], tokens[p], number) for p in range(row.start + 1, last + 1)]


class _Longer:
    """A sequence with one more token than it knows of. Implements `SequenceView`."""

    def __init__(self, sequence: SequenceView, token: int) -> None:
        self.key, self.request_id, self.sample = sequence.key, sequence.request_id, sequence.sample
        self.params, self.images, self.adapter = sequence.params, sequence.images, sequence.adapter
        self.tokens = [*sequence.tokens, token]
        self.num_prompt_tokens = sequence.num_prompt_tokens
        self.block_table = list(sequence.block_table)


class _SignatureStore:
    """What real KV memory is to a real runner, with a signature in place of each token's keys and values."""

    def __init__(self, num_blocks: int, block_size: int, allocate: Allocate | None, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._host: Hashes = np.zeros((_NUM_LAYERS, 2, num_host_blocks, block_size), dtype=np.uint64)
        self._num_blocks = num_blocks
        shape = (_NUM_LAYERS, 2, num_blocks, block_size)
        memory = bytearray(8 * int(np.prod(shape))) if allocate is None else allocate(8 * int(np.prod(shape))).buffer
        self.planes: Hashes = np.frombuffer(memory, dtype=np.uint64).reshape(shape)  # the same in every layer, K and V

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            assert 0 <= source < self._num_blocks, f"copy of block {source}, which does not exist"
            assert 0 <= target < self._num_blocks, f"copy to block {target}, which does not exist"
            self.planes[:, :, target] = self.planes[:, :, source]

    def copy_to_host(self, saves: list[tuple[int, int]]) -> None:
        for block, host_block in saves:
            self._check_copy(block, host_block)
            self._host[:, :, host_block] = self.planes[:, :, block]

    def copy_from_host(self, loads: list[tuple[int, int]]) -> None:
        for host_block, block in loads:
            self._check_copy(block, host_block)
            self.planes[:, :, block] = self._host[:, :, host_block]

    def _check_copy(self, block: int, host_block: int) -> None:
        assert 0 <= block < self._num_blocks, f"block {block} does not exist"
        assert 0 <= host_block < self._host.shape[2], f"host block {host_block} does not exist"

    def run(self, rows: list[Row]) -> None:
        """Writes what the rows compute, then checks what they attend to: as in a real layer, all is stored before any reads."""
        slots = [self._slots(row) for row in rows]
        expected = [_signatures_of(row.sequence.tokens[: row.start + row.count]) for row in rows]
        written = [own[row.start :] for row, own in zip(rows, slots, strict=True)]
        if written:
            every = np.concatenate(written)
            assert len(np.unique(every)) == len(every), "two rows of a step write the same slot"
        store = self.planes.reshape(_NUM_LAYERS * 2, -1)
        for row, own, signatures in zip(rows, written, expected, strict=True):
            store[:, own] = signatures[row.start :]
        for row, own, signatures in zip(rows, slots, expected, strict=True):
            wrong = np.flatnonzero(np.any(store[:, own] != signatures, axis=0))
            assert not len(wrong), (
                f"sequence {row.sequence.key} of {row.sequence.request_id}: position {wrong[0]} (block "
                f"{own[wrong[0]] // self._block_size}) does not hold the KV of this sequence's token"
            )

    def _slots(self, row: Row) -> NDArray[np.int64]:
        """Of the row's whole context."""
        sequence, end = row.sequence, row.start + row.count
        assert row.start >= 0, f"sequence {sequence.key}: a row from position {row.start}"
        assert row.count > 0, f"sequence {sequence.key}: a row without tokens"
        assert end <= len(sequence.tokens), f"sequence {sequence.key}: {end} tokens wanted, it has {len(sequence.tokens)}"
        is_last = end == len(sequence.tokens)
        assert is_last or not (row.samples or row.candidates), f"sequence {sequence.key}: sampled before its last token"
        positions = np.arange(end)
        table = np.array(sequence.block_table, dtype=np.int64)
        assert end <= len(table) * self._block_size, f"sequence {sequence.key}: {len(table)} blocks cannot hold {end} tokens"
        assert 0 <= table.min() <= table.max() < self._num_blocks, f"sequence {sequence.key}: a block that does not exist"
        return table[positions // self._block_size] * self._block_size + positions % self._block_size


def _signatures_of(tokens: Sequence[int]) -> Hashes:
    """After each token: a sum of hashes of (token, position), so equal exactly when all tokens up to there are equal."""
    return np.cumsum(_hash_tokens(tokens, range(len(tokens))))


def _hash_tokens(tokens: Sequence[int], positions: Sequence[int]) -> Hashes:
    values = np.array(tokens, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _scramble(values + np.array(positions, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.uint64(1))


def _hash_draws(wanted: list[tuple[int, int, int]]) -> list[int]:
    """Of (signature, seed, sample)."""
    if not wanted:
        return []
    signature, seed, sample = np.array(wanted, dtype=np.uint64).T
    choice = _scramble(seed * np.uint64(0xA24BAED4963EE407) + sample * np.uint64(0x9FB21C651E98DF25))
    hashes: list[int] = _scramble(signature ^ choice).tolist()
    return hashes


def _scramble(values: Hashes) -> Hashes:
    """The finaliser of SplitMix64: every input bit moves every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
