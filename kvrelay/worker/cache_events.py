"""A worker's tie to the event plane: after each step, what the engine recorded goes to the publisher."""

from __future__ import annotations

from kvrelay.config import WorkerOptions
from kvrelay.engine.memory.events import EventRecorder
from kvrelay.events.publisher import EventPublisher
from kvrelay.ids import WorkerId


class CacheEvents:
    """Publishes from when it is made until `close`. Without a recorder it does nothing, and its addresses are empty."""

    def __init__(self, recorder: EventRecorder | None, worker_id: WorkerId, options: WorkerOptions) -> None:
        self._recorder = recorder
        self._publisher: EventPublisher | None = None
        self.events_address = self.replay_address = ""
        if recorder is not None:
            self._publisher = publisher = EventPublisher(
                worker_id, host=options.worker_host, events_port=options.events_port, replay_port=options.replay_port
            )
            self.events_address, self.replay_address = publisher.events_address, publisher.replay_address
            publisher.start()

    @property
    def num_malformed(self) -> int:
        return 0 if self._publisher is None else self._publisher.num_malformed

    def tell(self) -> None:
        """On the engine's thread. While the publisher does not keep up, the recorder keeps what is to be told."""
        if self._recorder and self._publisher is not None and self._publisher.has_room:
            self._publisher.publish(self._recorder.take())

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
