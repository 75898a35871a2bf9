"""What the serving plane says about LoRA adapters: an operator's orders, by way of a router, and what a worker has."""

from __future__ import annotations

import msgspec

from kvrelay.wire.registry import Adapter


class AdapterMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of these messages."""


class LoadAdapter(AdapterMessage, frozen=True, kw_only=True):
    """Read a LoRA adapter. An operator's is set aside until UseAdapter or DropAdapter, any other takes its name at once.
    Answered by AdaptersTold."""

    order: str  # the router's name for it
    name: str
    path: str
    digest: str = ""  # what it must have; empty: an operator's order, which decides what the name means


class UseAdapter(AdapterMessage, frozen=True, kw_only=True):
    """Every worker has read it: what was set aside takes its name, and one that has the name gives way to it. Answered by
    AdaptersTold."""

    order: str
    read: str  # the order by which it was read


class DropAdapter(AdapterMessage, frozen=True, kw_only=True):
    """Some worker could not read it: what was set aside, or still will be, is not used. Not answered."""

    read: str


class UnloadAdapter(AdapterMessage, frozen=True, kw_only=True):
    """Take no more requests for this one. Harmless if there is none. Answered by AdaptersTold."""

    order: str
    name: str
    decides: bool = True  # an operator's order; else the worker learns of one that was given before it came


class AdaptersTold(AdapterMessage, frozen=True, kw_only=True):
    """The adapters that the worker has now. `order` is what it answers, for the router that gave it."""

    adapters: list[Adapter]
    order: str = ""
    error: str = ""  # why the order was not carried out; empty: it was
    decided: str = ""  # the name that an operator has just loaded or unloaded here: what it is now, it is to be everywhere


AboutAdapters = LoadAdapter | UseAdapter | DropAdapter | UnloadAdapter
