"""A worker process that begins anew: the same interpreter with the same arguments, in place of itself.

The process id stays, and with it the tie to the launcher, so its supervisor sees no death. Everything else
goes with the old program: threads, memory, connections, registrations with transports. Nothing of the old incarnation can
touch a peer's memory any more.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

import zmq

from kvrelay.errors import ConfigError
from kvrelay.states import Role
from kvrelay.wire.launcher import with_role

_STANDARD = 3  # input, output, errors
_LAST_WORDS_S = 1.0


def execute_again(role: Role | None, keep: int | None) -> NoReturn:
    """In `role`, if that is given. `keep` is the descriptor of the tie to the launcher, which is named in the arguments."""
    arguments = [sys.executable, *sys.orig_argv[1:]]
    if role is not None:
        arguments = with_role(arguments, role)
    _send_last_words()
    _close_at_execution(but=keep)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(sys.executable, arguments)
    except OSError as error:
        raise ConfigError(f"the worker cannot start again: {error}") from error


def _send_last_words() -> None:
    """ZMQ's own thread still sends what was said before its sockets were closed. The end of its context waits for that."""
    ending = threading.Thread(target=zmq.Context.instance().term, name="last-words", daemon=True)
    ending.start()
    ending.join(_LAST_WORDS_S)


def _close_at_execution(but: int | None) -> None:
    """Not every library marks its descriptors so, and a port that stayed open would look like a worker that lives."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor >= _STANDARD:
            try:
                os.set_inheritable(descriptor, descriptor == but)
            except OSError:
                continue  # closed meanwhile, such as the one that listed them
