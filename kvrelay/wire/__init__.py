"""Every message that crosses a process border, one file a channel. Frozen, tagged structs in msgpack; no pickle."""

PROTOCOL_VERSION = 2
OLDEST_PROTOCOL_VERSION = PROTOCOL_VERSION - 1
"""Peers of both versions work together: fields that one of them does not know have defaults, and no message that only the
newer one knows is sent to the older one. Each side says its own version first and speaks the lower of the two."""


def speaks(version: int) -> bool:
    """Whether a peer of that version and we understand each other."""
    return OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION + 1
