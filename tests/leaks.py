"""The leak check of an engine, with which its tests end."""

from __future__ import annotations

from kvrelay.engine.invariants import check_idle

__all__ = ["check_idle"]
