"""Every message that crosses a process border, one file a channel. Frozen, tagged structs in msgpack; no pickle."""

PROTOCOL_VERSION = 1
