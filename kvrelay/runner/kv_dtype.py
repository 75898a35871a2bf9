"""The precision in which KV is held."""

from __future__ import annotations

import torch

from kvrelay.config import ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.kernels.fp8 import FIRST_WITH_FP8, FP8


def choose_kv_dtype(options: ModelOptions, dtype: torch.dtype) -> torch.dtype:
    return FP8 if options.kv_dtype == "fp8" else dtype


def check_kv_dtype(options: ModelOptions) -> None:
    """Raises ConfigError where KV cannot be held as it is asked for."""
    if options.kv_dtype != "fp8":
        return
    if options.weights == "int8":
        raise ConfigError("--kv-dtype fp8: --weights int8 needs the native kernels, which do not read KV in fp8")
    if options.device == "cuda" and torch.cuda.get_device_capability() < FIRST_WITH_FP8:
        least = ".".join(map(str, FIRST_WITH_FP8))
        raise ConfigError(f"--kv-dtype fp8: the card's compute capability is below {least}")
