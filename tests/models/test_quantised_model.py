"""A model whose weights stay in blocks: the logits of the dequantised one, bit for bit, in any batch; and shares of it."""

from __future__ import annotations

import pathlib
import shutil

import msgspec
import pytest
import torch
from paged_run import PagedRun, prompts_of
from quantised_blocks import layout_of
from safetensors.torch import load_file, save_file
from tiny_models import QUANTISED_NAMES, tiny_model

from kvrelay.checkpoint.convert import BLOCKS_NAME, KEPT_FORMATS
from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import ModelOptions, WeightsOption, read_environment
from kvrelay.errors import ConfigError, ModelError, WrongShapeError
from kvrelay.kernels.base import Quantised
from kvrelay.kernels.choose import choose_kernels
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.models.registry import Model
from kvrelay.progress import Silent
from kvrelay.runner.choices import check_weights
from kvrelay.runner.loader import WHOLE_NAME, CheckpointSource, DummySource, load_model
from kvrelay.runner.quantised import BlockFile, Int8Source, int8_blocks
from kvrelay.runner.ranks.shares import RankShare, RankSource

CPU = torch.device("cpu")
PROMPTS = prompts_of((37, 5, 1, 18))


def load(folder: pathlib.Path, weights: WeightsOption) -> Model:
    kernels = choose_kernels(CPU, torch.float32, read_environment())
    if not isinstance(kernels, NativeKernels):
        pytest.skip("no C compiler")
    return load_model(
        folder,
        read_spec(folder),
        kernels=kernels,
        device=CPU,
        dtype=torch.float32,
        load="auto",
        progress=Silent(),
        weights=weights,
    )


def all_logits(model: Model, chunk: int) -> list[torch.Tensor]:
    run = PagedRun(model, PROMPTS)
    parts: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    while left := {row: len(prompt) - run.done[row] for row, prompt in enumerate(PROMPTS) if run.done[row] < len(prompt)}:
        for row, logits in run.step({row: min(chunk, count) for row, count in left.items()}).items():
            parts[row].append(logits)
    return [torch.cat(each) for each in parts]


@pytest.mark.parametrize("name", QUANTISED_NAMES)
def test_logits_are_those_of_the_dequantised_model(name: str) -> None:
    kept, floats = load(tiny_model(name), "auto"), load(tiny_model(name), "float32")
    expected = all_logits(floats, 64)
    for chunk in (1, 3, 64):  # one token of each prompt, a few, all
        for got, wanted in zip(all_logits(kept, chunk), expected, strict=True):
            assert torch.equal(got, wanted)


def source(name: str) -> CheckpointSource:
    return CheckpointSource(tiny_model(name), CPU, torch.float32, Silent(), KEPT_FORMATS)


def dequantised(part: Quantised) -> torch.Tensor:
    values = layout_of(part.format).dequantise(part.blocks.contiguous().numpy().reshape(-1))
    return torch.from_numpy(values).reshape(part.blocks.shape[0], part.in_features)


def test_blocks_are_in_the_order_of_the_floats() -> None:
    """Rows of queries and keys lie otherwise in the GGUF file."""
    floats = load_file(tiny_model("blocks-32") / WHOLE_NAME)
    shapes = {f"model.layers.1.self_attn.{part}_proj.weight": (rows, 64) for part, rows in (("q", 64), ("k", 32), ("v", 32))}
    found = source("blocks-32").take_quantised(shapes)
    assert found is not None
    for name, part in zip(shapes, found, strict=True):
        assert torch.equal(dequantised(part), floats[name])


def test_matrices_of_several_formats_are_floats() -> None:
    parts = {f"model.layers.0.self_attn.{part}_proj.weight": (128 * (1 + (part == "q")), 256) for part in "qkv"}
    given = source("blocks-256")
    assert given.take_quantised(parts) is None
    assert given.take("model.layers.0.self_attn.q_proj.weight", (256, 256)).dtype is torch.float32


