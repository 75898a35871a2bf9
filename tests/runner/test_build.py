"""Options become a runner, or an error that names the option."""

from __future__ import annotations

import itertools
import logging
import pathlib
from collections.abc import Iterator

import psutil
import pytest
import torch
from free_sequences import FreeSequence, plan, whole
from tiny_models import EOS_TOKEN_ID, reference_model, tiny_model

from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import EngineOptions, ModelOptions, read_environment
from kvrelay.engine.interfaces import Row
from kvrelay.errors import ConfigError, ModelError
from kvrelay.progress import Silent
from kvrelay.runner.build import build_runner
from kvrelay.runner.choices import choose_dtype, open_device, set_threads
from kvrelay.runner.host_pool import choose_host_blocks
from kvrelay.runner.kv_dtype import choose_kv_dtype
from kvrelay.runner.kv_pool import KVPool, choose_pool_size
from kvrelay.runner.runner import TorchRunner


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def build(name: str = "llama", *, engine: dict[str, object] | None = None, **model: object) -> TorchRunner:
    return build_runner(
        ModelOptions(**{"model": name, "threads": 1, **model}),  # type: ignore[arg-type]
        EngineOptions(**{"kv_blocks": 32, **(engine or {})}),  # type: ignore[arg-type]
        pathlib.Path(tiny_model(name)),
        read_environment(),
        Silent(),
    )


def test_a_runner_knows_its_model_and_has_forgotten_its_warm_up() -> None:
    runner = build()
    assert runner.num_blocks == 32
    assert runner.max_model_len == 256
    assert runner.eos_token_ids == {EOS_TOKEN_ID}
    assert runner.spec.architecture == "LlamaForCausalLM"
    assert runner.num_known_sequences == 0


def test_weights_in_fp8_are_refused_by_name_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="--weights fp8: fp8 is computed by NVIDIA cards alone; use --device cuda"):
        build(weights="fp8")


def test_kv_in_fp8_takes_a_quarter_of_the_bytes_and_is_another_fingerprint() -> None:
    plain, narrow = build(), build(kv_dtype="fp8")
    assert (narrow.layout.dtype, narrow.layout.item_bytes) == ("float8_e4m3fn", 1)
    assert narrow.kv.numel() == plain.kv.numel()
    assert narrow.kv.nbytes * 4 == plain.kv.nbytes
    assert narrow.fingerprint == f"{plain.fingerprint}-kv-fp8"
    tokens = list(range(10, 30))
    narrow.launch(plan(whole(FreeSequence(tokens=tokens, block_table=[3, 1]))))
    assert len(narrow.collect().rows[0].tokens) == 1
    assert torch.isfinite(narrow.kv.float()).all()
    assert narrow.kv[:, :, 3].float().any()


def test_kv_in_fp8_fits_more_blocks_into_the_same_memory() -> None:
    spec = read_spec(pathlib.Path(tiny_model("llama")))
    blocks = [
        choose_pool_size(
            spec, EngineOptions(max_batch=10**6), dtype=dtype, free_bytes=10**7, device=torch.device("cuda")
        ).num_blocks
        for dtype in (torch.bfloat16, choose_kv_dtype(ModelOptions(kv_dtype="fp8"), torch.bfloat16))
    ]
    assert blocks[1] in (2 * blocks[0], 2 * blocks[0] + 1)


def test_its_tokens_are_those_of_transformers() -> None:
    runner, tokens = build(), list(range(10, 30))
    runner.launch(plan(whole(FreeSequence(tokens=tokens, block_table=[3, 1]))))
    with torch.inference_mode():
        expected = int(reference_model("llama")(torch.tensor([tokens])).logits[0, -1].argmax())
    assert runner.collect().rows[0].tokens == [expected]


@pytest.mark.parametrize("cuts", [[64, 250], [1, 63, 65, 191, 192, 249, 250], [150, 250]])
def test_a_long_prompt_has_the_same_kv_however_it_is_cut(cuts: list[int]) -> None:
    sequence = FreeSequence(tokens=list(range(250)), block_table=list(range(16)))
    once, cut = build("mistral"), build("mistral")
    once.launch(plan(whole(sequence)))
    for begin, end in itertools.pairwise([0, *cuts]):
        cut.launch(plan(Row(sequence, begin, end - begin, int(end == 250))))
        result = cut.collect()
    assert result.rows[0].tokens == once.collect().rows[0].tokens
    assert torch.equal(cut.kv, once.kv)


def test_fingerprints_tell_models_and_weights_apart() -> None:
    same, again, other, dummy = build(), build(engine={"kv_blocks": 40}), build("qwen3"), build(load="dummy")
    assert same.fingerprint == again.fingerprint
    assert len({same.fingerprint, other.fingerprint, dummy.fingerprint}) == 3


