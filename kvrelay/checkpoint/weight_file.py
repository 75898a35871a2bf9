"""Files with packed weights that all workers of a host map: the first one writes, the others read.

    NAME            whole and never written to again. Who uses it holds a shared lock on it
    NAME.PID.part   being written. Its writer holds a lock on it; then it is renamed, so that half a file is never seen
    NAME.lock       held by the thread that writes NAME and says so in it, while the others wait and watch it

A lock ends with its process. So a file that no process has locked is not used by any, however its writer ended, and `sweep`
removes it. The lock on writing only saves work: two that wrote at once would rename one after the other.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

SUFFIX = ".weights"
_POLL_S = 0.05
_ON_DISK = "D"  # the kernel's letter for a thread that waits for a disk and can do nothing else
_SPARE = 64 << 20  # bytes that a file leaves free beside itself


@dataclass(frozen=True)
class WeightFolder:
    """Where weight files are. `num_unused` files may stay that no process uses."""

    path: pathlib.Path
    num_unused: int = 0


@dataclass(frozen=True)
class WeightFile:
    """An open file, locked by this process until it is closed."""

    folder: WeightFolder
    descriptor: int
    size_bytes: int

    def close(self) -> None:
        if _open.pop(self.descriptor, None) is not None:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # a mapping would keep it
            os.close(self.descriptor)
            sweep(self.folder)


_open: dict[int, WeightFile] = {}  # this process's


def close_all() -> None:
    """For a process that ends at once: what it alone used is removed."""
    for file in list(_open.values()):
        file.close()


def memory_folder() -> WeightFolder:
    """In memory, so what no process uses must go."""
    return WeightFolder(pathlib.Path("/dev/shm") / f"kvrelay-{os.geteuid()}")


def disk_folder(cache_dir: pathlib.Path) -> WeightFolder:
    return WeightFolder(cache_dir / "weights", num_unused=2)


def prepare(folder: WeightFolder) -> None:
    """Raises OSError where files of this user, which no other user may write, cannot be."""
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise OSError(f"{folder.path} is not a folder that this user alone may write to")


def find(folder: WeightFolder, name: str) -> WeightFile | None:
    """The file of that name, if it is whole."""
    path = folder.path / (name + SUFFIX)
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_at(path, descriptor):
            os.utime(descriptor)  # the least recently used one is removed first
            return _opened(folder, descriptor, os.fstat(descriptor).st_size)
        os.close(descriptor)  # removed before it was locked


@contextmanager
def writing(folder: WeightFolder, name: str, size_bytes: int) -> Iterator[WeightFile]:
    """A file of that size to fill, which is its user's to close; it gets its name afterwards, unless there was an error. Raises
    OSError, where there is no room for it too."""
    whole = folder.path / (name + SUFFIX)
    path = folder.path / f"{name}{SUFFIX}.{os.getpid()}.part"
    descriptor = _create(path)
    try:
        _reserve(descriptor, size_bytes)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    try:
        yield _opened(folder, descriptor, size_bytes)
        os.fsync(descriptor)
        path.replace(whole)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def turn(folder: WeightFolder, name: str, patience_s: float) -> Iterator[bool]:
    """Waits while another process writes the file of that name. False: it has not got on for `patience_s`, and nothing is
    held."""
    with (folder.path / f"{name}.lock").open("a+b", buffering=0) as file:
        held = _wait_for(file.fileno(), patience_s)
        if held:
            file.truncate(0)
            file.write(f"{os.getpid()} {threading.get_native_id()}".encode())
        yield held


def _wait_for(descriptor: int, patience_s: float) -> bool:
    deadline, work = time.monotonic() + patience_s, _work_of(descriptor)
    while not _try_lock(descriptor):
        before, work = work, _work_of(descriptor)
        if work != before or _ON_DISK in work:
            deadline = time.monotonic() + patience_s
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _work_of(descriptor: int) -> tuple[str, ...]:
    """What the thread has done that has the turn: pages read, processor time. Another value whenever it gets on."""
    try:
        process, thread = map(int, os.pread(descriptor, 64, 0).split())
        shown = pathlib.Path(f"/proc/{process}/task/{thread}/stat").read_text()
    except (ValueError, OSError):  # it is about to say who it is, or has ended
        return ()
    state, *fields = shown.rpartition(") ")[2].split()
    return str(thread), fields[8], fields[10], fields[11], *([_ON_DISK] if state == _ON_DISK else [])


def sweep(folder: WeightFolder, keep: str = "") -> None:
    """Removes files that no process uses, except for the newest ones that may stay, and `keep`."""
    with suppress(OSError):
        whole = sorted(folder.path.glob(f"*{SUFFIX}"), key=_last_used, reverse=True)
        spared = folder.num_unused
        for path in [*whole, *folder.path.glob("*.part"), *folder.path.glob("*.lock")]:
            if path.name in (keep + SUFFIX, f"{keep}.lock"):
                continue
            if path.suffix == SUFFIX and spared > 0:
                spared -= 1
                continue
            _remove_unused(path)


def _opened(folder: WeightFolder, descriptor: int, size_bytes: int) -> WeightFile:
    _open[descriptor] = file = WeightFile(folder, descriptor, size_bytes)
    return file


def _create(path: pathlib.Path) -> int:
    """Empty and locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # removed before it was locked


def _reserve(descriptor: int, size_bytes: int) -> None:
    """So that no write to the mapped file can lack room, which would be a signal and no error."""
    free = os.fstatvfs(descriptor)
    if free.f_bavail * free.f_frsize < size_bytes + _SPARE:
        raise OSError(f"there is no room for {size_bytes >> 20} MiB")
    os.posix_fallocate(descriptor, 0, size_bytes)


def _remove_unused(path: pathlib.Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if _try_lock(descriptor) and _is_at(path, descriptor):
                path.unlink()
        finally:
            os.close(descriptor)


def _last_used(path: pathlib.Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: pathlib.Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
