"""From options and a checkpoint folder to an encoder that is ready. It is not in `build.py`, so that a worker that encodes
nothing does not load Pillow."""

from __future__ import annotations

import pathlib

from kvrelay.checkpoint.spec import read_spec
from kvrelay.config import EngineOptions, ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.log import Log
from kvrelay.media.image_spec import read_image_spec
from kvrelay.progress import Progress
from kvrelay.runner.build import make_store
from kvrelay.runner.choices import DTYPES, choose_dtype, cpu_flags, open_device, set_threads
from kvrelay.runner.loader import load_tower
from kvrelay.runner.vision.encoder import Decode, Encoder

log = Log("build")


def build_encoder(
    model_options: ModelOptions, engine_options: EngineOptions, folder: pathlib.Path, decode: Decode, progress: Progress
) -> Encoder:
    """Raises ConfigError or ModelError, also for a text model. Reads none of the text model's weights. A runner in the same
    process is built afterwards, so that it knows what memory the tower has left."""
    device = open_device(model_options)
    dtype_name = choose_dtype(model_options, cpu_flags())
    set_threads(model_options.threads)
    spec, image_spec = read_spec(folder), read_image_spec(folder)
    store = make_store(spec, engine_options, device, DTYPES[dtype_name])
    if image_spec is None or store is None:
        raise ConfigError(f"{folder}: {spec.architecture} takes no images, so there is nothing to encode")
    tower = load_tower(
        folder, spec, device=device, dtype=DTYPES[dtype_name], load=model_options.load, progress=progress
    )  # fmt: skip
    log.info("encoder ready", model=model_options.model, device=device.type, dtype=dtype_name)
    return Encoder(tower, image_spec, store, decode=decode, device=device)
