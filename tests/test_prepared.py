"""Processes from the nursery are as others: what they print, how they end, and that none is left behind."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
from patience import PATIENCE_S
from prepared import popen

SCRIPT = """
import os, sys, time
print(sys.argv[1:], os.environ["WORD"], os.getpgid(0) == os.getpid(), "torch" in sys.modules, flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit(int(input()))
"""
OWNER = """
import sys
from prepared import popen
process = popen([sys.executable, sys.argv[1], "wait"], env={"WORD": "x"})
print(process.pid, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def test_it_has_its_own_arguments_environment_group_pipes_and_status(script: str) -> None:
    environment = {**os.environ, "WORD": "said"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = popen([sys.executable, script, "end"], env=environment, process_group=0, **pipes)
    with process.stdout, process.stdin:
        assert process.stdout.readline() == "['end'] said True True\n"
        assert process.poll() is None
        process.stdin.write("3\n")
        process.stdin.flush()
        assert process.wait(PATIENCE_S) == process.wait() == process.poll() == process.returncode == 3


def test_a_signal_ends_it_and_waiting_has_an_end(script: str) -> None:
    process = popen([sys.executable, script, "wait"], env={**os.environ, "WORD": ""}, stdout=subprocess.PIPE)
    with process.stdout:
        assert process.stdout.readline().startswith(b"['wait']")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.terminate()
    assert process.wait(PATIENCE_S) == -signal.SIGTERM
    process.kill()  # reaches nobody


def test_it_ends_with_the_process_that_asked_for_the_nursery(script: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KVRELAY_TESTS_NURSERY"}
    environment["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])])
    command = [sys.executable, "-c", OWNER, script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        started = psutil.Process(owner.pid).children(recursive=True)
        assert [pid in (process.pid for process in started), len(started)] == [True, 2]
        owner.kill()
    deadline = time.monotonic() + PATIENCE_S
    while not all(map(gone, started)):
        assert time.monotonic() < deadline, "one is left"
        time.sleep(0.05)


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
