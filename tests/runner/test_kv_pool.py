"""KV memory: its size, its copies."""

from __future__ import annotations

import pathlib
import random

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from kvrelay.checkpoint.spec import ModelSpec, read_spec
from kvrelay.config import EngineOptions
from kvrelay.errors import ConfigError
from kvrelay.kernels.fp8 import FP8, movable
from kvrelay.runner.kv_pool import CPU_MOST_BYTES, CPU_SHARE, KVPool, PoolSize, choose_pool_size, free_cpu_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_spec(pathlib.Path(tiny_model("llama")))  # 256 positions, 3 layers, 2 heads of 8: 384 bytes a token in float32


def size(spec: ModelSpec, free_bytes: int, device: torch.device = CPU, **options: int) -> PoolSize:
    return choose_pool_size(
        spec,
        EngineOptions(**options),
        dtype=torch.float32,
        free_bytes=free_bytes,
        device=device,  # type: ignore[arg-type]
    )


def test_the_pool_is_one_aligned_zeroed_tensor(spec: ModelSpec) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pool = KVPool(spec, num_blocks=5, block_size=4, dtype=dtype, device=CPU)
        assert pool.tensor.shape == (3, 2, 5, 4, 2, 8)
        assert pool.tensor.dtype is dtype
        assert pool.tensor.is_contiguous()
        assert pool.tensor.data_ptr() % 64 == 0
        assert not pool.tensor.any()
        assert pool.num_blocks == 5


@given(copies=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_copies_happen_in_order_also_when_one_reads_what_another_wrote(copies: list[tuple[int, int]]) -> None:
    spec = read_spec(pathlib.Path(tiny_model("llama")))
    pool = KVPool(spec, num_blocks=6, block_size=2, dtype=torch.float32, device=CPU)
    pool.tensor.copy_(torch.arange(pool.tensor.numel()).view_as(pool.tensor))
    expected = pool.tensor.clone()
    for source, target in copies:
        expected[:, :, target] = expected[:, :, source].clone()
    pool.copy_blocks(copies)
    assert torch.equal(pool.tensor, expected)
    narrow = KVPool(spec, num_blocks=6, block_size=2, dtype=FP8, device=CPU)
    movable(narrow.tensor).copy_(torch.arange(narrow.tensor.numel()).view_as(narrow.tensor) % 251)
    wanted = movable(narrow.tensor).clone()
    for source, target in copies:
        wanted[:, :, target] = wanted[:, :, source].clone()
    narrow.copy_blocks(copies)
    assert torch.equal(movable(narrow.tensor), wanted)


def test_given_blocks_are_taken_as_they_are(spec: ModelSpec) -> None:
    assert size(spec, 0, kv_blocks=16) == PoolSize(num_blocks=16, max_model_len=256)
    assert size(spec, 0, kv_blocks=1000, max_model_len=100) == PoolSize(num_blocks=1000, max_model_len=100)


def test_a_limit_nobody_asked_for_is_lowered_to_the_blocks(spec: ModelSpec) -> None:
    assert size(spec, 0, kv_blocks=10) == PoolSize(num_blocks=10, max_model_len=160)


def test_a_limit_that_was_given_is_not_lowered(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 200 needs 13 KV blocks of 16 .* there are 10"):
        size(spec, 0, kv_blocks=10, max_model_len=200)


def test_a_limit_above_the_models_positions_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 300 is more than the model's 256 positions"):
        size(spec, 64 * GIB, max_model_len=300)


def test_a_cpu_pool_holds_a_full_batch_if_memory_allows_and_no_more(spec: ModelSpec) -> None:
    assert size(spec, 64 * GIB, max_batch=8) == PoolSize(num_blocks=8 * 16, max_model_len=256)


def test_a_cpu_pool_takes_a_share_of_memory_up_to_a_limit(spec: ModelSpec) -> None:
    large = msgspec.structs.replace(spec, num_layers=1000)
    block_bytes = large.kv_bytes_per_token(4) * 16
    assert size(large, 4 * GIB, max_batch=10000).num_blocks == int(4 * GIB * CPU_SHARE) // block_bytes
    assert size(large, 4000 * GIB, max_batch=10000).num_blocks == CPU_MOST_BYTES // block_bytes


def test_a_cpu_pool_grows_to_one_sequence_of_a_given_length_but_not_over_memory(spec: ModelSpec) -> None:
    large = msgspec.structs.replace(spec, max_position_embeddings=10**8)
    one_gib = GIB // large.kv_bytes_per_token(4) // 16 * 16  # tokens
    assert size(large, 2 * GIB, max_model_len=one_gib).max_model_len == one_gib
    assert size(large, 2 * GIB).max_model_len < one_gib  # not asked for: a share must do
    with pytest.raises(ConfigError, match=f"--max-model-len {one_gib} needs"):
        size(large, GIB, max_model_len=one_gib)


def test_a_gpu_pool_takes_all_it_may(spec: ModelSpec) -> None:
    large = msgspec.structs.replace(spec, num_layers=1000)
    assert size(large, GIB, CUDA, max_batch=10000).num_blocks == GIB // (large.kv_bytes_per_token(4) * 16)


def test_no_memory_at_all_is_an_error(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="no memory for KV"):
        size(spec, 0, CUDA)


def test_every_size_holds_its_longest_sequence(spec: ModelSpec) -> None:
    rng = random.Random(5)
    for _ in range(200):
        block_size = rng.randrange(1, 40)
        found = size(
            spec, rng.randrange(10**5, 10**8), rng.choice([CPU, CUDA]), block_size=block_size, max_batch=rng.randrange(1, 9)
        )
        assert found.num_blocks * block_size >= found.max_model_len > 0


def test_free_memory_is_read_from_the_kernel() -> None:
    assert 0 < free_cpu_bytes() < 2**50
