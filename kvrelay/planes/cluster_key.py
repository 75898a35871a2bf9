"""The cluster key: one secret of 32 bytes in a file, held by the routers and workers of a cluster and by no other process.

    kvrelay keygen FILE  ->  64 hexadecimal digits  ->  ClusterKey: two CURVE key pairs that are made from them

The end that listens has the server's pair, the end that connects has the client's. Neither public key is ever published: making
a connection takes both, and so the file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pathlib
import secrets
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from kvrelay.config import Environment
from kvrelay.errors import ConfigError
from kvrelay.planes.secret_file import read_secret_lines

OPTION = "--cluster-key"
DEFAULT_FILE = "cluster.key"
_NUM_BYTES = 32
_MAX_FILE_BYTES = 4096
_HEADER = "# kvrelay cluster key. Routers and workers that hold it trust each other: keep it secret.\n"


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """The key pairs of one cluster, as ZMQ takes them (Z85). Equal secrets give equal pairs in every process."""

    server_secret: bytes = field(repr=False)
    server_public: bytes = field(repr=False)
    client_secret: bytes = field(repr=False)
    client_public: bytes = field(repr=False)
    seal: bytes = field(repr=False)  # signs what is left with a third party

    def sign(self, message: bytes) -> bytes:
        return hashlib.blake2b(message, key=self.seal, digest_size=16).hexdigest().encode()

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self.sign(message), signature)


def derive(secret: bytes) -> ClusterKey:
    assert len(secret) == _NUM_BYTES
    server, client = _pair_secret(secret, b"kvrelay server"), _pair_secret(secret, b"kvrelay client")
    seal = hashlib.blake2b(key=secret, digest_size=_NUM_BYTES, person=b"kvrelay seal").digest()
    return ClusterKey(server, zmq.curve_public(server), client, zmq.curve_public(client), seal)


def _pair_secret(secret: bytes, purpose: bytes) -> bytes:
    encoded: bytes = z85.encode(hashlib.blake2b(key=secret, digest_size=_NUM_BYTES, person=purpose).digest())
    return encoded


def key_file(option: str, environment: Environment) -> str:
    """The file that --cluster-key names, else the one that KVRELAY_CLUSTER_KEY names. Empty: there is no key."""
    return option or environment.cluster_key


def load_key(path: str) -> ClusterKey | None:
    """None where no file is named. Raises ConfigError for a file that holds no key."""
    return derive(_parse(path)) if path else None


def _parse(path: str) -> bytes:
    try:
        (secret,) = map(bytes.fromhex, read_secret_lines(OPTION, path, _MAX_FILE_BYTES))
    except ValueError as error:
        reason = "must hold one line of hexadecimal digits (make one with `kvrelay keygen`)"
        raise ConfigError(f"{OPTION} {path} {reason}") from error
    if len(secret) != _NUM_BYTES:
        raise ConfigError(f"{OPTION} {path} holds {len(secret)} bytes where a key has {_NUM_BYTES}")
    return secret


def write_new_key(path: pathlib.Path) -> None:
    """A fresh key that only its owner can read. Raises ConfigError rather than overwrite a file."""
    text = f"{_HEADER}{secrets.token_hex(_NUM_BYTES)}\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; a key is never overwritten (name another file, or remove it)") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)
