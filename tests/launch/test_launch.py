"""`kvrelay serve` as a user runs it, and the supervisor under it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S, until
from server import Server, serve
from tiny_models import tiny_model

from kvrelay.launch import supervise
from kvrelay.launch.supervise import Supervisor
from kvrelay.states import Role
from kvrelay.wire.launcher import Becomes, Ends, Ready, ToLauncher, encode_line

TINY = ("--max-batch", "8", "--kv-blocks", "64", "--registration-s", "2")
ONE = ("--whole", "1", *TINY)


def processes_of(server: Server) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def complete(url: str, max_tokens: int = 4) -> str:
    body = {"prompt": "The quick", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        text: str = json.loads(response.read())["choices"][0]["text"]
        return text


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_model("llama"))


def test_two_workers_serve_and_sigterm_leaves_no_process(folder: str) -> None:
    with serve(folder, "--whole", "2", *TINY, fresh=True) as server:
        workers = server.get("/cluster")["workers"]
        assert [worker["state"] for worker in workers] == ["ready", "ready"]
        assert sum("kvrelay ready on" in line for line in server.lines) == 1
        assert len({complete(server.url) for _ in range(4)}) == 1
        server.idle_workers()
        started = processes_of(server)
        assert {worker["pid"] for worker in workers} <= {process.pid for process in started}
        server.stop()
        assert server.process.returncode == 0
        until(lambda: all(map(gone, started)))


def test_kill_9_of_the_parent_leaves_no_process(folder: str) -> None:
    with serve(folder, *ONE, fresh=True) as server:
        started = processes_of(server)
        assert len(started) >= 2
        server.process.kill()
        server.process.wait()
        until(lambda: all(map(gone, started)))


def test_ctrl_c_in_the_middle_of_a_long_answer_ends_everything(folder: str) -> None:
    with serve(folder, *ONE, fresh=True) as server:
        started = processes_of(server)
        body = json.dumps({"prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
        request = urllib.request.Request(server.url + "/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            assert response.readline().startswith(b"data:")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(PATIENCE_S) == 0
        until(lambda: all(map(gone, started)))


def test_a_killed_worker_is_replaced(folder: str) -> None:
    with serve(folder, *ONE, fresh=True) as server:
        before = complete(server.url)
        (worker,) = server.get("/cluster")["workers"]
        os.kill(worker["pid"], signal.SIGKILL)

        def replaced() -> bool:
            ready = [entry for entry in server.get("/cluster")["workers"] if entry["state"] == "ready"]
            return bool(ready) and ready[0]["pid"] != worker["pid"]

        until(replaced)
        assert complete(server.url) == before
        until(lambda: len(server.get("/cluster")["workers"]) == 1)


def test_a_worker_that_cannot_start_ends_serve_with_its_reason(folder: str) -> None:
    command = [sys.executable, "-m", "kvrelay", "serve", folder, "--port", "0", "--tp", "7"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.match(r"error: worker \d could not start: --tp 7", result.stderr.rstrip().splitlines()[-1])


def test_a_port_in_use_is_one_line(folder: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvrelay", "serve", folder, "--port", str(port)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert result.returncode == 2
    assert result.stderr == f"error: cannot listen on 127.0.0.1:{port}: Address already in use (choose another with --port)\n"


def test_a_router_and_workers_started_apart(folder: str) -> None:
    with serve_router(folder, "--registry-listen", "tcp://127.0.0.1:*") as router:
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(router.url)
        assert refused.value.code == 503
        (line,) = [line for line in router.lines if "ready on" in line]
        registry = line.rpartition(" at ")[2].rstrip(")")
        worker = subprocess.Popen([sys.executable, "-m", "kvrelay", "worker", folder, "--registry", registry, *TINY])
        try:
            until(lambda: router.get("/cluster")["ready"])
            assert complete(router.url)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == 0
            until(lambda: router.get("/cluster")["workers"] == [])
        finally:
            worker.kill()
            worker.wait()


class serve_router:
    """`kvrelay router` on a free port."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "kvrelay", "router", *arguments, "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.server = Server(process)

    def __enter__(self) -> Server:
        self.server.wait_ready()
        return self.server

    def __exit__(self, *_: object) -> None:
        self.server.stop()


