"""The C kernels: right on odd shapes, the same bits in every batch, and replaced by PyTorch's where they cannot be built."""

from __future__ import annotations

import functools
import itertools
import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from processors import TARGETS

from kvrelay.config import Environment, read_environment
from kvrelay.kernels.base import AttentionBatch, ForwardBatch, HeadShape
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.native.build import KernelsUnavailableError, load_library
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.kernels.native.room import WeightRoom
from kvrelay.kernels.torch_kernels import TorchKernels

CPU = torch.device("cpu")
NUM_SLOTS = 4096


def environment(cache_dir: pathlib.Path, *, native_kernels: bool = True) -> Environment:
    return Environment(cache_dir=cache_dir, log_level="info", offline=True, native_kernels=native_kernels)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected, atol=tolerance * scale, rtol=0)


# ---- linear ----


def ways(kernels: NativeKernels) -> list[bool]:
    """Whether a linear layer is computed as for the bulk of prompts: where that is another way, both."""
    return [False, True] if kernels.has_bulk else [False]


@pytest.mark.parametrize(("out_size", "in_size"), [(1, 1), (16, 4), (17, 3), (31, 64), (100, 1301), (96, 640), (130, 37)])
def test_linear_of_any_shape(kernels: NativeKernels, out_size: int, in_size: int) -> None:
    weight, bias = randn(out_size, in_size, seed=1), randn(out_size, seed=2)
    packed, unbiased = kernels.pack(weight, bias), kernels.pack(weight, None)
    for rows, bulk in itertools.product([*range(28), 64, 70, 161, 330], ways(kernels)):
        x = randn(rows, in_size, seed=rows)
        product = x.double() @ weight.double().T
        tolerance = 4e-7 * math.sqrt(in_size)
        if rows:
            assert_near(kernels.linear(x, packed, bulk=bulk), product + bias.double(), tolerance)
            assert_near(kernels.linear(x, unbiased, bulk=bulk), product, tolerance)
        assert kernels.linear(x, packed, bulk=bulk).shape == (rows, out_size)


@pytest.mark.parametrize(("out_size", "in_size"), [(50, 577), (96, 1536)])
def test_a_row_has_the_same_bits_in_every_batch(kernels: NativeKernels, threads: None, out_size: int, in_size: int) -> None:
    packed = kernels.pack(randn(out_size, in_size, seed=1), randn(out_size, seed=2))
    x = randn(330, in_size, seed=3)
    for bulk in ways(kernels):
        alone = torch.cat([kernels.linear(x[row : row + 1], packed, bulk=bulk) for row in range(330)])
        for rows, num_threads in itertools.product([*range(1, 71), 160, 161, 330], [1, 2, 3]):
            torch.set_num_threads(num_threads)
            assert torch.equal(kernels.linear(x[:rows], packed, bulk=bulk), alone[:rows]), (rows, num_threads, bulk)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])  # parts of numbers have the range of numbers
def test_no_way_is_less_exact(kernels: NativeKernels, scale: float) -> None:
    x, weight = randn(200, 1536, seed=1) * scale, randn(96, 1536, seed=2)
    packed, product = kernels.pack(weight, None), x.double() @ weight.double().T
    for bulk in ways(kernels):
        error = (kernels.linear(x, packed, bulk=bulk).double() - product).square().mean().sqrt()
        assert error < 2e-6 * product.square().mean().sqrt()


def test_embedding_gives_back_the_weights_rows(kernels: NativeKernels) -> None:
    weight = randn(75, 21)
    packed = kernels.pack(weight.clone(), None)
    ids = torch.randperm(75, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kernels.embed(ids, packed), weight[ids])


@pytest.mark.parametrize("wrong", [-1, 75, 1 << 40])
def test_an_unknown_token_is_an_error_and_no_crash(kernels: NativeKernels, wrong: int) -> None:
    packed = kernels.pack(randn(75, 21), None)
    with pytest.raises(IndexError, match=str(wrong)):
        kernels.embed(torch.tensor([3, wrong]), packed)


def test_what_c_cannot_read_is_refused(kernels: NativeKernels) -> None:
    packed = kernels.pack(randn(8, 8), None)
    for x in (randn(3, 9), randn(3, 8).double(), randn(8, 3).T, randn(3, 16)[:, ::2]):
        with pytest.raises(AssertionError):
            kernels.linear(x, packed)


# ---- elementwise ----


