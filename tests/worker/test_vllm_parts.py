"""What stands between our options, memory and events and vLLM's, without vLLM."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kvrelay.config import EngineOptions, ModelOptions, TransferOptions, read_environment
from kvrelay.errors import ConfigError
from kvrelay.ids import new_request_id, new_worker_id
from kvrelay.native.hashing import block_hash, root_hash
from kvrelay.offline.llm import LLM
from kvrelay.options import RoleOptions, check_roles
from kvrelay.progress import Silent
from kvrelay.sampling import SamplingParams
from kvrelay.states import FreeReason, Role
from kvrelay.wire.events import Freed, Removed, Stored
from kvrelay.wire.serving import Submit
from kvrelay.worker.build import stage_of
from kvrelay.worker.stage import Setup
from kvrelay.worker.vllm.events import CacheListener
from kvrelay.worker.vllm.memory import InRegion, Shared, block_layout, map_share
from kvrelay.worker.vllm.options import engine_arguments, read_arguments
from kvrelay.worker.vllm.requests import seed_of
from kvrelay.worker.vllm.seam import Hooks


def setup_of(tmp_path: Any, model: ModelOptions | None = None, **engine: Any) -> Setup:
    (tmp_path / "config.json").write_text("{}")
    model = msgspec.structs.replace(model or ModelOptions(), model=str(tmp_path))
    options = EngineOptions(engine="vllm", **engine).for_device("cpu")
    return Setup(new_worker_id("whole"), model, options, read_environment(), Silent())


def test_options_become_vllms(tmp_path: Any) -> None:
    setup = setup_of(
        tmp_path, max_batch=4, max_model_len=128, kv_blocks=50, prefix_cache=False, engine_args='{"max-num-seqs": 2}'
    )
    arguments = engine_arguments(setup, Role.WHOLE, Shared(Hooks()))
    assert arguments["model"] == str(tmp_path)
    assert (arguments["max_model_len"], arguments["num_gpu_blocks_override"]) == (128, 50)
    assert arguments["enable_prefix_caching"] is False
    assert arguments["max_num_seqs"] == 2  # what is said to vLLM wins
    assert "block_size" not in arguments
    assert "kv_transfer_config" not in arguments


@pytest.mark.parametrize(("role", "expected"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")])
def test_split_workers_have_the_connector(tmp_path: Any, role: Role, expected: str) -> None:
    setup = setup_of(tmp_path)
    config = engine_arguments(setup, role, Shared(Hooks()))["kv_transfer_config"]
    assert config["kv_role"] == expected
    assert config["kv_connector_extra_config"] == {"worker_id": setup.worker_id}


@pytest.mark.parametrize(
    ("role", "model", "engine", "named"),
    [
        (Role.ENCODE, {}, {}, "--role encode"),
        (Role.WHOLE, {"lora": ("a=b",)}, {}, "--lora"),
        (Role.WHOLE, {}, {"swap_blocks": 5}, "--swap-blocks"),
        (Role.WHOLE, {}, {"engine_args": "{model: x}"}, "model is set by kvrelay"),
        (Role.DECODE, {"tp": 2, "device": "cuda"}, {}, "one each"),
        (Role.PREFILL, {"device": "cuda"}, {"engine_args": "{pipeline_parallel_size: 2}"}, "one each"),
        (Role.PREFILL, {}, {"engine_args": "{data_parallel_size: 2}"}, "data_parallel_size"),
        (Role.WHOLE, {}, {"engine_args": "[1]"}, "must be a mapping"),
        (Role.WHOLE, {}, {"engine_args": "{a: "}, "neither JSON nor YAML"),
    ],
)
def test_what_vllm_does_not_have_is_refused_at_start(
    tmp_path: Any, role: Role, model: dict[str, Any], engine: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        engine_arguments(setup_of(tmp_path, ModelOptions(**model), **engine), role, Shared(Hooks()))


def test_engine_arguments_may_be_yaml() -> None:
    assert read_arguments("max-num-seqs: 4\nenforce_eager: true") == {"max_num_seqs": 4, "enforce_eager": True}


def test_a_worker_without_vllm_says_so(tmp_path: Any) -> None:
    try:
        import vllm  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"kvrelay\[vllm\]"):
            stage_of(Role.WHOLE, TransferOptions(), "127.0.0.1", engine="vllm")(setup_of(tmp_path))


def test_engines_do_not_mix() -> None:
    ours, theirs = (RoleOptions(model=ModelOptions(), engine=EngineOptions(engine=name)) for name in ("kvrelay", "vllm"))
    check_roles({Role.PREFILL: theirs, Role.DECODE: theirs})
    with pytest.raises(ConfigError, match="--engine: vllm for prefill, kvrelay for decode"):
        check_roles({Role.PREFILL: theirs, Role.DECODE: ours})


def test_a_model_in_this_process_has_our_engine() -> None:
    with pytest.raises(ConfigError, match="engine='vllm' runs in worker processes"):
        LLM("smollm2", engine="vllm")


def test_seeds_of_samples_and_positions_differ() -> None:
    seeds = {seed_of(1, sample, position) for sample in range(4) for position in range(4)}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_zeros_lie_where_others_can_map_them() -> None:
    shared = Shared(Hooks())
    with InRegion(shared.allocate):
        made = torch.zeros(64, dtype=torch.int8, device="cpu")
        other = torch.zeros(8)
    assert shared.region is not None
    assert made.data_ptr() == shared.region.address
    assert other.data_ptr() != shared.region.address
    assert not made.any()


def placement_of(layer_stride: int, block_stride: int, size: int) -> Any:
    return SimpleNamespace(layers=["a", "b", "c"], layer_stride=layer_stride, block_stride=block_stride, offset=0, size=size)


def test_the_shares_of_ranks_are_one_region(tmp_path: Any) -> None:
    shared = Shared(Hooks())
    arguments = engine_arguments(setup_of(tmp_path, ModelOptions(tp=2)), Role.DECODE, shared)
    path = arguments["kv_transfer_config"]["kv_connector_extra_config"]["memory"]
    layout = block_layout(placement_of(8192, 4096, 24576), 2, "float32", num_ranks=2)
    shares = [map_share(path, rank, 2, 24576) for rank in (1, 0)]
    shared.join([layout, layout])
    for number, share in zip(b"\x01\x02", shares, strict=True):
        share[-1] = number
    assert shared.region is not None
    assert shared.region.buffer is not None
    assert (shared.region.size_bytes, shared.layout, layout.rank_bytes) == (49152, layout, 24576)
    assert [shared.region.buffer[end - 1] for end in (24576, 49152)] == [2, 1]
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(f"/proc/self/fd/{shared.region.fd}", 1 << 20)
    shared.region.close()


@pytest.mark.parametrize(
    ("model", "engine"), [(ModelOptions(tp=2), {}), (None, {"engine_args": "{pipeline_parallel_size: 2}"})]
)
def test_ranks_and_stages_are_told_where_their_memory_is(
    tmp_path: Any, model: ModelOptions | None, engine: dict[str, Any]
) -> None:
    shared = Shared(Hooks())
    config = engine_arguments(setup_of(tmp_path, model, **engine), Role.PREFILL, shared)["kv_transfer_config"]
    assert os.path.exists(config["kv_connector_extra_config"]["memory"])
    os.close(shared.file)


def test_ranks_with_other_shares_are_refused() -> None:
    shared = Shared(Hooks())
    path = shared.open_file()
    layouts = [block_layout(placement_of(8192, 4096, 24576), 2, kind, num_ranks=2) for kind in ("float32", "bfloat16")]
    with pytest.raises(ConfigError, match="whole number of pages"):
        map_share(path, 0, 2, 100)
    map_share(path, 0, 2, 24576)
    with pytest.raises(ConfigError, match="ranks differs"):
        shared.join(layouts)
    assert shared.region is not None
    shared.region.close()


@pytest.mark.parametrize(("layer_stride", "block_stride", "num_layers"), [(400, 40, 3), (40, 120, 1)])
def test_a_block_is_one_token_of_the_layout(layer_stride: int, block_stride: int, num_layers: int) -> None:
    placement = placement_of(layer_stride, block_stride, 1200)
    layout = block_layout(placement, 10, "float32 in blocks of 32 tokens")
    assert (layout.num_layers, layout.block_bytes, layout.size_bytes) == (num_layers, block_stride, 1200)
    smaller = block_layout(placement, 10, "float32 in blocks of 16 tokens")
    assert "blocks of 16" in layout.mismatch(smaller)


class BlockStored(SimpleNamespace):
    pass


class BlockRemoved(SimpleNamespace):
    pass


def stored(hashes: list[str], parent: str | None, tokens: list[int], salt: str = "") -> BlockStored:
    extra = [(salt,)] + [None] * (len(hashes) - 1) if salt else None
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, token_ids=tokens, block_size=2, extra_keys=extra)


def test_the_cache_is_told_in_the_names_that_routers_know() -> None:
    listener = CacheListener("seed", 2, 16)
    listener.publish(SimpleNamespace(events=[stored(["a", "b"], None, [1, 2, 3, 4]), stored(["c"], "b", [5, 6])]))
    root = root_hash("seed", "")
    names = [first := block_hash(root, [1, 2]), second := block_hash(first, [3, 4]), block_hash(second, [5, 6])]
    assert listener.recorder.take() == [Stored(hashes=names, parent=root)]
    listener.publish(SimpleNamespace(events=[BlockRemoved(block_hashes=["b", "unknown"])]))
    assert listener.recorder.take() == [Removed(hashes=[second])]
    listener.publish(SimpleNamespace(events=[stored(["d"], "unknown", [7, 8])]))
    assert listener.recorder.take() == []


def test_a_salt_begins_a_chain_of_its_own() -> None:
    listener = CacheListener("seed", 2, 16)
    listener.publish(SimpleNamespace(events=[stored(["a"], None, [1, 2], "secret")]))
    root = root_hash("seed", "secret")
    assert listener.recorder.take() == [Stored(hashes=[block_hash(root, [1, 2])], parent=root)]


def test_the_end_of_a_request_names_what_is_still_cached() -> None:
    listener = CacheListener("seed", 2, 16)
    listener.publish(SimpleNamespace(events=[stored(["a", "b"], None, [1, 2, 3, 4]), BlockRemoved(block_hashes=["b"])]))
    listener.recorder.take()
    submit = Submit(request_id=new_request_id(), external_id="mine", prompt=[1, 2, 3, 4, 5], params=SamplingParams())
    listener.over(submit, FreeReason.FINISHED)
    first = block_hash(root_hash("seed", ""), [1, 2])
    assert listener.recorder.take() == [Freed(request="mine", reason=FreeReason.FINISHED, hashes=[first])]
