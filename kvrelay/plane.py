"""Every ZMQ socket of the serving, registry, signal and event planes comes from here, so that one key protects them all.

    listening(kind)     to be bound: takes only peers that hold the cluster key, if there is one
    connecting(kind)    to be connected: shows that it holds the key

A process belongs to one cluster. Without a key the planes are open, and belong on loopback.
"""

from __future__ import annotations

from typing import TypeAlias

import zmq

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


def listening(kind: int) -> Socket:
    return _new_socket(kind)


def connecting(kind: int) -> Socket:
    return _new_socket(kind)


def _new_socket(kind: int) -> Socket:
    """Of this process's one ZMQ context. Drops what is unsent when it closes, unless told otherwise."""
    context: Context = zmq.Context.instance()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    return socket
