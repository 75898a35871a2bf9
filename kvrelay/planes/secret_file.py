"""Reads the files that hold secrets: the cluster key and the API keys."""

from __future__ import annotations

import os
import stat

from kvrelay.errors import ConfigError
from kvrelay.log import Log

log = Log("security")


def read_secret_lines(option: str, path: str, max_bytes: int) -> list[str]:
    """Its lines, without blank ones and comments. Raises ConfigError, which names the option. Warns of a file open to all."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(max_bytes + 1).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {path} is not text") from error
    if len(text) > max_bytes:
        raise ConfigError(f"{option} {path} is larger than {max_bytes} bytes")
    if stat.S_ISREG(mode) and mode & (stat.S_IROTH | stat.S_IWOTH):
        log.warning("every user of this machine can read or change a file of keys; use chmod 600", option=option, file=path)
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]