@pytest.mark.parametrize("rank", [0, 1])
def test_shares_of_blocks_are_those_of_the_floats(rank: int) -> None:
    share = RankShare(read_spec(tiny_model("blocks-32")), rank, 2)
    kept, floats = RankSource(share, source("blocks-32")), RankSource(share, source("blocks-32"))
    rows = {f"model.layers.0.self_attn.{part}_proj.weight": (count, 64) for part, count in (("q", 32), ("k", 16), ("v", 16))}
    for shapes in (rows, {"model.layers.0.self_attn.o_proj.weight": (64, 32)}):
        found = kept.take_quantised(shapes)
        assert found is not None
        for part, (name, shape) in zip(found, shapes.items(), strict=True):
            assert torch.equal(dequantised(part), floats.take(name, shape))


def test_heads_that_two_ranks_have_are_zeros_in_one_of_them() -> None:
    """Also where they stay in blocks."""
    spec = msgspec.structs.replace(read_spec(tiny_model("kv3")), num_heads=9, num_kv_heads=3, head_dim=32)
    name, floats = "model.layers.0.self_attn.o_proj.weight", DummySource(CPU, torch.float32, Silent())
    whole = dequantised(int8_blocks(floats.take(name, (64, 288))))
    shares = [RankShare(spec, rank, 2) for rank in range(2)]
    parts = [RankSource(share, Int8Source(floats)).take_quantised({name: (64, 192)}) for share in shares]
    assert parts[0] is not None
    assert parts[1] is not None
    assert torch.equal(dequantised(parts[0][0]), whole[:, :192])
    assert torch.equal(dequantised(parts[1][0]), torch.cat([torch.zeros(64, 96), whole[:, 192:]], dim=1))


@pytest.mark.parametrize("name", sorted(KEPT_FORMATS))
def test_bytes_of_zero_are_zeros_in_every_format(name: str) -> None:
    layout = layout_of(name)
    blocks = torch.full((2, 2 * layout.block_bytes), 37, dtype=torch.uint8)
    values = dequantised(Quantised(name, blocks, 2 * layout.block_elements).with_zeros(layout.block_elements))
    assert not values[:, : layout.block_elements].any()
    assert values[:, layout.block_elements :].all()


def test_a_share_that_ends_inside_a_block_is_floats() -> None:
    share = RankShare(read_spec(tiny_model("blocks-32")), 1, 2)
    kept = RankSource(share, source("blocks-32"))
    name, shape = "model.layers.0.mlp.down_proj.weight", (64, 48)
    assert kept.take_quantised({name: shape}) is None
    assert kept.take(name, shape).shape == shape


def test_a_damaged_file_and_another_shape_are_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / BLOCKS_NAME).write_bytes(b"no safetensors")
    with pytest.raises(ModelError, match=BLOCKS_NAME):
        BlockFile(tmp_path, KEPT_FORMATS)
    with pytest.raises(WrongShapeError, match=r"model\.embed_tokens\.weight"):
        source("blocks-32").take_quantised({"model.embed_tokens.weight": (320, 96)})


def test_int8_is_within_half_a_step() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(3))
    weight[7] = 0.0
    weight[8, :32] *= 1e-9
    error = (dequantised(int8_blocks(weight)) - weight).unflatten(1, (-1, 32)).abs().amax(dim=2)
    steps = weight.unflatten(1, (-1, 32)).abs().amax(dim=2) / 127
    assert bool((error <= 0.51 * steps + 1e-7).all())  # a scale has 11 bits


def test_int8_is_the_model_of_the_rounded_weights(tmp_path: pathlib.Path) -> None:
    """Columns that are no whole runs, as the tiny Llama's last matrices have, stay floats."""
    folder = pathlib.Path(shutil.copytree(tiny_model("llama"), tmp_path / "rounded"))
    tensors = load_file(folder / WHOLE_NAME)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            tensors[name] = dequantised(int8_blocks(tensor))
    save_file(tensors, folder / WHOLE_NAME)
    rounded, kept = load(folder, "float32"), load(tiny_model("llama"), "int8")
    for chunk in (1, 64):
        for got, wanted in zip(all_logits(kept, chunk), all_logits(rounded, chunk), strict=True):
            assert torch.equal(got, wanted)
    assert not torch.equal(all_logits(kept, 64)[0], all_logits(load(tiny_model("llama"), "float32"), 64)[0])


def test_int8_is_refused_where_it_is_not_computed() -> None:
    spec = read_spec(tiny_model("llama"))
    for options, says in (
        (ModelOptions(weights="int8", tp=2), "--tp 1"),
        (ModelOptions(weights="int8", device="cuda"), "a CPU"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_weights(spec, options, torch.float32)
