"""API keys. They are checked before any endpoint sees the request; `/health` and `/metrics` need none. Nor do the pages for
browsers, which hold nothing of the server and ask for a key themselves.

    --api-key a,b          fixed for the life of the process
    --api-key-file FILE    one key a line, `#` begins a comment line; read again when the file has changed
    --admin-key-file FILE  the same, of keys that pass everywhere; where there are any, an operator's orders need one

The file is checked when a request comes, at most once a second. If it can no longer be read, or holds no key, the keys read
before stay valid and the log says so.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from kvrelay.config import RouterOptions
from kvrelay.errors import ConfigError, ForbiddenError, UnauthorizedError
from kvrelay.frontend.http.accept import prefers_html
from kvrelay.frontend.http.call import Call, Receive, Scope, Send
from kvrelay.frontend.http.endpoint import send_error
from kvrelay.log import Log
from kvrelay.metrics import Metrics
from kvrelay.planes.secret_file import read_secret_lines

AsgiApp = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]

_log = Log("frontend")
OPEN_PATHS = frozenset({"/health", "/metrics"})  # probes and scrapers have no key
_PAGES = frozenset({"/", "/docs"})
_ASSETS = "/assets/"
_LOOK_EVERY_S = 1.0
_MAX_FILE_BYTES = 16 << 20

_Signature = tuple[int, int, int, int]


class KeyRing:
    """The keys that are valid now. There are none, and then every request passes, only if the server was started without keys.

    A key is stored and looked up as its digest under a secret of this process, so that the time it takes reveals nothing.
    """

    def __init__(
        self, keys: str, file: str, *, option: str = "--api-key-file", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`option` is the one that names the file."""
        self._option = option
        self._secret = secrets.token_bytes(32)
        self._clock = clock
        self._file = file
        self._fixed = self._digests(keys.split(","))
        if keys and not self._fixed:
            raise ConfigError("--api-key holds no key, only commas or spaces")
        self._seen: _Signature | None = None  # of the file when it was last read, or could not be
        self._look_at = 0.0
        self._from_file: dict[bytes, bytes] = self._read() if file else {}

    @property
    def asks(self) -> bool:
        """Whether a key is needed."""
        return bool(self._fixed or self._file)

    def holds(self, key: bytes) -> bool:
        if self._file:
            self._look_again()
        digest = self._digest(key)
        known = self._fixed.get(digest) or self._from_file.get(digest, b"")
        return hmac.compare_digest(known, digest)

    def _look_again(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        if self._seen == _signature(self._file):
            return
        try:
            self._from_file = self._read()
            _log.info("keys read again", file=self._file, keys=len(self._from_file))
        except ConfigError as error:
            _log.warning("keys not read again; the last ones stay valid", reason=error)

    def _read(self) -> dict[bytes, bytes]:
        """Raises ConfigError."""
        self._seen = _signature(self._file)
        keys = self._digests(read_secret_lines(self._option, self._file, _MAX_FILE_BYTES))
        if not keys:
            raise ConfigError(f"{self._option} {self._file} holds no key")
        return keys

    def _digests(self, keys: Iterable[str]) -> dict[bytes, bytes]:
        digests = [self._digest(key.strip().encode()) for key in keys if key.strip()]
        return {digest: digest for digest in digests}

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def owner_of(call: Call, options: RouterOptions) -> str:
    """Digest of the request's API key, the same in every process; empty where the server needs no keys."""
    if not (options.api_key or options.api_key_file):
        return ""
    return hashlib.blake2b(_key(call), digest_size=16, person=b"kvrelay-owner").hexdigest()


def _key(call: Call) -> bytes:
    """Empty if the request has none. Anthropic's clients have a header of their own."""
    kind, _, key = (call.header(b"authorization") or b"").partition(b" ")
    return key.strip() if kind.lower() == b"bearer" else (call.header(b"x-api-key") or b"").strip()


def _signature(path: str) -> _Signature | None:
    """Another one for every change of the file, also for one that kept its size, or that replaced the file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _is_page(call: Call) -> bool:
    path: str = call.scope["path"]
    return path.startswith(_ASSETS) or (path in _PAGES and prefers_html(call.header(b"accept")))


class Operators:
    """Who may give orders: where the server has admin keys, their holders; else everyone who may use the server. An order that
    makes workers read a folder is more than an API key is for: where there are API keys alone, it is refused."""

    def __init__(self, api: KeyRing, admin: KeyRing) -> None:
        self._api = api
        self._admin = admin

    def check(self, call: Call, *, reads_files: bool = False) -> None:
        """Raises UnauthorizedError or ForbiddenError."""
        if not self._admin.asks:
            if reads_files and self._api.asks:
                raise ForbiddenError(
                    "this needs an admin key, and the server has none: start it with --admin-key-file", code="no_admin_key"
                )
            return
        key = _key(call)
        if key and self._admin.holds(key):
            return
        if self._api.asks:  # it has passed with an API key
            raise ForbiddenError("this needs an admin key (--admin-key-file), not an API key", code="not_an_admin_key")
        reason = "wrong admin key" if key else "no admin key: send the header 'Authorization: Bearer KEY'"
        raise UnauthorizedError(reason, code="invalid_admin_key")


class ApiKeys:
    """ASGI middleware. Lets a request pass if it carries a valid key. An admin key is one, too."""

    def __init__(self, app: AsgiApp, ring: KeyRing, admin: KeyRing, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._ring = ring
        self._admin = admin

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or not self._ring.asks:
            return self._app(scope, receive, send)
        call = Call(scope, receive, send)
        if _is_page(call):
            return self._app(scope, receive, send)
        key = _key(call)
        if key and (self._ring.holds(key) or self._admin.holds(key)):
            return self._app(scope, receive, send)
        self._metrics.turned_away(401)
        reason = "wrong API key" if key else "no API key: send the header 'Authorization: Bearer KEY'"
        return send_error(call, UnauthorizedError(reason, code="invalid_api_key"))