def test_a_pool_without_a_given_size_holds_a_full_batch() -> None:
    runner = build(engine={"kv_blocks": 0, "max_batch": 4, "max_model_len": 100})
    assert (runner.num_blocks, runner.max_model_len) == (4 * 7, 100)


def test_there_are_host_blocks_without_an_option_and_the_log_says_how_many(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("kvrelay"), "propagate", True)
    with caplog.at_level("INFO", logger="kvrelay.build"):
        assert build().num_host_blocks == 32
    (line,) = [record for record in caplog.records if record.message == "runner ready"]
    assert line.__dict__["fields"]["host_blocks"] == 32
    assert build(engine={"swap_blocks": 0}).num_host_blocks == 0
    assert build(engine={"swap_blocks": 5}).num_host_blocks == 5


def test_host_blocks_that_cannot_be_had_are_done_without_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.runner.build.choose_host_blocks", lambda *_, **__: 2**50)
    assert build().num_host_blocks == 0


def test_host_blocks_are_a_bounded_share_of_free_memory_of_all_workers_together() -> None:
    spec = read_spec(pathlib.Path(tiny_model("llama")))
    pool = KVPool(spec, num_blocks=1000, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    block_bytes = 16 * spec.kv_bytes_per_token(4)
    assert choose_host_blocks(pool, free_bytes=2**40, core_share=1.0) == 1000  # no more than the device has
    free_bytes = 1000 * block_bytes
    assert choose_host_blocks(pool, free_bytes=free_bytes, core_share=1.0) == 100
    assert choose_host_blocks(pool, free_bytes=free_bytes, core_share=0.25) == 25
    assert choose_host_blocks(pool, free_bytes=0, core_share=1.0) == 0
    pool.tensor = torch.empty((1,), dtype=torch.uint8).expand(1, 1, 1000, 2**27)  # blocks of 128 MiB
    assert choose_host_blocks(pool, free_bytes=2**50, core_share=1.0) == 32


def test_a_pool_of_one_block_warms_up_too() -> None:
    runner = build(engine={"kv_blocks": 1, "block_size": 3})
    assert runner.max_model_len == 3


@pytest.mark.parametrize(
    ("model", "engine", "says"),
    [
        ({"tp": 64}, {}, "--tp 64"),
        ({"kv_dtype": "fp8", "weights": "int8"}, {}, "--kv-dtype fp8: --weights int8"),
        ({}, {"swap_blocks": 2**50}, "--swap-blocks"),
        ({}, {"max_model_len": 257}, "--max-model-len 257"),
        ({}, {"max_model_len": 256, "kv_blocks": 2}, "--kv-blocks"),
    ],
)
def test_what_cannot_work_is_refused_by_name(model: dict[str, object], engine: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(engine=engine, **model)


def test_no_rank_is_left_where_building_fails() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(ConfigError, match="--kv-blocks"):
        build("kv2", engine={"max_model_len": 256, "kv_blocks": 2}, tp=2)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        build_runner(ModelOptions(), EngineOptions(), tmp_path, read_environment(), Silent())


def test_a_missing_card_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda"):
        open_device(ModelOptions(device="cuda"))
    assert open_device(ModelOptions(device="cpu")).type == "cpu"


@pytest.mark.parametrize(
    ("device", "dtype", "flags", "chosen"),
    [
        ("cpu", "auto", {"bf16"}, "float32"),
        ("cpu", "float32", set(), "float32"),
        ("cpu", "bfloat16", {"asimd", "bf16"}, "bfloat16"),
        ("cpu", "bfloat16", {"avx512_bf16"}, "bfloat16"),
        ("cpu", "bfloat16", {"amx_bf16"}, "bfloat16"),
        ("cuda", "auto", set(), "bfloat16"),
        ("cuda", "float32", set(), "float32"),
        ("cuda", "bfloat16", set(), "bfloat16"),
    ],
)
def test_precision_follows_device_and_hardware(device: str, dtype: str, flags: set[str], chosen: str) -> None:
    assert choose_dtype(ModelOptions(device=device, dtype=dtype), frozenset(flags)) == chosen  # type: ignore[arg-type]


def test_bfloat16_on_a_cpu_without_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        choose_dtype(ModelOptions(device="cpu", dtype="bfloat16"), frozenset({"asimd"}))


def test_threads_are_set_once_for_the_process() -> None:
    assert set_threads(1) == torch.get_num_threads() == 1
    assert set_threads(0) == torch.get_num_threads() >= 1
