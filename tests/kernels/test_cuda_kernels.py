"""The kernels for NVIDIA cards over random shapes: on a card large ones, in Triton's interpreter small ones."""

from __future__ import annotations

import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from triton_here import DEVICE, HAS_TRITON, ON_CARD, use_few_programs

from kvrelay.kernels.base import LINEARS, ForwardBatch, HeadShape, LayerWeights, LoraBatch, LoraPart, LoraSpan
from kvrelay.kernels.fp8 import dequantise, quantise
from kvrelay.kernels.ranks import ALONE
from kvrelay.kernels.torch_kernels import TorchKernels

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from cases import TOLERANCE, Case, attention64, error, make, random_case

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    *([pytest.mark.cuda] if ON_CARD else []),
]
if HAS_TRITON:
    from kvrelay.kernels.cuda.decode import decode_attention
    from kvrelay.kernels.cuda.kernels import CudaKernels
    from kvrelay.kernels.cuda.launch import Kernel, compiling
    from kvrelay.kernels.cuda.linear import CudaPacked, narrow_rows, scaled_linear, small_linear
    from kvrelay.kernels.cuda.prefill import has_room, own_attention, paged_attention
    from kvrelay.kernels.cuda.table import MAX_CUT_ROWS, DecodeChoice, LinearChoice, PrefillChoice

    use_few_programs()

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_CARD else [])]  # interpreted, bfloat16 is taken for an integer
# Interpreted, programs take seconds: few KV heads, each of which is one.
LIMITS = (
    {"max_context": 8192, "max_rows": 12, "max_kv_heads": 8}
    if ON_CARD
    else {"max_context": 80, "max_rows": 3, "max_kv_heads": 2}
)
SEEDS = range(12 if ON_CARD else 3)
KINDS = ("decode", "prompts", "chunks", "mixed")


