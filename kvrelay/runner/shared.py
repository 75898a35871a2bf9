"""A model whose weights a host's workers hold once: the first worker packs them into a file that all of them map.

    whole file there?   yes: mapped, and the model is built of shapes alone (no tensor is read, none is packed)
                        no:  one worker writes it while the others wait (checkpoint/weight_file.py)
    no room for it      the next folder: shared memory, then the cache folder; then a copy of one's own, which is logged

A file's name says all that its bytes depend on: checkpoint, precision, share of a rank, and how the kernels pack. Memory of
this kind is in huge pages where the kernel can do so, as a copy of one's own is, so that nothing is slower.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable
from typing import Protocol

import torch

from kvrelay.checkpoint.digest import weights_digest
from kvrelay.checkpoint.spec import ModelSpec, fingerprint
from kvrelay.checkpoint.weight_file import (
    WeightFile,
    WeightFolder,
    disk_folder,
    find,
    memory_folder,
    prepare,
    sweep,
    turn,
    writing,
)
from kvrelay.config import Environment, ModelOptions
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.kernels.ranks import ALONE, Ranks
from kvrelay.log import Log
from kvrelay.models.registry import Model
from kvrelay.progress import Progress, Silent
from kvrelay.runner.loader import load_model
from kvrelay.runner.ranks.shares import SHARES

_PATIENCE_S = 5.0  # with another worker that writes and does not get on: it may have been stopped

log = Log("weights")


class Load(Protocol):
    def __call__(self, *, progress: Progress, contents: bool = True, announce: bool = True) -> Model: ...


def load_for_worker(
    folder: pathlib.Path,
    spec: ModelSpec,
    options: ModelOptions,
    environment: Environment,
    *,
    kernels: Kernels,
    dtype: torch.dtype,
    progress: Progress,
    max_positions: int | None,
    ranks: Ranks = ALONE,
) -> Model:
    """`load_model`, with weights that are shared if the options say so and the kernels can."""

    def load(*, progress: Progress, contents: bool = True, announce: bool = True) -> Model:
        return load_model(
            folder,
            spec,
            kernels=kernels,
            device=torch.device(options.device),
            dtype=dtype,
            load=options.load,
            progress=progress,
            weights=options.weights,
            max_positions=max_positions,
            ranks=ranks,
            contents=contents,
            announce=announce,
        )

    if not options.share_weights or not isinstance(kernels, NativeKernels):
        return load(progress=progress)
    folders = (memory_folder(), disk_folder(environment.cache_dir))
    model = load_shared(load, kernels, folders, file_name(folder, spec, options, kernels, ranks), progress)
    return load(progress=progress) if model is None else model


def file_name(
    folder: pathlib.Path, spec: ModelSpec, options: ModelOptions, kernels: NativeKernels, ranks: Ranks = ALONE
) -> str:
    """Of the file that has these weights and no others."""
    share = f"{ranks.rank} of {ranks.num_ranks}, cut as in {SHARES}"
    facts = [fingerprint(spec, "float32"), options.load, options.weights, share, kernels.layout()]
    if options.load == "auto":
        files = sorted(folder.resolve().glob("*.safetensors"))
        facts += [weights_digest(folder), *(f"{path}:{path.stat().st_mtime_ns}" for path in files)]
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()


def load_shared(
    load: Load, kernels: NativeKernels, folders: tuple[WeightFolder, ...], name: str, progress: Progress
) -> Model | None:
    """None: there is no room, or the worker that writes it does not get on."""
    for folder in folders:
        try:
            prepare(folder)
            sweep(folder, keep=name)
            file = find(folder, name)
            if file is None:
                with turn(folder, name, _PATIENCE_S) as held:
                    if not held:
                        log.warning("weights are not shared: the process that writes them does not get on", folder=folder.path)
                        return None
                    file = find(folder, name)
                    if file is None:
                        return _write(load, kernels, folder, name, progress)
            return _read(load, kernels, file, progress)  # not in turn: a reader that hangs holds up no other
        except OSError as error:
            log.warning("weights cannot be shared there", folder=folder.path, reason=error)
    return None


def _read(load: Load, kernels: NativeKernels, file: WeightFile, progress: Progress) -> Model:
    memory = _mapped(kernels, file, writable=False)
    with kernels.pack_inside(memory):
        model = load(progress=progress, contents=False)
    log.info("weights are shared", folder=file.folder.path, mib=file.size_bytes >> 20)
    return model


def _write(load: Load, kernels: NativeKernels, folder: WeightFolder, name: str, progress: Progress) -> Model:
    with writing(folder, name, _size_of(load, kernels)) as file:
        memory = _mapped(kernels, file, writable=True)
        with kernels.pack_inside(memory):
            model = load(progress=progress, announce=False)
        kernels.shared_memory.settle(memory)
    log.info("weights can be shared", folder=folder.path, mib=file.size_bytes >> 20)
    return model


def _size_of(load: Callable[..., Model], kernels: NativeKernels) -> int:
    """By building the model of shapes alone, in memory that is never touched."""
    before = kernels.weight_bytes
    load(progress=Silent(), contents=False)
    return kernels.weight_bytes - before


def _mapped(kernels: NativeKernels, file: WeightFile, *, writable: bool) -> torch.Tensor:
    try:
        return kernels.shared_memory.open(file.descriptor, file.size_bytes, writable=writable, on_free=file.close)
    except OSError:
        file.close()
        raise
