"""What all endpoints share: method, errors, metrics, log."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

from kvrelay.errors import InternalError, MethodNotAllowedError, RequestError
from kvrelay.frontend.http.call import Call, Receive, Scope, Send
from kvrelay.frontend.http.errors import ClientGoneError, error_headers, wrong_method
from kvrelay.log import Log
from kvrelay.metrics import Metrics

Handler = Callable[[Call], Awaitable[None]]

_log = Log("frontend")
_CLIENT_GONE = 499  # for the metrics and the log: the client is gone and never sees it


class Endpoint:
    """The ASGI application of one path, with a handler for each method that it accepts."""

    def __init__(
        self, path: str, handlers: Mapping[str, Handler], metrics: Metrics, *, log_requests: bool, is_timed: bool = True
    ) -> None:
        """`is_timed`: how long it takes to answer says something about the server."""
        self._path = path
        self._metrics = metrics
        self._log_requests = log_requests
        self._is_timed = is_timed
        self._allowed = ", ".join(handlers)
        self._handlers = {"HEAD": handlers["GET"], **handlers} if "GET" in handlers else dict(handlers)
        self._counters = {200: metrics.requests.labels(path, "200")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        metrics = self._metrics
        metrics.requests_in_flight.inc()
        status = _CLIENT_GONE  # also if the server shuts down meanwhile
        try:
            handler = self._handlers.get(call.scope["method"])
            if handler is None:
                raise wrong_method(call.scope["method"], self._path, self._allowed)
            await handler(call)
            status = call.status
        except ClientGoneError:
            pass
        except RequestError as error:
            status = error.status
            await send_error(call, error, allow=self._allowed)
        except Exception:  # noqa: BLE001 - a bug: this request ends, the server goes on
            status = 500
            _log.exception("request failed", path=self._path, request=call.request_id)
            await send_error(call, InternalError("internal error; see the server's log"))
        finally:
            metrics.requests_in_flight.dec()
            if self._is_timed:
                metrics.request_seconds.observe(time.perf_counter() - call.arrived)
            self._count(status)
            if self._log_requests:
                self._log(call, status)

    def _count(self, status: int) -> None:
        counter = self._counters.get(status)
        if counter is None:
            counter = self._counters[status] = self._metrics.requests.labels(self._path, str(status))
        counter.inc()

    def _log(self, call: Call, status: int) -> None:
        duration_ms = round((time.perf_counter() - call.arrived) * 1000, 1)
        _log.info("request", path=self._path, status=status, id=call.id, request=call.request_id, ms=duration_ms)


async def send_error(call: Call, error: RequestError, *, allow: str = "") -> None:
    """As the answer, or as the last event of a stream that has begun."""
    if call.started:
        await call.end_stream(call.error_event(error))
        return
    headers = error_headers(error)
    if isinstance(error, MethodNotAllowedError):
        headers.append((b"allow", allow.encode()))
    await call.answer(error.status, call.error_body(error), headers)
