"""Files of weights that processes share: whole or not there, and gone when no process uses them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

from kvrelay.checkpoint.weight_file import SUFFIX, WeightFile, WeightFolder, close_all, find, prepare, sweep, turn, writing

NAME = "0123"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> WeightFolder:
    made = WeightFolder(tmp_path / "weights")
    prepare(made)
    return made


def names(folder: WeightFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


def write(folder: WeightFolder, content: bytes, name: str = NAME) -> WeightFile:
    with writing(folder, name, len(content)) as file:
        os.pwrite(file.descriptor, content, 0)
    return file


def content(file: WeightFile) -> bytes:
    return os.pread(file.descriptor, file.size_bytes, 0)


def test_a_file_that_was_written_is_found_whole(folder: WeightFolder) -> None:
    assert find(folder, NAME) is None
    written = write(folder, b"weights")
    found = find(folder, NAME)
    assert found is not None
    assert content(found) == b"weights"
    written.close()
    assert names(folder) == [NAME + SUFFIX], "another uses it"
    found.close()
    assert names(folder) == [], "nobody uses it"


def test_an_error_in_writing_leaves_nothing(folder: WeightFolder) -> None:
    with pytest.raises(RuntimeError), writing(folder, NAME, 100) as file:
        raise RuntimeError
    file.close()
    assert names(folder) == []


def test_a_file_that_does_not_fit_is_refused(folder: WeightFolder) -> None:
    with pytest.raises(OSError, match="no room"), writing(folder, NAME, 1 << 60):
        pass
    assert names(folder) == []


def test_some_files_that_nobody_uses_may_stay_the_newest_first(folder: WeightFolder) -> None:
    roomy = WeightFolder(folder.path, num_unused=2)
    for number, name in enumerate("abcd"):
        file = write(roomy, b"weights", name)
        os.utime(file.descriptor, (number, number))
        file.close()
    assert names(folder) == [f"c{SUFFIX}", f"d{SUFFIX}"]


def test_what_is_about_to_be_used_is_kept(folder: WeightFolder) -> None:
    write(WeightFolder(folder.path, num_unused=1), b"weights").close()
    sweep(folder, keep=NAME)
    assert names(folder) == [NAME + SUFFIX]
    sweep(folder)
    assert names(folder) == []


def test_a_process_that_ends_at_once_can_let_go_of_all(folder: WeightFolder) -> None:
    write(folder, b"weights")
    close_all()
    assert names(folder) == []


def test_a_folder_that_others_may_write_to_is_refused(folder: WeightFolder) -> None:
    folder.path.chmod(0o777)
    with pytest.raises(OSError, match="alone"):
        prepare(folder)


def start(folder: WeightFolder, *lines: str) -> subprocess.Popen[bytes]:
    """A process that has done these lines when it says so, and then waits."""
    head = f"""
        import pathlib, time
        from kvrelay.checkpoint.weight_file import *
        folder, NAME = WeightFolder(pathlib.Path({str(folder.path)!r})), {NAME!r}
    """
    program = "\n".join([textwrap.dedent(head), *lines, "print('ready', flush=True)", "time.sleep(600)"])
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_writer_that_is_killed_leaves_no_file_and_no_lock(folder: WeightFolder) -> None:
    writer = start(
        folder,
        "turned = turn(folder, NAME, 1.0); assert turned.__enter__()",
        "opened = writing(folder, NAME, 1 << 20); opened.__enter__()",
    )
    try:
        assert find(folder, NAME) is None
        with turn(folder, NAME, 0.0) as held:
            assert not held, "another one writes"
        sweep(folder)
        assert any(name.endswith(".part") for name in names(folder)), "it is being written"
    finally:
        kill(writer)
    with turn(folder, NAME, 60.0) as held:
        assert held
        assert find(folder, NAME) is None
        write(folder, b"weights")
    sweep(folder)
    assert names(folder) == [NAME + SUFFIX]
    close_all()


@pytest.mark.parametrize("line", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(600)"])
def test_a_writer_that_does_not_get_on_is_not_waited_for(folder: WeightFolder, line: str) -> None:
    taken = "turned = turn(folder, NAME, 1.0); assert turned.__enter__()"
    writer = start(folder, "import os, signal", taken, "print('ready', flush=True)", line)
    try:
        with turn(folder, NAME, 0.3) as held:
            assert not held
    finally:
        kill(writer)


def test_a_slow_writer_is_waited_for(folder: WeightFolder) -> None:
    """It computes for several times as long as one that does nothing would be waited for."""
    lines = ["with turn(folder, NAME, 1.0):", " print('ready', flush=True)"]
    writer = start(folder, *lines, " until = time.process_time() + 3.0", " while time.process_time() < until: pass")
    try:
        with turn(folder, NAME, 2.0) as held:
            assert held
    finally:
        kill(writer)


def test_a_file_outlives_its_writer_as_long_as_it_is_used(folder: WeightFolder) -> None:
    writer = start(
        folder,
        "import os",
        "with writing(folder, NAME, 7) as file: os.pwrite(file.descriptor, b'weights', 0)",
    )
    found = find(folder, NAME)
    kill(writer)
    assert found is not None
    sweep(folder)
    assert content(found) == b"weights"
    assert names(folder) == [NAME + SUFFIX]
    found.close()
    assert names(folder) == []
