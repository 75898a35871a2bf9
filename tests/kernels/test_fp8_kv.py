"""KV in fp8: what is stored is what would be stored otherwise, rounded; what is read is what is stored."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from triton_here import DEVICE, HAS_TRITON, ON_CARD, use_few_programs

from kvrelay.kernels.base import HeadShape, Kernels
from kvrelay.kernels.fp8 import FP8, to_kv
from kvrelay.kernels.torch_kernels import TorchKernels

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from cases import TOLERANCE, Case, attention64, error, make, random_case

if HAS_TRITON:
    from kvrelay.kernels.cuda.decode import decode_attention
    from kvrelay.kernels.cuda.kernels import CudaKernels
    from kvrelay.kernels.cuda.prefill import paged_attention
    from kvrelay.kernels.cuda.table import DecodeChoice, PrefillChoice, choose_decode

    use_few_programs()

# Interpreted, bfloat16 is taken for an integer, and programs take seconds.
LIMITS = (
    {"max_context": 8192, "max_rows": 12, "max_kv_heads": 8}
    if ON_CARD
    else {"max_context": 60, "max_rows": 3, "max_kv_heads": 2}
)
KINDS = ("decode", "prompts", "chunks", "mixed")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
on_card = [pytest.mark.cuda] if ON_CARD else []


def implementations() -> Iterator[ParameterSet]:
    short = [torch.bfloat16] if ON_CARD else []
    for name, dtypes in {"torch": (torch.float32, torch.bfloat16), "triton": (torch.float32, torch.float16, *short)}.items():
        for dtype in dtypes:
            marks = [*on_card, *([needs_triton] if name == "triton" else [])]
            yield pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}", marks=marks)


def kernels_of(name: str) -> Kernels:
    return TorchKernels() if name == "torch" else CudaKernels(attention="triton")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("name", "dtype"), list(implementations()))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2 if ON_CARD else 1))
def test_attention_reads_what_is_stored(name: str, dtype: torch.dtype, kind: str, seed: int) -> None:
    case = random_case(seed, dtype, kind=kind, **LIMITS)
    if name == "torch":  # which knows no padding
        case = Case(case.shape, case.block_size, tuple(row for row in case.rows if row[1]) or ((1, 1),), dtype)
    q, batch, kv = make(case, DEVICE, seed)
    narrow = kv.to(FP8)
    got = kernels_of(name).attention(q, case.shape, batch, narrow, 0.1)
    assert got.dtype is dtype
    assert error(got, attention64(case, q, batch, narrow.float(), 0.1)) < TOLERANCE[dtype], case


@pytest.mark.parametrize(("name", "dtype"), list(implementations()))
@pytest.mark.parametrize("with_norm", [False, True])
def test_what_is_stored_is_rounded_and_stays_finite(name: str, dtype: torch.dtype, with_norm: bool) -> None:
    shape = HeadShape(9, 3, 64)
    case = Case(shape, 8, ((1, 9), (6, 6), (1, 1), (20, 33)), dtype)
    _, batch, kv = make(case, DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    qkv = torch.randn(case.num_tokens, 15 * 64, generator=generator, device=DEVICE).to(dtype)
    qkv *= torch.logspace(-3, 3.5, 15 * 64, device=DEVICE).to(dtype)  # some too large for fp8
    norms = [torch.randn(64, generator=generator, device=DEVICE).to(dtype) * 99 if with_norm else None for _ in range(2)]
    angles = torch.rand(64, 32, generator=generator, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    narrow, kernels = kv.to(FP8), kernels_of(name)
    plain_q = kernels.rope_and_store(qkv.clone(), shape, cos_sin, batch, kv, *norms, 1e-5)
    narrow_q = kernels.rope_and_store(qkv.clone(), shape, cos_sin, batch, narrow, *norms, 1e-5)
    assert torch.equal(plain_q, narrow_q) or name == "triton"  # interpreted, the reference stores
    torch.testing.assert_close(plain_q, narrow_q, atol=TOLERANCE[dtype] * float(plain_q.abs().max()), rtol=0)
    written = narrow.float().flatten(1, 2)[:, batch.slots]
    expected = to_kv(kv, FP8).float().flatten(1, 2)[:, batch.slots]
    assert written.abs().max() == 448.0
    if ON_CARD or name == "torch":
        torch.testing.assert_close(written, expected, atol=0.0, rtol=0.0)
    torch.testing.assert_close(narrow.float(), to_kv(kv, FP8).float(), atol=2.0**-8, rtol=0.13, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("num_heads", [pytest.param(count, marks=on_card) for count in (8, 64, 512, 2048)])
def test_decode_as_the_table_has_it(num_heads: int) -> None:
    dtype = torch.bfloat16 if ON_CARD else torch.float16
    lengths = (0, 1, 63, 64, 65, *([1024, 1088, 4000] if ON_CARD else []))
    case = Case(HeadShape(8, 2, 128), 16, tuple((1, context) for context in lengths), dtype)
    q, batch, kv = make(case, DEVICE)
    narrow = kv.to(FP8)
    out = torch.full((case.num_tokens, 8 * 128), float("nan"), dtype=dtype, device=DEVICE)
    choice = choose_decode(num_heads, 4096, 256, narrow=True)
    decode_attention(q, case.shape, batch.attention, narrow, 0.1, out, choice=choice)
    assert error(out, attention64(case, q, batch, narrow.float(), 0.1)) < TOLERANCE[dtype]


@needs_triton
@pytest.mark.parametrize("splits", [pytest.param(count, marks=on_card) for count in (1, 4)])
@pytest.mark.parametrize("early", [False, True])
def test_decode_in_splits_some_of_which_are_empty(splits: int, early: bool) -> None:
    dtype = torch.bfloat16 if ON_CARD else torch.float16
    case = Case(HeadShape(6, 2, 64), 8, tuple((1, context) for context in (0, 1, 15, 16, 17, 65, 70)), dtype)
    q, batch, kv = make(case, DEVICE)
    narrow = kv.to(FP8)
    out = torch.full((case.num_tokens, 6 * 64), float("nan"), dtype=dtype, device=DEVICE)
    decode_attention(q, case.shape, batch.attention, narrow, 0.1, out, choice=DecodeChoice(splits, 16, 2, 2, early))
    assert error(out, attention64(case, q, batch, narrow.float(), 0.1)) < TOLERANCE[dtype]


@needs_triton
@pytest.mark.parametrize("choice", [pytest.param(sizes, marks=on_card) for sizes in ((16, 16), (64, 32))])
def test_prefill_in_tiles(choice: tuple[int, int]) -> None:
    dtype = torch.bfloat16 if ON_CARD else torch.float16
    case = Case(HeadShape(6, 2, 64), 16, ((9, 9), (1, 30), (20, 33), (1, 1)), dtype)
    q, batch, kv = make(case, DEVICE)
    narrow = kv.to(FP8)
    out = torch.full((case.num_tokens, 6 * 64), float("nan"), dtype=dtype, device=DEVICE)
    paged_attention(q, case.shape, batch.attention, narrow, 0.1, out, choice=PrefillChoice(*choice, 4, 2))
    assert error(out, attention64(case, q, batch, narrow.float(), 0.1)) < TOLERANCE[dtype]
