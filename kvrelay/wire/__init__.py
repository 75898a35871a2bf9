"""Every message that crosses a process border, one file a channel. Frozen, tagged structs in msgpack; no pickle.

Peers of one protocol version and of the one before work together. Of two, the side that learns the other's version first
speaks the lower one: a registry answers a worker's record in the record's version, a router says Hello in it. Fields that one
of them does not know have defaults, and no message that only the newer one knows is sent to the older one (`serving.since`).
"""

PROTOCOL_VERSION = 3  # of the registry and the serving plane; relay channels have their own (wire/kv.py, wire/embedding.py)
OLDEST_PROTOCOL_VERSION = PROTOCOL_VERSION - 1


def speaks(version: int) -> bool:
    """Whether a peer of that version and we understand each other. One that is newer by one knows how to speak ours."""
    return OLDEST_PROTOCOL_VERSION <= version <= PROTOCOL_VERSION + 1


def agreed(version: int) -> int:
    """What is spoken with a peer of that version."""
    return min(version, PROTOCOL_VERSION)
