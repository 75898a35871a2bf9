"""What vision towers made of images, kept by digest for as long as a request needs it, and longer while there is room.

1. A request with an image comes: the image's digest is held, whether its features are there yet or not.
2. They are put here, by an encoder in this process or by the relay that brought them from another worker.
3. The runner takes rows of them into its batches.
4. The request's prompt is computed: the digest is released. What is not held stays until room is needed, oldest use first.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

import torch


class FeatureStore:
    """Implements `engine.interfaces.Features`. Any thread may call it.

    Features that are held are never dropped, so they may take more than `max_bytes`; the encoder and the relay can ask
    `has_room` first. The others give way.
    """

    def __init__(self, max_bytes: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._max_bytes = max_bytes
        self._device = device
        self._dtype = dtype
        self._lock = threading.Lock()
        self._features: OrderedDict[str, torch.Tensor] = OrderedDict()  # least recently used first
        self._holds: Counter[str] = Counter()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_held(self) -> int:
        """Digests that are held; 0 once all were released."""
        return len(self._holds)

    def is_ready(self, digest: str) -> bool:
        with self._lock:
            return digest in self._features

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much more would fit beside what is held."""
        with self._lock:
            held = sum(self._features[digest].nbytes for digest in self._holds if digest in self._features)
            return held + num_bytes <= self._max_bytes

    def hold(self, digest: str) -> None:
        with self._lock:
            self._holds[digest] += 1
            if digest in self._features:
                self._features.move_to_end(digest)

    def release(self, digest: str) -> None:
        """Once for each `hold`."""
        with self._lock:
            assert self._holds[digest] > 0, f"image {digest} was not held"
            self._holds[digest] -= 1
            if self._holds[digest] == 0:
                del self._holds[digest]
                self._make_room(0)

    def put(self, digest: str, features: torch.Tensor) -> bool:
        """[tokens, width], which the store keeps: the caller does not write it again. False if it was not kept, since it
        is not held and there is no room. The same digest put again changes nothing."""
        kept = features.to(device=self._device, dtype=self._dtype).contiguous()
        with self._lock:
            if digest in self._features:
                return True
            self._make_room(kept.nbytes)
            if digest not in self._holds and self._num_bytes + kept.nbytes > self._max_bytes:
                return False
            self._features[digest] = kept
            self._num_bytes += kept.nbytes
            return True

    def get(self, digest: str) -> torch.Tensor:
        """Of a digest that is held and ready."""
        with self._lock:
            assert digest in self._features, f"the features of image {digest} are not here"
            self._features.move_to_end(digest)
            return self._features[digest]

    def _make_room(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes <= self._max_bytes:
            return
        for digest in [digest for digest in self._features if digest not in self._holds]:
            self._num_bytes -= self._features.pop(digest).nbytes
            if self._num_bytes + num_bytes <= self._max_bytes:
                return