@pytest.mark.parametrize("width", [1, 3, 8, 33, 64, 576, 1030])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_norms(kernels: NativeKernels, rows: int, width: int) -> None:
    x, residual, weight = randn(rows, width, seed=1), randn(rows, width, seed=2), randn(width, seed=3)
    total = x + residual

    def normed(values: torch.Tensor) -> torch.Tensor:
        wide = values.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert_near(kernels.rms_norm(x, weight, 1e-5), normed(x))
    got = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_near(got, normed(total))
    assert torch.equal(got[-1:], kernels.rms_norm(total[-1:], weight, 1e-5))


@pytest.mark.parametrize("width", [1, 7, 16, 100, 1536])
@pytest.mark.parametrize("rows", [1, 9])
def test_silu_mul(kernels: NativeKernels, rows: int, width: int) -> None:
    gate_up = randn(rows, 2 * width) * 8
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(kernels.silu_mul(gate_up).double(), expected, rtol=1e-6, atol=1e-30)


def test_silu_over_the_whole_range(kernels: NativeKernels) -> None:
    gate = torch.cat([torch.linspace(-87, 200, 100_000), torch.tensor([-1e30, -200.0, -0.0, 0.0, 1e30])])
    got = kernels.silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    expected = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(got.double(), expected, rtol=5e-7, atol=1e-7)
    nan = kernels.silu_mul(torch.tensor([[math.nan, math.inf, 1.0, 1.0]]))
    assert math.isnan(nan[0, 0])
    assert nan[0, 1] == math.inf


# ---- rotary embedding and attention ----


def make_batch(queries: list[int], contexts: list[int], block_size: int) -> ForwardBatch:
    """Each row's context in blocks of its own, in shuffled order."""
    free = torch.randperm(NUM_SLOTS // block_size, generator=torch.Generator().manual_seed(7)).tolist()
    tables = [[free.pop() for _ in range(math.ceil(context / block_size))] for context in contexts]
    width = max(map(len, tables))
    positions = [range(context - count, context) for count, context in zip(queries, contexts, strict=True)]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for table, places in zip(tables, positions, strict=True)
        for p in places
    ]
    return ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor([p for places in positions for p in places]),
        slots=torch.tensor(slots),
        attention=AttentionBatch(
            query_start=torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            max_query=max(queries),
            max_context=max(contexts),
        ),
        logit_rows=torch.zeros(0, dtype=torch.int64),
    )