# The supervisor alone


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_FIRST_PAUSE_S", 0.01)


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def saying(message: ToLauncher) -> str:
    """A script that says this on its tie."""
    return (
        "import socket, sys; fd = [word for word in sys.argv if word.startswith('--launcher-fd=')][0].split('=')[1];"
        f" socket.socket(fileno=int(fd)).sendall({encode_line(message)!r});"
    )


async def test_a_worker_that_ends_before_all_are_ready_fails_the_start() -> None:
    supervisor = Supervisor([script("import time; time.sleep(60)"), script("raise SystemExit(3)")])
    supervisor.start()
    error = await asyncio.wait_for(supervisor.failed, PATIENCE_S)
    assert str(error) == "worker 1 could not start: exit status 3"
    await supervisor.stop()
    assert supervisor.pids == []


async def test_the_reason_a_worker_gives_is_passed_on() -> None:
    supervisor = Supervisor([script(saying(Ends(reason="no such model")))])
    supervisor.start()
    error = await asyncio.wait_for(supervisor.failed, PATIENCE_S)
    assert str(error) == "worker 0 could not start: no such model"
    await supervisor.stop()


@pytest.mark.usefixtures("impatient")
async def test_a_worker_that_keeps_dying_is_given_up() -> None:
    crashes: list[str] = []
    supervisor = Supervisor([script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")], on_crash=crashes.append)
    supervisor.all_ready()
    supervisor.start()
    error = await asyncio.wait_for(supervisor.failed, PATIENCE_S)
    assert str(error) == "every worker ended too often; the last one: killed by SIGSEGV"
    assert crashes == ["restarted"] * 4 + ["given_up"]
    await supervisor.stop()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("end", ["raise SystemExit(0)", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
async def test_a_worker_that_ends_as_it_was_told_is_not_replaced(end: str, tmp_path: Path) -> None:
    """Another one that crashes beside it still is; and when that is given up, nobody is left."""
    count = f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); "
    supervisor = Supervisor([script(count + end), script("raise SystemExit(3)")])
    supervisor.all_ready()
    supervisor.start()
    error = await asyncio.wait_for(supervisor.failed, PATIENCE_S)
    assert str(error) == "every worker ended too often; the last one: exit status 3"
    assert (tmp_path / "starts").read_text() == "x"
    await supervisor.stop()


async def test_when_every_worker_has_left_as_told_nothing_has_failed() -> None:
    supervisor = Supervisor([script("raise SystemExit(0)")] * 2)
    supervisor.all_ready()
    supervisor.start()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait(supervisor._tasks)
    assert not supervisor.failed.done()
    assert supervisor.pids == []
    await supervisor.stop()


async def test_a_router_that_ends_as_told_is_replaced_and_each_says_when_it_is_ready(tmp_path: Path) -> None:
    count = f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); "
    supervisor = Supervisor([script(saying(Ready()) + count + "import time; time.sleep(600)")] * 2, comes_back=True)
    supervisor.start()
    async with asyncio.timeout(PATIENCE_S):
        await supervisor.until_ready()
        supervisor.all_ready()
        before = supervisor.pids
        os.kill(before[0], signal.SIGTERM)
        while len(set(supervisor.pids) - {before[0]}) < 2:
            await asyncio.sleep(0.05)
        await supervisor.until_ready()
    assert before[1] in supervisor.pids
    assert not supervisor.failed.done()
    await supervisor.stop()
    assert supervisor.pids == []


@pytest.mark.usefixtures("impatient")
async def test_a_crashed_worker_is_replaced_in_the_role_it_had_taken(tmp_path: Path) -> None:
    text = saying(Becomes(role=Role.DECODE)) + f"open({str(tmp_path / 'roles')!r}, 'a').write(sys.argv[-2] + ' '); sys.exit(3)"
    supervisor = Supervisor([[*script(text), "--role=prefill"]])
    supervisor.all_ready()
    supervisor.start()
    await asyncio.wait_for(supervisor.failed, PATIENCE_S)
    first, *later = (tmp_path / "roles").read_text().split()
    assert first == "--role=prefill"
    assert set(later) == {"--role=decode"}
    await supervisor.stop()


async def test_a_worker_that_ignores_sigterm_is_killed() -> None:
    text = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    supervisor = Supervisor([script(text)])
    supervisor.start()
    await asyncio.sleep(0.5)
    (pid,) = supervisor.pids
    await supervisor.stop(patience_s=0.2)
    assert supervisor.pids == []
    assert not psutil.pid_exists(pid)
