"""Names for full blocks of tokens, equal in every process: engines cache KV under them, routers look for it by them.

    root = hash(model and layout, LoRA adapter, cache salt)
    root -> hash(root, block 0) -> hash(that, block 1) -> ...

The hash of a block covers its tokens and, through its parent's hash, all tokens before it. Different models, layouts,
adapters, salts and block sizes never meet. A hash is 16 bytes of BLAKE2b over the parent's hash and the tokens as little-endian
32-bit integers, so a block of 16 tokens is one round of the compression function.

A whole prompt is hashed by one native call (hashing.c) where there is a compiler; `block_hash` says what it computes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import sys
import sysconfig
from collections.abc import Callable, Sequence

from kvrelay.native.compile import load_native

HASH_BYTES = 16
_PLAIN_SIZE = 1 if sys.version_info < (3, 12) else 8  # how CPython marks a positive integer of one digit

_HashBlocks = Callable[[Sequence[int], int, int, int, bytes], bytes]


def root_hash(cache_seed: str, cache_salt: str, adapter: str = "") -> bytes:
    """Where a chain starts. `cache_seed` is the fingerprint of the workers that share KV, `adapter` the digest of a LoRA
    adapter, which changes KV as another model does."""
    seed = (f"{cache_seed}+{adapter}" if adapter else cache_seed).encode()
    return hashlib.blake2b(len(seed).to_bytes(8, "little") + seed + cache_salt.encode(), digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Raises OverflowError for a token that has no place in 32 bits."""
    try:
        packed = struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise OverflowError(f"a token is no 32-bit integer: {error}") from error
    return hashlib.blake2b(parent + packed, digest_size=HASH_BYTES).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Appends the hashes of the blocks up to `num_blocks` (all of them full) that are not there yet."""
    missing = num_blocks - len(hashes)
    if missing > 0:
        assert num_blocks * block_size <= len(tokens)
        parent = hashes[-1] if hashes else root
        if missing == 1:  # as it grows token by token: less than it costs to get to native code
            hashes.append(block_hash(parent, tokens[(num_blocks - 1) * block_size : num_blocks * block_size]))
            return
        packed = _hash_blocks()(tokens, len(hashes) * block_size, block_size, missing, parent)
        hashes.extend(struct.unpack(f"{HASH_BYTES}s" * missing, packed))


def hash_prompt(root: bytes, tokens: Sequence[int], block_size: int, num_blocks: int, first: int = 0) -> bytes:
    """The hashes of the blocks from `first` on, one after the other; `root` is the hash before them."""
    assert num_blocks * block_size <= len(tokens)
    return _hash_blocks()(tokens, first * block_size, block_size, num_blocks - first, root)


def tokens_below(tokens: Sequence[int], limit: int) -> bool:
    """Whether all of them are from 0 to `limit` - 1."""
    return _tokens_below()(tokens, limit)


def prepare() -> None:
    """Compiles what has to be compiled, so that the first request does not wait for it."""
    _hash_blocks()


def _lists_are_plain() -> bool:
    """Whether the C code's image of a list is this interpreter's: CPython with its lock, on a 64-bit machine."""
    plain = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    return plain and sys.byteorder == "little" and sys.maxsize == 2**63 - 1


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_native(__file__) if _lists_are_plain() else None


@functools.cache
def _tokens_below() -> Callable[[Sequence[int], int], bool]:
    library = _library()
    if library is None or _hash_blocks() is _hash_by_hashlib:
        return _below_by_comparing
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_long, ctypes.c_ssize_t)
    function = prototype(("kvrelay_tokens_below", library))
    return lambda tokens, limit: bool(function(tokens if isinstance(tokens, list) else list(tokens), limit, _PLAIN_SIZE))


def _below_by_comparing(tokens: Sequence[int], limit: int) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) < limit)


@functools.cache
def _hash_blocks() -> _HashBlocks:
    library = _library()
    if library is None:
        return _hash_by_hashlib
    # PYFUNCTYPE keeps Python's lock, since the function reads a list.
    number, text = ctypes.c_ssize_t, ctypes.c_char_p
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, number, number, number, text, text, number)
    function = prototype(("kvrelay_hash_blocks", library))

    def hash_blocks(tokens: Sequence[int], first: int, size: int, count: int, parent: bytes) -> bytes:
        out = (ctypes.c_char * (HASH_BYTES * count))()
        listed = tokens if isinstance(tokens, list) else list(tokens)
        if function(listed, first, size, count, parent, out, _PLAIN_SIZE):
            raise OverflowError("a token is no 32-bit integer")
        return out.raw

    trial = ([0, 1, 255, 256, 70_000, 2**30 - 1, 2**30, 2**31 - 1, -1, -(2**31)], 0, 2, 5, bytes(HASH_BYTES))
    return hash_blocks if hash_blocks(*trial) == _hash_by_hashlib(*trial) else _hash_by_hashlib


def _hash_by_hashlib(tokens: Sequence[int], first: int, size: int, count: int, parent: bytes) -> bytes:
    """Where there is no compiler."""
    hashes = []
    for start in range(first, first + size * count, size):
        parent = block_hash(parent, tokens[start : start + size])
        hashes.append(parent)
    return b"".join(hashes)
