"""Which kernels a device gets."""

from __future__ import annotations

import torch

from kvrelay.config import Environment
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.native.build import KernelsUnavailableError, load_library
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.log import Log

log = Log("kernels")


def choose_kernels(device: torch.device, dtype: torch.dtype, environment: Environment) -> Kernels:
    """C for float32 on a CPU, unless switched off or impossible here, which is logged once; else PyTorch."""
    if device.type != "cpu" or dtype != torch.float32 or not environment.native_kernels:
        return TorchKernels()
    try:
        return NativeKernels(load_library(environment.cache_dir))
    except KernelsUnavailableError as error:
        log.warning("no native kernels, so PyTorch's are used, which are slower", reason=error)
        return TorchKernels()
