"""What a host of a cluster needs of its kernel, limits and libraries. Everything here is looked up on this host alone."""

from __future__ import annotations

import fcntl
import os
import pathlib
import resource
import shutil
import socket
import struct
import subprocess
import sys

from kvrelay.cli.doctor.finding import Checks, Finding, fail, ok, warn

_NEEDED_FILES = 8192  # a connection each: clients of a router, peers of a worker
_NEEDED_SHM_BYTES = 256 << 20
_NEEDED_LOCKED_BYTES = 1 << 30
_IMPORT_LIMIT_S = 60.0
_SIOCGIFADDR = 0x8915
_TRANSPORTS = {"nixl": "load_bindings", "mooncake": "load_library"}  # of kvrelay.transfer.engines


def host_checks(threads: int) -> Checks:
    return {
        "open files": check_open_files,
        "locked memory": lambda: check_locked_memory(pathlib.Path("/sys/class/infiniband")),
        "shared memory": lambda: check_shared_memory(pathlib.Path("/dev/shm")),
        "kernel": check_kernel,
        "nixl": lambda: check_transport("nixl"),
        "mooncake": lambda: check_transport("mooncake"),
        "ucx": lambda: check_ucx(interfaces()),
        "threads": lambda: check_threads(threads, pathlib.Path("/sys/fs/cgroup/cpu.max")),
    }


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _NEEDED_FILES:
        return ok("no limit" if soft == resource.RLIM_INFINITY else f"{soft} at once")
    remedy = f"ulimit -n {_NEEDED_FILES}, or LimitNOFILE={_NEEDED_FILES} in the systemd unit"
    return warn(f"{soft} at once (may be raised to {'any number' if hard == resource.RLIM_INFINITY else hard})", remedy)


def check_locked_memory(rdma_devices: pathlib.Path) -> Finding:
    """RDMA pins all of the KV pool; TCP and shared memory pin nothing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    cards = _names(rdma_devices)
    if not cards:
        return ok(f"{found}; no RDMA card that would need it")
    if soft == resource.RLIM_INFINITY or soft >= _NEEDED_LOCKED_BYTES:
        return ok(f"{found}; RDMA cards: {', '.join(cards)}")
    return warn(f"{found}, but RDMA ({', '.join(cards)}) pins the KV pool", "ulimit -l unlimited, or LimitMEMLOCK=infinity")


def check_shared_memory(folder: pathlib.Path) -> Finding:
    """KV pools are memfds and need no folder; UCX and PyTorch use it between processes of one host."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return warn(f"{folder}: {error.strerror}", f"mount a tmpfs on {folder}: UCX uses it on one host")
    found = f"{folder}: {usage.free / 1e6:.0f} of {usage.total / 1e6:.0f} MB free"
    if usage.free < _NEEDED_SHM_BYTES:
        return warn(found, "give it more (docker run --shm-size 1g): UCX uses it on one host")
    return ok(found)


def check_kernel() -> Finding:
    """What shared memory between workers, and waking threads, are made of."""
    try:
        descriptor = os.memfd_create("kvrelay-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(descriptor)
        os.close(os.eventfd(0, os.EFD_NONBLOCK))
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"\0kvrelay-doctor-{os.getpid()}")
    except (AttributeError, OSError) as error:  # AttributeError: another system than Linux
        return fail(
            f"{os.uname().sysname} {os.uname().release}: {error}", "use Linux 4.14 or newer, without a filter on memfd_create"
        )
    return ok(f"{os.uname().sysname} {os.uname().release}: memfd with seals, eventfd, abstract sockets")


def check_transport(name: str) -> Finding:
    """In a process of its own: a library that does not fit this machine may end it."""
    script = f"from kvrelay.transfer.engines.{name} import {_TRANSPORTS[name]} as load; load()"
    try:
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return warn("does not load within a minute", f"pip install --force-reinstall 'kvrelay[{name}]'")
    if result.returncode == 0:
        return ok("can be used")
    said = result.stderr.strip().splitlines()
    reason = said[-1].partition("TransferError: ")[2] if said and "TransferError: " in said[-1] else ""
    found, _, remedy = reason.partition(". Install it with: ")
    if not found:
        return warn(f"ends with status {result.returncode}", f"pip install --force-reinstall 'kvrelay[{name}]'")
    return warn(found, remedy or f"pip install 'kvrelay[{name}]'")


def check_card_transports() -> Finding:
    """Which transports move memory of a card here, and why the others do not."""
    if shutil.which("nvidia-smi") is None:
        return ok("none is needed: no NVIDIA card")
    reasons = {name: _refusal(name) for name in ("cuda_ipc", "nixl", "mooncake")}
    near = {"cuda_ipc": " on one host"}
    found = "; ".join(f"{name}: {reason or 'can be used' + near.get(name, '')}" for name, reason in reasons.items())
    if reasons["cuda_ipc"]:
        return warn(found, "on cards, use --whole workers, or make NVIDIA's driver usable here")
    return ok(found)


def _refusal(name: str) -> str:
    """In a process of its own, as `check_transport`."""
    script = f"from kvrelay.transfer.engines.choose import probe; probe({name!r}, 'cuda:0')"
    try:
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "does not answer within a minute"
    if result.returncode == 0:
        return ""
    last = (result.stderr.strip().splitlines() or [""])[-1]
    return last.partition("TransferError: ")[2] or f"ends with status {result.returncode}"


def check_ucx(addresses: dict[str, str]) -> Finding:
    """NIXL moves bytes by UCX, which may choose any interface that is up, also one that peers do not reach."""
    names = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE")
    told = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    listed = ", ".join(f"{name} {address}" for name, address in addresses.items()) or "no network"
    found = "; ".join([listed, *told])
    if len(addresses) > 1 and "UCX_NET_DEVICES" not in os.environ:
        return warn(found, f"set UCX_NET_DEVICES to the interface that peers reach, such as {next(iter(addresses))}")
    return ok(found)


def interfaces() -> dict[str, str]:
    """Those that are up and have an IPv4 address, without loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                found[name] = address
    return found


def check_threads(threads: int, quota_file: pathlib.Path) -> Finding:
    """More threads than cores wait for each other: a step is as slow as its last thread."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota(quota_file)
    usable = cores if quota is None else min(float(cores), quota)
    found = f"{cores} cores" if quota is None else f"{cores} cores, of which the container may use {quota:g}"
    if threads:
        found += f"; {threads} threads asked for"
        if threads > usable:
            return warn(found, f"--threads of all workers here should not add up to more than {max(1, int(usable))}")
    elif usable < cores:
        return warn(found, f"--threads {max(1, int(usable))}, shared among the workers of this container")
    return ok(found)


def _quota(file: pathlib.Path) -> float | None:
    """Cores that the control group may use; None without a limit."""
    try:
        limit, period = file.read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _names(folder: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
