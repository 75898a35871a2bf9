"""Loading: from one file or several, with names and shapes checked, and without keeping weights twice."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
import torch
from paged_run import PagedRun, expected_logits, prompts_of
from safetensors.torch import load_file, save_file
from tiny_models import NAMES, tiny_model

from kvrelay.checkpoint.spec import read_spec
from kvrelay.errors import MissingTensorError, ModelError, WrongShapeError
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.models.registry import Model
from kvrelay.progress import Silent
from kvrelay.runner.loader import INDEX_NAME, WHOLE_NAME, load_model

PROMPT = prompts_of((12,))


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.total = 0
        self.count = 0
        self.open = 0

    def start(self, title: str, total: int, *, unit: str) -> None:
        self.total = total
        self.open += 1

    def advance(self, count: int) -> None:
        self.count += count

    def done(self) -> None:
        self.open -= 1


def load(folder: pathlib.Path, *, dummy: bool = False, progress: Recorder | None = None) -> Model:
    return load_model(
        folder,
        read_spec(folder),
        kernels=TorchKernels(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        load="dummy" if dummy else "auto",
        progress=progress or Silent(),
    )


def logits_of(model: Model) -> torch.Tensor:
    return PagedRun(model, PROMPT).step({0: len(PROMPT[0])})[0]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the tiny Llama that a test may damage."""
    return pathlib.Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def change_tensors(folder: pathlib.Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / WHOLE_NAME) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / WHOLE_NAME)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dummy", [False, True])
def test_progress_counts_every_tensor(name: str, dummy: bool) -> None:
    progress = Recorder()
    load(tiny_model(name), dummy=dummy, progress=progress)
    assert progress.count == progress.total > 0
    assert progress.open == 0


def test_several_files_with_an_index(folder: pathlib.Path) -> None:
    tensors = load_file(folder / WHOLE_NAME)
    names = sorted(tensors)
    where = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / WHOLE_NAME).unlink()
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    torch.testing.assert_close(logits_of(load(folder)), expected_logits("llama", PROMPT)[0], atol=1e-4, rtol=0)

    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003\.safetensors, named in model\.safetensors\.index\.json"):
        load(folder)


def test_an_index_that_lies(folder: pathlib.Path) -> None:
    names = dict.fromkeys([*load_file(folder / WHOLE_NAME), "model.embed_tokens.weight"], WHOLE_NAME)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": names}))
    change_tensors(folder, {"model.embed_tokens.weight": None})
    with pytest.raises(MissingTensorError, match=r"model\.safetensors has no tensor model\.embed_tokens\.weight, although"):
        load(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(text: str, folder: pathlib.Path) -> None:
    (folder / INDEX_NAME).write_text(text)
    with pytest.raises(ModelError, match="is not a safetensors index"):
        load(folder)


def test_a_missing_tensor_is_named(folder: pathlib.Path) -> None:
    change_tensors(folder, {"model.layers.1.mlp.up_proj.weight": None})
    progress = Recorder()
    with pytest.raises(
        MissingTensorError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight, which should be \[48, 32\]"
    ):
        load(folder, progress=progress)
    assert progress.open == 0


def test_a_wrong_shape_is_named_with_both_shapes(folder: pathlib.Path) -> None:
    change_tensors(folder, {"model.norm.weight": torch.ones(31)})
    with pytest.raises(WrongShapeError) as caught:
        load(folder)
    for part in ("model.norm.weight", str(folder / WHOLE_NAME), "[31]", "[32]"):
        assert part in str(caught.value)


def test_integers_are_not_weights(folder: pathlib.Path) -> None:
    change_tensors(folder, {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight .* holds torch\.int8"):
        load(folder)


def test_tensors_that_no_layer_takes(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """What older tools store is passed over in silence; what we do not know is told once."""
    harmless: dict[str, torch.Tensor | None] = {
        "lm_head.weight": torch.zeros(320, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    change_tensors(folder, harmless)
    load(folder)
    assert not caplog.records
    change_tensors(folder, {"model.layers.0.surprise": torch.zeros(4), "model.other": torch.zeros(4)})
    load(folder)
    assert [record.__dict__["fields"] for record in caplog.records] == [
        {"count": 2, "first": "model.layers.0.surprise,model.other"}
    ]


def test_no_weights_and_broken_weights(folder: pathlib.Path) -> None:
    (folder / WHOLE_NAME).write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        load(folder)
    (folder / WHOLE_NAME).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file .*pytorch_model\.bin"):
        load(folder)


def test_a_second_copy_under_another_name_is_left_alone(folder: pathlib.Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"whatever")
    assert load(folder).spec.num_layers == 3


def test_bfloat16_files_load_into_float32(folder: pathlib.Path) -> None:
    tensors = load_file(folder / WHOLE_NAME)
    save_file({name: value.bfloat16() for name, value in tensors.items()}, folder / WHOLE_NAME)
    difference = (logits_of(load(folder)) - expected_logits("llama", PROMPT)[0]).abs().max()
    assert 0 < difference < 1.0


def test_dummy_weights_need_only_a_config_and_are_always_the_same(folder: pathlib.Path) -> None:
    (folder / WHOLE_NAME).unlink()
    first, second = logits_of(load(folder, dummy=True)), logits_of(load(folder, dummy=True))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert 0.1 < float(first.std()) < 10.0
    assert len(set(first.argmax(dim=-1).tolist())) > 1  # it says different things after different tokens


def test_weights_outlive_their_file(folder: pathlib.Path) -> None:
    """Nothing stays mapped: a checkpoint may be replaced or truncated while its model runs."""
    model = load(folder)
    with (folder / WHOLE_NAME).open("r+b") as file:
        file.truncate(0)
    torch.testing.assert_close(logits_of(model), expected_logits("llama", PROMPT)[0], atol=1e-4, rtol=0)


def test_only_wanted_logits_are_computed_in_the_order_wanted() -> None:
    model = load(tiny_model("qwen3"))
    run = PagedRun(model, PROMPT)
    expected = expected_logits("qwen3", PROMPT)[0]
    run.step({0: 8})
    got = run.step({0: 4}, logit_rows=[3, 1])[0]
    torch.testing.assert_close(got, expected[[11, 9]], atol=1e-4, rtol=0)


def test_a_step_that_wants_no_logits_still_stores_its_tokens() -> None:
    model = load(tiny_model("llama"))
    run = PagedRun(model, PROMPT)
    assert run.step({0: 8}, logit_rows=[])[0].shape == (0, 320)
    torch.testing.assert_close(run.step({0: 4})[0], expected_logits("llama", PROMPT)[0][8:], atol=1e-4, rtol=0)
