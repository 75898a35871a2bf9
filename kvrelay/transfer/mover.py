"""The relay as an engine sees it: `engine.movers.Producer` and `Consumer`, each around one transfer thread.

    engine's thread                      transfer thread
      expect, start, reserve ...  --->     commands, in order
      layer_done                  --->     a counter, read when the thread looks
                                           messages <-> signal plane, moves <-> transfer engines, leases
      poll                        <---     news

The engine's calls only leave a note. Every expected request is in `_open` until the engine has been told its end, so that it is
told one even if the transfer thread dies.
"""

from __future__ import annotations

from kvrelay.transfer.mover_consumer import RelayConsumer
from kvrelay.transfer.mover_producer import RelayProducer
from kvrelay.transfer.relay_parts import RelayParts, RelayStats

__all__ = ["RelayConsumer", "RelayParts", "RelayProducer", "RelayStats"]
