"""Every message that crosses a process border, one file a channel. Frozen, tagged structs in msgpack; no pickle.

All processes of a cluster speak the same version of the protocol. The first message of each connection names it, and a peer of
another version is refused.
"""

from kvrelay.errors import VersionMismatchError

PROTOCOL_VERSION = 8  # of the registry and the serving plane; the event plane and the relay's channels have their own numbers


def check_version(peer: str, version: int, spoken: int = PROTOCOL_VERSION, plane: str = "") -> None:
    """Raises VersionMismatchError for a peer of another version. `plane` is one that has a number of its own."""
    if version != spoken:
        protocol = f"{plane} protocol" if plane else "protocol"
        raise VersionMismatchError(
            f"{peer} speaks {protocol} {version}, this process {protocol} {spoken}: run the same version of kvrelay on both"
        )
