"""Several hosts on one machine: network namespaces, each with one cable to a switch that has a namespace of its own.

    client -- 10.213.77.1 --+
    router -- 10.213.77.2 --+-- switch (a bridge)
    ...                     |

Nothing of it shows in the machine's own network, and removing a namespace removes its cables. What an earlier run left behind
when it was killed is removed first; a lock keeps two runs apart. Labs of different names do not know of each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import http.client
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence

from patience import PATIENCE_S

PREFIX = "kvrelay-test-"
SUBNET = "10.213.77"
_CLONE_NEWNET = 0x40000000


def why_not() -> str:
    """Why this machine cannot make namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (package iproute2)"
    tried = subprocess.run(["ip", "netns", "add", f"{PREFIX}try-{os.getpid()}"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"this kernel makes no network namespaces: {tried.stderr.strip()}"
    ip("netns", "del", f"{PREFIX}try-{os.getpid()}")
    return ""


def ip(*words: str) -> str:
    result = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"ip {' '.join(words)}: {result.stderr.strip()}"
    return result.stdout


class Host:
    """One namespace. Its cable is `eth0` here and has the host's name on the switch."""

    def __init__(self, lab: str, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.namespace = f"{PREFIX}{lab}-{name}"
        self._switch = _switch(lab)

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def pull_cable(self) -> None:
        """Packets are lost from now on, in both directions; addresses, routes and sockets stay."""
        ip("-n", self._switch, "link", "set", "dev", self.name, "down")

    def plug_cable(self) -> None:
        ip("-n", self._switch, "link", "set", "dev", self.name, "up")

    def connect(self, address: str, port: int, timeout_s: float = PATIENCE_S) -> socket.socket:
        """A TCP connection made from this host. A thread enters the namespace for it; the socket stays there."""
        made: list[socket.socket] = []
        failed: list[Exception] = []

        def work() -> None:
            try:
                _enter(self.namespace)
                made.append(socket.create_connection((address, port), timeout_s))
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return made[0]

    def http(self, address: str, port: int, timeout_s: float = PATIENCE_S) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
        connection.sock = self.connect(address, port, timeout_s)
        return connection


def _enter(namespace: str) -> None:
    """For the calling thread only."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def hosts(lab: str, names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """The named hosts, joined. Always removed at the end."""
    with (pathlib.Path(tempfile.gettempdir()) / f"{PREFIX}{lab}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove(lab)
        try:
            yield _build(lab, names)
        finally:
            _remove(lab)


def _switch(lab: str) -> str:
    return f"{PREFIX}{lab}-switch"


def _build(lab: str, names: Sequence[str]) -> dict[str, Host]:
    switch = _switch(lab)
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
    ip("-n", switch, "link", "set", "bridge0", "up")
    built = {}
    for number, name in enumerate(names, 1):
        host = built[name] = Host(lab, name, f"{SUBNET}.{number}")
        ip("netns", "add", host.namespace)
        ip("-n", switch, "link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        ip("-n", switch, "link", "set", "dev", name, "master", "bridge0", "up")
        ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        ip("-n", host.namespace, "link", "set", "lo", "up")
        ip("-n", host.namespace, "link", "set", "eth0", "up")
    return built


def _remove(lab: str) -> None:
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{PREFIX}{lab}-"):
            for process in ip("netns", "pids", name).split():  # left behind by a run that was killed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            ip("netns", "del", name)