class Context:
    """Random keys and values of some rows, which can be laid out in blocks of any size. All else in memory is NaN."""

    def __init__(self, shape: HeadShape, contexts: list[int]) -> None:
        self.shape = shape
        self.contexts = contexts
        self.keys = [randn(context, shape.num_kv_heads, shape.head_dim, seed=row) for row, context in enumerate(contexts)]
        self.values = [randn(*keys.shape, seed=100 + row) for row, keys in enumerate(self.keys)]
        self.q = [randn(context, shape.num_heads, shape.head_dim, seed=200 + row) * 2 for row, context in enumerate(contexts)]

    def memory(self, block_size: int) -> torch.Tensor:
        kv = torch.full((2, NUM_SLOTS // block_size, block_size, self.shape.num_kv_heads, self.shape.head_dim), math.nan)
        slots = make_batch(self.contexts, self.contexts, block_size).slots
        kv.flatten(1, 2)[0, slots] = torch.cat(self.keys)
        kv.flatten(1, 2)[1, slots] = torch.cat(self.values)
        return kv

    def attend(self, kernels: NativeKernels, queries: list[int], block_size: int) -> list[torch.Tensor]:
        """The last `queries` of each row, computed together."""
        q = torch.cat([row[len(row) - count :] for row, count in zip(self.q, queries, strict=True)])
        batch = make_batch(queries, self.contexts, block_size)
        out = kernels.attention(q, self.shape, batch, self.memory(block_size), self.shape.head_dim**-0.5)
        return list(out.split(queries))

    @functools.cache  # noqa: B019 - there are few
    def expected(self, row: int, count: int) -> torch.Tensor:
        group = self.shape.num_heads // self.shape.num_kv_heads
        q = self.q[row][self.contexts[row] - count :].double().transpose(0, 1)
        keys, values = (x[row].double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (self.keys, self.values))
        scores = q @ keys.transpose(1, 2) * self.shape.head_dim**-0.5
        seen = torch.ones_like(scores[0]).tril(self.contexts[row] - count).bool()
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return (weights @ values).transpose(0, 1).flatten(1)


@functools.cache
def mixed_rows(shape: HeadShape) -> Context:
    """The same for every block size and kind of processor, and what is expected of it with it."""
    return Context(shape, [1, 5, 64, 65, 130, 300, 513])


SHAPES = [HeadShape(9, 3, 64), HeadShape(4, 4, 16), HeadShape(8, 1, 32), HeadShape(5, 1, 48), HeadShape(2, 1, 128)]
UNUSUAL_SHAPES = [HeadShape(4, 2, 20), HeadShape(2, 1, 6), HeadShape(70, 1, 16), HeadShape(1, 1, 320)]


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [*itertools.product(SHAPES, [1, 7, 16, 24, 32]), *((shape, 24) for shape in UNUSUAL_SHAPES)],
    ids=str,
)
def test_attention_of_mixed_rows(kernels: NativeKernels, shape: HeadShape, block_size: int) -> None:
    context = mixed_rows(shape)
    for queries in ([1] * 7, [1, 5, 1, 33, 130, 1, 77], [1, 2, 64, 1, 17, 300, 1]):
        for row, got in enumerate(context.attend(kernels, queries, block_size)):
            assert_near(got, context.expected(row, queries[row]), 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_has_the_same_bits_however_it_is_computed(kernels: NativeKernels, threads: None, shape: HeadShape) -> None:
    """Alone or in a batch, as a prompt or token by token, with any block size and number of threads."""
    contexts = [700, 257, 90]
    together = Context(shape, contexts)
    whole = together.attend(kernels, contexts, 16)
    for num_threads, block_size in ((1, 7), (2, 32), (3, 16)):
        torch.set_num_threads(num_threads)
        for queries in ([1, 1, 1], [40, 1, 90], [5, 256, 33], [259, 3, 2]):
            for got, expected in zip(together.attend(kernels, queries, block_size), whole, strict=True):
                assert torch.equal(got, expected[len(expected) - len(got) :]), (num_threads, block_size, queries)
    alone = Context(shape, contexts[:1])
    torch.set_num_threads(2)
    assert torch.equal(alone.attend(kernels, [1], 16)[0], whole[0][-1:])


def test_large_scores_do_not_overflow(kernels: NativeKernels) -> None:
    context = Context(HeadShape(3, 1, 64), [400])
    context.q = [row * 100 for row in context.q]
    (got,) = context.attend(kernels, [400], 16)
    assert_near(got, context.expected(0, 400), 1e-3)  # scores of several hundred have few digits behind the point


@pytest.mark.parametrize("shape", [HeadShape(9, 3, 64), HeadShape(4, 2, 20), HeadShape(2, 1, 6)], ids=str)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("queries", [[1], [3, 1, 40]])
def test_rope_and_store(kernels: NativeKernels, shape: HeadShape, with_norms: bool, queries: list[int]) -> None:
    batch = make_batch(queries, [count + 9 for count in queries], 16)
    qkv = randn(sum(queries), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    cos_sin = randn(64, shape.head_dim, seed=1)
    norms = (randn(shape.head_dim, seed=2), randn(shape.head_dim, seed=3)) if with_norms else (None, None)
    kv = torch.zeros(2, NUM_SLOTS // 16, 16, shape.num_kv_heads, shape.head_dim)
    expected_kv = kv.clone()
    expected = TorchKernels().rope_and_store(qkv, shape, cos_sin, batch, expected_kv, *norms, 1e-6)
    got = kernels.rope_and_store(qkv, shape, cos_sin, batch, kv, *norms, 1e-6)
    torch.testing.assert_close(got, expected, atol=5e-6, rtol=0)
    torch.testing.assert_close(kv, expected_kv, atol=5e-6, rtol=0)
    last = make_batch(queries[-1:], [queries[-1] + 9], 16)
    alone = kernels.rope_and_store(qkv[-queries[-1] :], shape, cos_sin, last, kv, *norms, 1e-6)
    assert torch.equal(alone, got[-queries[-1] :])


# ---- memory of weights ----


def test_weights_lie_side_by_side_on_lines_of_their_own() -> None:
    asked: list[tuple[int, int]] = []
    room = WeightRoom(lambda address, size_bytes: asked.append((address, size_bytes)))
    sizes = [1, 65, 0, 20000, 1 << 24, 1 << 26, 3]
    taken = [room.take(num_bytes) for num_bytes in sizes]
    for index, weights in enumerate(taken):
        weights.fill_(index)
    assert [tensor.numel() for tensor in taken] == sizes
    assert all(bool((tensor == index).all()) for index, tensor in enumerate(taken))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in taken if tensor.numel())
    assert taken[1].data_ptr() == taken[0].data_ptr() + 64
    assert all(address % (1 << 21) == 0 and size_bytes % (1 << 21) == 0 for address, size_bytes in asked)


# ---- building and choosing ----


def test_float32_on_a_cpu_gets_native_kernels() -> None:
    assert isinstance(choose_kernels(CPU, torch.float32, read_environment()), NativeKernels)


def test_all_else_gets_the_reference(tmp_path: pathlib.Path) -> None:
    chosen = [
        choose_kernels(CPU, torch.bfloat16, environment(tmp_path)),
        choose_kernels(CPU, torch.float32, environment(tmp_path, native_kernels=False)),
    ]
    assert all(isinstance(kernels, TorchKernels) for kernels in chosen)


def test_without_a_compiler_one_line_says_why(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(choose_kernels(CPU, torch.float32, environment(tmp_path)), TorchKernels)
    (record,) = caplog.records
    assert "no C compiler" in str(record.__dict__["fields"]["reason"])


def fake_compiler(folder: pathlib.Path, script: str) -> str:
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def quick_compiler(folder: pathlib.Path, before: str = "") -> str:
    """Has made its library already, as one for any processor."""
    made = load_library(read_environment().cache_dir, processor=TARGETS["plain"])._name
    copy = f'case "$*" in *-shared*) while [ "$1" != -o ]; do shift; done; exec cp {made} "$2" ;; esac'
    return fake_compiler(folder, f"{before}\n{copy}")


def test_a_compiler_that_fails_is_named(tmp_path: pathlib.Path) -> None:
    compiler = fake_compiler(tmp_path, 'echo "linear.c:1: error: out of coffee" >&2; exit 1')
    with pytest.raises(KernelsUnavailableError, match=r"fake-cc failed: linear\.c:1: error: out of coffee"):
        load_library(tmp_path, [compiler])
    assert not list((tmp_path / "kernels").glob("*.so*"))


def test_a_compiler_that_does_not_know_this_processor(tmp_path: pathlib.Path) -> None:
    compiler = quick_compiler(tmp_path, 'case "$*" in *march*) echo "error: bad -march" >&2; exit 1 ;; esac')
    kernels = NativeKernels(load_library(tmp_path, [compiler]))
    x, weight = randn(7, 33), randn(20, 33, seed=1)
    assert_near(kernels.linear(x, kernels.pack(weight, None)), x.double() @ weight.double().T)


def test_a_damaged_library_is_built_again(tmp_path: pathlib.Path) -> None:
    compiler = quick_compiler(tmp_path)
    load_library(tmp_path / "elsewhere", [compiler])
    (good,) = (tmp_path / "elsewhere" / "kernels").glob("*.so")
    (tmp_path / "kernels").mkdir()
    damaged = tmp_path / "kernels" / good.name
    damaged.write_bytes(b"not a library")
    NativeKernels(load_library(tmp_path, [compiler]))
    assert damaged.stat().st_size > 1000


def test_a_cache_that_cannot_be_written_to(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    NativeKernels(load_library(tmp_path, [quick_compiler(tmp_path)]))


MULTIPLY = """
import pathlib, sys, torch
from kvrelay.kernels.native.build import load_library
from kvrelay.kernels.native.kernels import NativeKernels
folder, compiler = sys.argv[1:]
kernels = NativeKernels(load_library(pathlib.Path(folder), [compiler]))
print(float(kernels.linear(torch.ones(2, 5), kernels.pack(torch.ones(3, 5), None)).sum()))
"""


def test_two_processes_at_once_build_once(tmp_path: pathlib.Path) -> None:
    log_path, program = tmp_path / "runs", tmp_path / "multiply.py"
    program.write_text(MULTIPLY)
    compiler = quick_compiler(tmp_path, f'case "$*" in *-shared*) echo run >> {log_path}; sleep 1 ;; esac')
    command = [sys.executable, str(program), str(tmp_path), compiler]
    env = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    for process in running:
        assert process.communicate()[0].strip() == "30.0"
    assert log_path.read_text().split() == ["run"]
    assert len(list((tmp_path / "kernels").glob("*.so*"))) == 1
