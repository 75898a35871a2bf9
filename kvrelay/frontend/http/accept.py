"""Which of its forms a client wants a page in."""

from __future__ import annotations

_HTML = ("text/html", "application/xhtml+xml")
_JSON = ("application/json", "text/json")


def prefers_html(accept: bytes | None) -> bool:
    """Whether the header `Accept` names HTML, and JSON not more than it. Programs name neither, or JSON."""
    wanted: dict[str, float] = {}
    for part in (accept or b"").decode("latin-1").lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        wanted[kind] = max(wanted.get(kind, 0.0), _quality(parameters))
    html = max((wanted.get(kind, 0.0) for kind in _HTML), default=0.0)
    return html > 0.0 and html >= max(wanted.get(kind, 0.0) for kind in _JSON)


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
