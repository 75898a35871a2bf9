"""Which kernels a device gets."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

from kvrelay.config import Environment, ModelOptions
from kvrelay.errors import ConfigError
from kvrelay.kernels.base import Kernels
from kvrelay.kernels.native.build import KernelsUnavailableError, load_library
from kvrelay.kernels.native.kernels import NativeKernels
from kvrelay.kernels.torch_kernels import TorchKernels
from kvrelay.log import Log

_MIN_TRITON = (3, 5)  # dependent launch, and compiling beside each other
_MIN_CAPABILITY = (8, 0)  # bfloat16 in tensor cores, asynchronous copies
_DEFAULT = ModelOptions()

log = Log("kernels")


def choose_kernels(
    device: torch.device, dtype: torch.dtype, environment: Environment, options: ModelOptions = _DEFAULT
) -> Kernels:
    """C for float32 on a CPU and Triton on an NVIDIA card, unless switched off or impossible here, which is logged once; else
    PyTorch, as on a CPU with KV in fp8. Raises ConfigError if the options force kernels that there are not."""
    if device.type == "cuda":
        return _for_card(device, options)
    if (options.attention, options.linears) != ("auto", "auto"):
        raise ConfigError("--attention and --linears choose among kernels for NVIDIA cards; they need --device cuda")
    if device.type != "cpu" or dtype != torch.float32 or not environment.native_kernels or options.kv_dtype == "fp8":
        return TorchKernels()
    try:
        return NativeKernels(load_library(environment.cache_dir))
    except KernelsUnavailableError as error:
        log.warning("no native kernels, so PyTorch's are used, which are slower", reason=error)
        return TorchKernels()


def _for_card(device: torch.device, options: ModelOptions) -> Kernels:
    missing = _missing(device)
    if missing is None:
        from kvrelay.kernels.cuda.kernels import CudaKernels  # needs Triton

        return CudaKernels(attention=options.attention, linears=options.linears)
    if "triton" in (options.attention, options.linears):
        raise ConfigError(f"--attention triton or --linears triton: {missing}")
    log.warning("no Triton kernels, so PyTorch's are used, which are slower", reason=missing)
    return TorchKernels()


def _missing(device: torch.device) -> str | None:
    """What the Triton kernels lack here."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'kvrelay[cuda]')"
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_TRITON:
        return f"Triton {version} is older than {_MIN_TRITON[0]}.{_MIN_TRITON[1]}"
    if not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA card"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return f"the card's compute capability is below {_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]}"
    return None