def in_turn(first: Iterable[Any], second: Iterable[Any], *others: Sequence[Any]) -> list[ParameterSet]:
    """All combinations. Interpreted, `make test` has each of the first two, with one value of every other, in turn."""
    found = []
    for (place, a), (number, b), *rest in itertools.product(*map(enumerate, (first, second, *others))):
        turns = [(place // 2**depth + number) % len(values) for depth, values in enumerate(others)]
        is_long = not ON_CARD and turns != [index for index, _ in rest]
        found.append(pytest.param(a, b, *(value for _, value in rest), marks=pytest.mark.long if is_long else ()))
    return found


@pytest.mark.parametrize(("seed", "kind", "dtype"), in_turn(SEEDS, KINDS, DTYPES), ids=str)
def test_attention_over_random_shapes(seed: int, kind: str, dtype: torch.dtype) -> None:
    case = random_case(seed, dtype, kind=kind, **LIMITS)
    q, batch, kv = make(case, DEVICE, seed)
    got = CudaKernels().attention(q, case.shape, batch, kv, 0.1)
    assert error(got, attention64(case, q, batch, kv, 0.1)) < TOLERANCE[dtype], case


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("least", [0, 32])
def test_decode_in_splits_some_of_which_are_empty(splits: int, tile: int, early: bool, least: int) -> None:
    contexts = (0, 1, 15, 16, 17, 65, 70)
    case = Case(HeadShape(6, 2, 64), 8, tuple((1, context) for context in contexts), torch.float16)
    q, batch, kv = make(case, DEVICE)
    out = torch.full((case.num_tokens, 6 * 64), float("nan"), dtype=case.dtype, device=DEVICE)
    decode_attention(q, case.shape, batch.attention, kv, 0.1, out, choice=DecodeChoice(splits, tile, 2, 2, early, least))
    assert error(out, attention64(case, q, batch, kv, 0.1)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("choice", [(16, 16), (32, 64), (64, 16)])
def test_prefill_in_tiles(choice: tuple[int, int]) -> None:
    case = Case(HeadShape(6, 2, 64), 16, ((9, 9), (1, 30), (20, 33), (1, 1)), torch.float16)
    q, batch, kv = make(case, DEVICE)
    out = torch.full((case.num_tokens, 6 * 64), float("nan"), dtype=case.dtype, device=DEVICE)
    paged_attention(q, case.shape, batch.attention, kv, 0.1, out, choice=PrefillChoice(*choice, 4, 2))
    assert error(out, attention64(case, q, batch, kv, 0.1)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize(
    ("rows", "size", "with_bias", "dtype"),
    in_turn(
        [1, 2, 16, 27, 64],
        [(48, 96), (38, 1100), (14, 4200), *([(4096, 4096), (6144, 14336), (4096, 14336)] if ON_CARD else [])],
        [False, True],
        DTYPES,
    ),
    ids=str,
)
def test_linears_of_few_rows(dtype: torch.dtype, rows: int, with_bias: bool, size: tuple[int, int]) -> None:
    """Without and with the activation."""
    generator = torch.Generator(device=DEVICE).manual_seed(rows)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    out_size, in_size = size
    weight, x = drawn(out_size, in_size) / 8, drawn(rows, in_size)
    bias = drawn(out_size) if with_bias else None
    packed = CudaPacked(weight, bias)
    plain = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    gate, up = plain.chunk(2, dim=-1)
    assert error(small_linear(x, packed), plain) < TOLERANCE[dtype]
    assert error(small_linear(x, packed, gated=True), gate * gate.sigmoid() * up) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("rows", "size"), [(100, (28672, 4096)), (128, (17000, 1000))] if ON_CARD else [(70, (140, 200))], ids=str
)
def test_linears_with_an_activation_of_more_rows(rows: int, size: tuple[int, int]) -> None:
    dtype = DTYPES[-1]
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    weight = (torch.randn(*size, generator=generator, device=DEVICE) / 8).to(dtype)
    x = torch.randn(rows, size[1], generator=generator, device=DEVICE).to(dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    packed = CudaPacked(weight, None)
    assert CudaKernels().is_small(rows, packed, gated=True) == ON_CARD
    assert error(small_linear(x, packed, gated=True), gate * gate.sigmoid() * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 5, 27, 40, *([64] if ON_CARD else [])])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("size", [(48, 96), (38, 1100), *([(4096, 4096), (6144, 14336)] if ON_CARD else [])])
def test_linears_of_few_rows_in_fp8(rows: int, early: bool, size: tuple[int, int]) -> None:
    """Of what the stored weight means; x is rounded where its rows are many."""
    dtype = DTYPES[-1]
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    weight, scale = quantise(torch.randn(size, generator=generator, device=DEVICE) / 8)
    x = torch.randn(rows, size[1], generator=generator, device=DEVICE).to(dtype)
    bias = torch.randn(size[0], generator=generator, device=DEVICE).to(dtype) if early else None
    packed = CudaPacked(weight, bias, scale)
    choice = LinearChoice(64, 64, 4, 3, early=True) if early else None
    wide = x.double() if rows <= MAX_CUT_ROWS else dequantise(*quantise(x), torch.float64)
    plain = wide @ dequantise(weight, scale, torch.float64).T + (0 if bias is None else bias.double())
    gate, up = plain.chunk(2, dim=-1)
    assert error(small_linear(x, packed, choice=choice), plain) < TOLERANCE[dtype]
    assert error(small_linear(x, packed, gated=True, choice=choice), gate * gate.sigmoid() * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [96, 4096, 14336])
def test_a_row_is_cut_into_two_parts_in_fp8_that_add_up_to_it(width: int) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(width)
    sizes = torch.tensor([1e-38, 1e-20, 1e-3, 1.0, 30.0, 1e6, 1e30, 0.0], device=DEVICE)
    x = (torch.randn(8, width, generator=generator, device=DEVICE) * sizes[:, None]).bfloat16()
    parts, scales = narrow_rows(x, 2)
    found = (parts[0::2].double() + parts[1::2].double() / 16) * scales.double()[:, None]
    largest = x.double().abs().amax(dim=1, keepdim=True)
    is_small = x.double().abs() < largest * 2.0**-13
    assert torch.equal(found[~is_small], x.double()[~is_small])
    assert bool(((found - x.double()).abs() <= largest * 2.0**-20).all())


@pytest.mark.skipif(not ON_CARD, reason="interpreted, what is no number in fp8 is one")
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("value", [float("inf"), float("nan")], ids=str)
def test_what_is_not_finite_stays_so_beside_weights_in_fp8(rows: int, value: float) -> None:
    weight, scale = quantise(torch.ones(48, 96, device=DEVICE))
    x = torch.ones(rows, 96, device=DEVICE, dtype=DTYPES[-1])
    x[-1, 5] = value
    out = small_linear(x, CudaPacked(weight, None, scale))
    assert not bool(torch.isfinite(out[-1]).any())
    assert bool(torch.isfinite(out[:-1]).all())


@pytest.mark.parametrize("rows", [1, 70, *([3000] if ON_CARD else [])])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linears_of_many_rows_in_fp8(rows: int, with_bias: bool) -> None:
    """Of rows that are in fp8 themselves."""
    generator = torch.Generator(device=DEVICE).manual_seed(rows)
    weight, scale = quantise(torch.randn(48, 96, generator=generator, device=DEVICE) / 8)
    x = torch.randn(rows, 96, generator=generator, device=DEVICE).bfloat16() * 30
    bias = torch.randn(48, generator=generator, device=DEVICE).bfloat16() if with_bias else None
    expected = dequantise(*quantise(x), torch.float64) @ dequantise(weight, scale, torch.float64).T
    expected += 0 if bias is None else bias.double()
    assert error(scaled_linear(x, CudaPacked(weight, bias, scale)), expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "narrow"),
    in_turn(
        [((1, 5),), ((1, 0),), ((1, 33), (1, 0), (4, 9)), ((1, 7),) * 27, ((1, 7),) * 40],
        [HeadShape(4, 2, 64), HeadShape(3, 1, 96), *([HeadShape(32, 8, 128), HeadShape(9, 9, 256)] if ON_CARD else [])],
        DTYPES,
        [False, True],
    ),
    ids=str,
)
def test_queries_and_keys_are_turned_in_their_linear(
    rows: tuple[tuple[int, int], ...], shape: HeadShape, dtype: torch.dtype, narrow: bool
) -> None:
    """As by a kernel that follows it; `narrow` is a weight in fp8, with a bias."""
    case = Case(shape, 8, rows, dtype)
    _, batch, kv = make(case, DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    lines = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    weight = torch.randn(lines, 96, generator=generator, device=DEVICE) / 8
    bias = torch.randn(lines, generator=generator, device=DEVICE).to(dtype)
    x = torch.randn(case.num_tokens, 96, generator=generator, device=DEVICE).to(dtype)
    cos_sin = torch.randn(64, shape.head_dim, generator=generator, device=DEVICE)
    kernels = CudaKernels(linears="triton")
    packed = kernels.pack(quantise(weight)[0], bias, quantise(weight)[1]) if narrow else kernels.pack(weight.to(dtype), None)
    expected_kv = kv.clone()
    expected = kernels.rope_and_store(kernels.linear(x, packed), shape, cos_sin, batch, expected_kv, None, None, 1e-5)
    assert kernels.turns_in_linear(x, packed, kv)
    assert error(kernels.turned_linear(x, packed, shape, cos_sin, batch, kv), expected) < TOLERANCE[dtype]
    assert torch.equal(kv.isnan(), expected_kv.isnan())
    assert error(kv.nan_to_num(), expected_kv.nan_to_num()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "linears", "rows", "normed"),
    in_turn(DTYPES, ["auto", "cublas"], [((1, 5), (1, 0), (1, 33)), ((4, 20), (1, 9))], [False, True]),
    ids=str,
)
@pytest.mark.parametrize("adapted", [False, True], ids=["base", "lora"])
def test_layer_is_what_the_reference_computes(
    dtype: torch.dtype, linears: str, rows: tuple[tuple[int, int], ...], normed: bool, adapted: bool
) -> None:
    """The whole layer in few launches, against the reference's single calls in float64. An adapter of the first row is as if
    that row had other weights."""
    case = Case(HeadShape(4, 2, 32), 8, rows, dtype)
    _, batch, kv = make(case, DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=DEVICE) / shape[-1] ** 0.5).to(dtype)

    hidden, dim = 48, 32
    tensors = {
        "input_norm": 1 + drawn(hidden), "post_norm": 1 + drawn(hidden),
        **({"q_norm": 1 + drawn(dim), "k_norm": 1 + drawn(dim)} if normed else {}),
        "qkv": drawn(8 * dim, hidden), "output": drawn(hidden, 4 * dim), "gate_up": drawn(2 * 80, hidden),
        "down": drawn(hidden, 80),
    }  # fmt: skip
    angles = torch.rand(64, dim // 2, generator=generator, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    x, residual = drawn(case.num_tokens, hidden), drawn(case.num_tokens, hidden) * 7

    kernels = CudaKernels(linears=linears)
    packed = {name: kernels.pack(tensors[name], None) for name in ("qkv", "output", "gate_up", "down")}
    norms = {name: tensors.get(name) for name in ("input_norm", "q_norm", "k_norm", "post_norm")}
    layer = kernels.fuse(LayerWeights(index=0, shape=case.shape, eps=1e-5, scale=0.2, **packed, **norms), ALONE)
    assert layer is not None
    expected = reference_layer(case, tensors, x, residual, cos_sin, batch, kv.double())
    if adapted:
        own = slice(0, rows[0][0])
        parts = {name: adapter_of(tensors[name], drawn) for name in LINEARS}
        merged = {name: tensors[name] + part.b.T.float() @ part.a.float() for name, part in parts.items()}
        expected[own] = reference_layer(case, {**tensors, **merged}, x, residual, cos_sin, batch, kv.double())[own]
        span = LoraSpan(own.start, own.stop, kernels.pack_adapter([{name: [part] for name, part in parts.items()}]))
        batch.lora = LoraBatch((span,), ())
    total = layer(x, residual, cos_sin, batch, kv) + residual
    assert error(total, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.skipif(not ON_CARD, reason="cuDNN's attention needs an NVIDIA card")
@pytest.mark.parametrize("before", [(), ((1, 40), (1, 600)), ((1, 40), (30, 700)), ((30, 700),)], ids=str)
@pytest.mark.parametrize("rows", [(700,), (512, 900, 1024), (768, 768, 768)], ids=str)
def test_prompts_without_prefix_go_to_cudnn(rows: tuple[int, ...], before: tuple[tuple[int, int], ...]) -> None:
    """Through the layer's own path: fused rows with room behind them, which the result must not depend on. Rows before them
    that have a prefix are left to Triton."""
    case = Case(HeadShape(8, 2, 128), 16, (*before, *((count, count) for count in rows)), torch.bfloat16)
    _, batch, kv = make(case, DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    weight = torch.randn(12 * 128, 256, generator=generator, device=DEVICE).bfloat16() / 16
    x = torch.randn(case.num_tokens, 256, generator=generator, device=DEVICE).bfloat16()
    cos_sin = torch.randn(1024, 128, generator=generator, device=DEVICE)
    results = []
    for attention in ("auto", "triton"):
        kernels = CudaKernels(attention=attention)
        qkv = kernels.qkv_linear(x, kernels.pack(weight, None), case.shape, batch.attention)
        q = kernels.rope_and_store(qkv, case.shape, cos_sin, batch, kv, None, None, 1e-5)
        results.append(kernels.attention(q, case.shape, batch, kv, 0.1))
        expected = attention64(case, q, batch, kv, 0.1)
    assert not torch.equal(*results)  # two kernels indeed
    assert all(error(result, expected) < TOLERANCE[torch.bfloat16] for result in results)


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("rows", [(13,), (16, 16, 16), (13, 13), (8, 21, 16)], ids=str)
def test_rows_attend_to_themselves_whatever_follows_them(
    rows: tuple[int, ...], before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The views that cuDNN gets, with PyTorch's attention in its place."""

    def by_pytorch(fused: torch.Tensor, shape: HeadShape, scale: float) -> torch.Tensor:
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        q, k, v = (part.transpose(1, 2) for part in fused.split_with_sizes(sizes, dim=2))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return found.transpose(1, 2)

    monkeypatch.setattr("kvrelay.kernels.cuda.prefill._cudnn", by_pytorch)
    monkeypatch.setattr("kvrelay.kernels.cuda.prefill.PLAN_STEP", 8)
    shape, tokens = HeadShape(4, 2, 16), before + sum(rows)
    roomy = torch.randn(tokens + 8, 8 * 16, generator=torch.Generator().manual_seed(1))
    q = roomy[:tokens].view(tokens, 8, 16)[:, :4]
    assert has_room(q, shape, list(rows))
    assert not has_room(roomy[:tokens].clone().view(tokens, 8, 16)[:, :4], shape, [*rows[:-1], rows[-1] + 1])
    assert not has_room(q.contiguous(), shape, list(rows))
    got = own_attention(q, shape, list(rows), 0.2)
    heads = [row.view(1, -1, 8, 16) for row in roomy[before:tokens].split(list(rows))]
    expected = torch.cat([by_pytorch(row.double(), shape, 0.2)[0].flatten(1) for row in heads])
    assert error(got, expected) < TOLERANCE[torch.float32]


def adapter_of(weight: torch.Tensor, drawn: Callable[..., torch.Tensor]) -> LoraPart:
    out_features, in_features = weight.shape
    return LoraPart(0, drawn(4, in_features), drawn(4, out_features))


def reference_layer(
    case: Case,
    tensors: dict[str, torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor,
    cos_sin: torch.Tensor,
    batch: ForwardBatch,
    kv: torch.Tensor,
) -> torch.Tensor:
    reference, wide = TorchKernels(), {name: tensor.double() for name, tensor in tensors.items()}
    total = residual.double() + x.double()
    qkv = norm64(total, wide["input_norm"]) @ wide["qkv"].T
    real = batch.slots >= 0
    q = turned(qkv, case.shape, cos_sin.double()[batch.positions], wide, 0)
    keys = turned(qkv, case.shape, cos_sin.double()[batch.positions], wide, 1)
    flat = kv.flatten(1, 2)
    flat[0, batch.slots[real]] = keys[real]
    flat[1, batch.slots[real]] = qkv.view(-1, 8, 32)[real, 6:]
    total += attention64(case, q, batch, kv, 0.2) @ wide["output"].T
    gate, up = (norm64(total, wide["post_norm"]) @ wide["gate_up"].T).chunk(2, dim=-1)
    return total + reference.linear(gate * gate.sigmoid() * up, reference.pack(wide["down"], None))


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(
    qkv: torch.Tensor, shape: HeadShape, cos_sin: torch.Tensor, wide: dict[str, torch.Tensor], part: int
) -> torch.Tensor:
    """Queries (part 0) or keys (part 1), normed where there are norms, and rotated."""
    heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
    begin, end = ((0, shape.num_heads), (shape.num_heads, shape.num_heads + shape.num_kv_heads))[part]
    norm = wide.get(("q_norm", "k_norm")[part])
    own = heads[:, begin:end] if norm is None else norm64(heads[:, begin:end], norm)
    first, second = own.chunk(2, dim=-1)
    cos, sin = cos_sin[:, None, :].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_of_rows_in_several_tensors(dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    weight, bias, parts = drawn(48, 32) / 8, drawn(48) if with_bias else None, [drawn(5, 32), drawn(70, 32)]
    kernels = CudaKernels()
    expected = torch.cat(parts).double() @ weight.double().T + (0 if bias is None else bias.double())
    assert error(kernels.joined_linear(parts, kernels.pack(weight, bias)), expected) < TOLERANCE[dtype]


class Recorded:
    """In the place of a kernel of Triton."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def warmup(self, value: int, *, grid: tuple[int, ...]) -> None:
        self.calls.append(("compiled", value))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[[int], None]:
        return lambda value: self.calls.append(("launched", value))


def test_kernels_are_compiled_and_not_launched_until_that_ends_or_fails() -> None:
    recorded = Recorded()
    kernel = Kernel(recorded)
    kernel[(1,)](1)
    with compiling():
        kernel[(1,)](2)
    with pytest.raises(ZeroDivisionError), compiling():
        _ = 1 / 0
    kernel[(1,)](3)
    assert recorded.calls == [("launched", 1), ("compiled", 2), ("launched", 3)]


@pytest.mark.skipif(ON_CARD, reason="a card compiles them by using them")
@pytest.mark.long
@pytest.mark.parametrize("capability", ["80", "89", "90"])
def test_kernels_compile_for_a_card_that_is_not_here(capability: str) -> None:
    """And have the shared memory that they want."""
    assert importlib.util.find_spec("triton")
    script = pathlib.Path(__file__).parent / "compile_for_card.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), capability]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "_paged_kernel" in done.stdout
