"""Placeholders of an image among a prompt's tokens.

Checkpoints have one token for all images; a cache that only saw this token would mistake any two images of the same size for
one another. So on its way from the router to the runner an image of n tokens is n ids that are derived from its digest, above
every vocabulary. Prefix caches, routing and continuation therefore need to know nothing of images. The runner never looks
these ids up: the image's features take their places.
"""

from __future__ import annotations

import hashlib
import struct

FIRST_ID = 1 << 29  # above any vocabulary; ids up to twice this fit one digit of Python's integers


def placeholder_ids(digest: str, num_tokens: int) -> list[int]:
    """They differ between images, and between the places of one image."""
    drawn = struct.unpack(f"<{num_tokens}I", hashlib.shake_128(digest.encode()).digest(4 * num_tokens))
    return [FIRST_ID | number & (FIRST_ID - 1) for number in drawn]


def is_placeholder(token: int) -> bool:
    return token >= FIRST_ID
