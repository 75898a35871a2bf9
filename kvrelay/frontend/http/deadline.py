"""How long a request may take: its field `timeout`, else its header `x-request-timeout`, else the server's own limit."""

from __future__ import annotations

import math
import time

from kvrelay.errors import InvalidRequestError
from kvrelay.frontend.http.call import Call
from kvrelay.frontend.service import Service

HEADER = b"x-request-timeout"


def remaining_s(service: Service, call: Call, field: float | None) -> float | None:
    """Seconds that are left, counted from the request's arrival; None: no limit."""
    limit = _limit_s(service, call, field)
    return None if limit is None else max(0.0, limit - (time.perf_counter() - call.arrived))


def _limit_s(service: Service, call: Call, field: float | None) -> float | None:
    if field is not None:
        return field
    header = call.header(HEADER)
    if header is None:
        return service.options.request_timeout_s or None
    try:
        limit = float(header)
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit > 0.0):
        raise InvalidRequestError("x-request-timeout must be a number of seconds above 0", param="x-request-timeout")
    return limit
