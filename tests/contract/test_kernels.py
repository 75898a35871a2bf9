"""Every implementation of `Kernels` computes what the formulas say: float64, token by token, written out here."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from triton_here import HAS_TRITON, ON_CARD, OnDevice, use_few_programs

from kvrelay.config import read_environment
from kvrelay.kernels.base import AttentionBatch, ForwardBatch, HeadShape, Kernels
from kvrelay.kernels.torch_kernels import TorchKernels

# PyTorch says so once where the CPU has no bfloat16 in hardware
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

CPU = torch.device("cpu")
NUM_BLOCKS = 48
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@functools.cache
def implementations() -> dict[str, Callable[[], Kernels]]:
    """All there are: the reference, what is chosen for this CPU if that is another one, and, with Triton, those for cards."""
    found: dict[str, Callable[[], Kernels]] = {"torch": TorchKernels}
    if importlib.util.find_spec("kvrelay.kernels.choose"):
        from kvrelay.kernels.choose import choose_kernels

        chosen = choose_kernels(CPU, torch.float32, read_environment())
        if not isinstance(chosen, TorchKernels):
            found[type(chosen).__name__] = lambda: chosen
    if HAS_TRITON:
        from kvrelay.kernels.cuda.kernels import CudaKernels

        use_few_programs()
        found["CudaKernels"] = lambda: OnDevice(CudaKernels())
    return found


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    if name == "torch":
        return torch.float32, torch.bfloat16
    if name != "CudaKernels":
        return (torch.float32,)
    # Triton's interpreter takes the bits of a bfloat16 for an integer, so float16 stands for it there
    return (torch.float32, torch.float16, torch.bfloat16) if ON_CARD else (torch.float32, torch.float16)


CASES = [
    pytest.param(
        name,
        dtype,
        id=f"{name}-{str(dtype).removeprefix('torch.')}",
        marks=[pytest.mark.cuda] if name == "CudaKernels" and ON_CARD else [],
    )
    for name in implementations()
    for dtype in dtypes_of(name)
]
every_kernel = pytest.mark.parametrize(("name", "dtype"), CASES)
SHAPES = [
    HeadShape(num_heads=9, num_kv_heads=3, head_dim=64),
    HeadShape(num_heads=4, num_kv_heads=4, head_dim=24),
    HeadShape(num_heads=8, num_kv_heads=1, head_dim=16),
    HeadShape(num_heads=2, num_kv_heads=2, head_dim=128),
]


def kernels_of(name: str) -> Kernels:
    return implementations()[name]()


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got.double(), expected.double(), atol=TOLERANCE[dtype] * scale, rtol=0)


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def make_batch(
    queries: list[int], contexts: list[int], block_size: int, device: torch.device = CPU
) -> tuple[ForwardBatch, list[list[int]]]:
    """Rows in shuffled blocks; also the slot of every position of every row."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[free.pop() for _ in range(math.ceil(context / block_size))] for context in contexts]
    slots_of = [
        [table[p // block_size] * block_size + p % block_size for p in range(c)]
        for table, c in zip(tables, contexts, strict=True)
    ]
    positions = [p for count, context in zip(queries, contexts, strict=True) for p in range(context - count, context)]
    slots = [s for count, row in zip(queries, slots_of, strict=True) for s in row[len(row) - count :]]
    starts = [sum(queries[:row]) for row in range(len(queries) + 1)]
    width = max(map(len, tables)) + 1  # a table may be wider than anybody needs
    attention = AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32, device=device),
        max_query=max(queries),
        max_context=max(contexts),
    )
    batch = ForwardBatch(
        token_ids=torch.zeros(len(slots), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        attention=attention,
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
    )
    return batch, slots_of


@every_kernel
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 8, 17, 64, 130])
@pytest.mark.parametrize(("out_size", "in_size"), [(576, 192), (37, 50), (1, 8)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(name: str, dtype: torch.dtype, num_tokens: int, out_size: int, in_size: int, with_bias: bool) -> None:
    weight = random(out_size, in_size, seed=1, dtype=dtype)
    bias = random(out_size, seed=2, dtype=dtype) if with_bias else None
    x = random(num_tokens, in_size, seed=3, dtype=dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    kernels = kernels_of(name)
    packed = kernels.pack(weight.clone(), bias)
    assert (packed.out_features, packed.in_features) == (out_size, in_size)
    assert_near(kernels.linear(x, packed), expected, dtype)


@every_kernel
def test_embed_gives_rows_that_may_be_written_to(name: str, dtype: torch.dtype) -> None:
    weight = random(37, 50, seed=1, dtype=dtype)
    kernels = kernels_of(name)
    packed = kernels.pack(weight.clone(), None)
    ids = torch.tensor([0, 36, 5, 5])
    rows = kernels.embed(ids, packed)
    assert torch.equal(rows, weight[ids])
    rows.zero_()  # as the residual stream is: the weights must not feel it
    assert torch.equal(kernels.embed(ids, packed), weight[ids])


@every_kernel
@pytest.mark.parametrize("width", [576, 50])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_norms(name: str, dtype: torch.dtype, width: int, num_tokens: int) -> None:
    kernels = kernels_of(name)
    x, weight = random(num_tokens, width, seed=1, dtype=dtype), random(width, seed=2, dtype=dtype)
    assert_near(kernels.rms_norm(x, weight, 1e-5), norm64(x, weight, 1e-5), dtype)
    residual = random(num_tokens, width, seed=3, dtype=dtype)
    total = (residual.float() + x.float()).to(dtype)
    normed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert_near(residual, total, dtype)
    assert_near(normed, norm64(total, weight, 1e-5), dtype)


@every_kernel
@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("width", [1536, 50, 3])
def test_silu_mul(name: str, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    gate_up = random(num_tokens, 2 * width, seed=1, dtype=dtype) * 8
    gate_up[0, 0] = -90.0  # exp overflows in float32
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(kernels_of(name).silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


@every_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_and_store(name: str, dtype: torch.dtype, shape: HeadShape, with_norm: bool) -> None:
    queries, contexts, block_size = [1, 6, 1], [9, 6, 1], 4
    batch, _ = make_batch(queries, contexts, block_size)
    num_tokens, half = sum(queries), shape.head_dim // 2
    qkv = random(num_tokens, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, seed=1, dtype=dtype)
    angles = torch.rand(16, half, generator=torch.Generator().manual_seed(5)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q_norm, k_norm = (random(shape.head_dim, seed=s, dtype=dtype) for s in (6, 7)) if with_norm else (None, None)
    kv = random(2, NUM_BLOCKS, block_size, shape.num_kv_heads, shape.head_dim, seed=8, dtype=dtype)
    before = kv.clone()

    heads = qkv.double().view(num_tokens, -1, shape.head_dim)
    q, k, v = heads.split_with_sizes([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = norm64(q, q_norm, 1e-5), norm64(k, k_norm, 1e-5)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turn = torch.polar(torch.ones(num_tokens, 1, half).double(), angles[batch.positions].double()[:, None, :])
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    got = kernels_of(name).rope_and_store(qkv, shape, cos_sin, batch, kv, q_norm, k_norm, 1e-5)
    assert got.shape == (num_tokens, shape.num_heads, shape.head_dim)
    assert_near(got, rotated(q), dtype)
    keys, values = kv.flatten(1, 2)
    assert_near(keys[batch.slots], rotated(k), dtype)
    assert_near(values[batch.slots], v, dtype)
    untouched = torch.ones(NUM_BLOCKS * block_size, dtype=torch.bool)
    untouched[batch.slots] = False
    assert torch.equal(kv.flatten(1, 2)[:, untouched], before.flatten(1, 2)[:, untouched])


ROWS = {
    "one decode": ([1], [33]),
    "first token": ([1], [1]),
    "decodes": ([1] * 7, [1, 40, 3, 17, 16, 39, 8]),
    "prompt": ([40], [40]),
    "chunk": ([13], [35]),
    "prompts": ([5, 17, 2], [5, 17, 2]),
    "mixed": ([1, 9, 1, 20, 1, 2], [30, 9, 1, 33, 16, 17]),
}


BLOCK_SIZES = (4, 16)


def attention_cases() -> Iterator[ParameterSet]:
    """All of them; of those that Triton interprets, which take seconds, every pair of two parameters' values in `make test`."""
    for case, (place, shape), (number, rows), size in itertools.product(CASES, enumerate(SHAPES), enumerate(ROWS), BLOCK_SIZES):
        name, dtype = case.values
        taken = (BLOCK_SIZES[(number + place) % 2], dtypes_of(str(name))[(number // 2 + place) % 2 - 1])
        is_long = name == "CudaKernels" and not ON_CARD and taken != (size, dtype)
        marks = [*case.marks, *([pytest.mark.long] if is_long else [])]
        yield pytest.param(name, dtype, shape, ROWS[rows], size, id=f"{size}-{rows}-{shape}-{case.id}", marks=marks)


@pytest.mark.parametrize(("name", "dtype", "shape", "rows", "block_size"), list(attention_cases()))
def test_attention(name: str, dtype: torch.dtype, shape: HeadShape, rows: tuple[list[int], list[int]], block_size: int) -> None:
    queries, contexts = rows
    batch, slots_of = make_batch(queries, contexts, block_size)
    kv = random(2, NUM_BLOCKS, block_size, shape.num_kv_heads, shape.head_dim, seed=1, dtype=dtype)
    poison_outside(kv, slots_of)
    q = random(sum(queries), shape.num_heads, shape.head_dim, seed=2, dtype=dtype)
    got = kernels_of(name).attention(q, shape, batch, kv, 0.2)
    assert got.shape == (sum(queries), shape.num_heads * shape.head_dim)
    assert_near(got.view_as(q), attention64(q, queries, slots_of, kv, shape, 0.2), dtype)


def poison_outside(kv: torch.Tensor, slots_of: list[list[int]]) -> None:
    """Makes every slot outside the contexts NaN, so that reading one shows."""
    outside = torch.ones(kv.shape[1] * kv.shape[2], dtype=torch.bool)
    outside[[slot for row in slots_of for slot in row]] = False
    kv.view(2, -1, *kv.shape[3:])[:, outside] = float("nan")


def attention64(
    q: torch.Tensor, queries: list[int], slots_of: list[list[int]], kv: torch.Tensor, shape: HeadShape, scale: float
) -> torch.Tensor:
    keys, values = kv.double().flatten(1, 2)
    out = torch.empty(q.shape, dtype=torch.float64)
    token = 0
    for count, slots in zip(queries, slots_of, strict=True):
        for seen in range(len(slots) - count + 1, len(slots) + 1):
            for head in range(shape.num_heads):
                kv_head = head * shape.num_kv_heads // shape.num_heads
                weights = (keys[slots[:seen], kv_head] @ q[token, head].double() * scale).softmax(0)
                out[token, head] = weights @ values[slots[:seen], kv_head]
            token += 1
    return out


@every_kernel
def test_large_scores_do_not_overflow(name: str, dtype: torch.dtype) -> None:
    shape = SHAPES[0]
    batch, slots_of = make_batch([1, 3], [12, 3], 4)
    kv = random(2, NUM_BLOCKS, 4, shape.num_kv_heads, shape.head_dim, seed=1, dtype=dtype) * 30
    poison_outside(kv, slots_of)
    q = random(4, shape.num_heads, shape.head_dim, seed=2, dtype=dtype) * 30
    got = kernels_of(name).attention(q, shape, batch, kv, 0.125)
    assert_near(got.view_as(q), attention64(q, [1, 3], slots_of, kv, shape, 0.125), dtype)


def test_reference_cuts_big_work_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits on memory change how the reference computes, not what."""
    monkeypatch.setattr("kvrelay.kernels.torch_kernels._MAX_SCORES", 400)
    monkeypatch.setattr("kvrelay.kernels.torch_kernels._MAX_GATHERED", 20_000)
    for queries, contexts in ROWS.values():
        test_attention("torch", torch.float32, SHAPES[0], (queries, contexts), 4)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA card")
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("limit", [1 << 26, 20_000])
def test_reference_attention_on_cuda(rows: tuple[list[int], list[int]], limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.kernels.torch_kernels._MAX_GATHERED", limit)
    device, shape = torch.device("cuda"), SHAPES[0]
    batch, slots_of = make_batch(*rows, 16, device)
    kv = random(2, NUM_BLOCKS, 16, shape.num_kv_heads, shape.head_dim, seed=1, dtype=torch.float32)
    poison_outside(kv, slots_of)
    q = random(sum(rows[0]), shape.num_heads, shape.head_dim, seed=2, dtype=torch.float32)
    got = TorchKernels().attention(q.to(device), shape, batch, kv.to(device), 0.2)
    torch.testing.assert_close(
        got.cpu().view_as(q).double(), attention64(q, rows[0], slots_of, kv, shape, 0.2), atol=1e-4, rtol=0
    )
