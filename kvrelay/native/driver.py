"""The few calls of NVIDIA's driver that PyTorch does not offer: sharing an allocation with other processes.

The driver is loaded by ctypes, so that nothing has to be compiled and no package installed. Its contract for these calls: a
handle names a whole allocation of cuMemAlloc (not cuMemCreate); it cannot be opened in the process that made it; opened twice
it gives the same address and counts; what is opened must be closed before its owner frees it.
"""

from __future__ import annotations

import ctypes
import functools

from kvrelay.errors import KVRelayError

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the handle may be another card's
_Address = ctypes.c_uint64  # CUdeviceptr


class DriverError(KVRelayError):
    """There is no driver or no card, or the driver refused a call."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle; passed by value. Bytes, not characters: it may hold zeros."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_Address), ctypes.POINTER(ctypes.c_size_t), _Address),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _Address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Address), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Address,),
    "cuMemcpyDtoDAsync_v2": (_Address, _Address, ctypes.c_size_t, ctypes.c_void_p),
}


@functools.cache
def load_driver() -> ctypes.CDLL:
    """Raises DriverError where there is no driver, or no card."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise DriverError(f"memory of a card needs NVIDIA's driver: {error}") from error
    _check(library, "cuInit", library.cuInit(0))
    count = ctypes.c_int()
    _check(library, "cuDeviceGetCount", library.cuDeviceGetCount(ctypes.byref(count)))
    if count.value < 1:
        raise DriverError("memory of a card needs an NVIDIA card, and the driver sees none")
    return library


class Driver:
    """One card's context, the one that PyTorch uses. Every call makes it current in its thread first."""

    def __init__(self, index: int) -> None:
        self._library = load_driver()
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)  # for as long as the process lives

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        """A handle of the allocation that holds this memory, and the memory's offset in it."""
        base, size = _Address(), ctypes.c_size_t()
        self._here("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        if address + size_bytes > base.value + size.value:
            raise DriverError(
                "the pool spans several allocations, which cannot be shared: unset expandable_segments in "
                "PYTORCH_CUDA_ALLOC_CONF"
            )
        handle = _Handle()
        self._here("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved), address - base.value

    def open(self, handle: bytes) -> int:
        assert len(handle) == HANDLE_BYTES
        address = _Address()
        self._here("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._here("cuIpcCloseMemHandle", address)

    def copy(self, to_address: int, from_address: int, size_bytes: int, stream: int) -> None:
        """Queued on the stream."""
        self._here("cuMemcpyDtoDAsync_v2", to_address, from_address, size_bytes, stream)

    def _here(self, name: str, *arguments: object) -> None:
        self._call("cuCtxSetCurrent", self._context)
        self._call(name, *arguments)

    def _call(self, name: str, *arguments: object) -> None:
        _check(self._library, name, getattr(self._library, name)(*arguments))


def _check(library: ctypes.CDLL, name: str, status: int) -> None:
    """Raises DriverError with the driver's own word for what went wrong."""
    if status != 0:
        word = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(word))
        raise DriverError(f"{name} failed: {(word.value or b'').decode() or f'status {status}'}")
