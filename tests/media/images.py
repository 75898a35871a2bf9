"""Image files for tests, made on the spot: good ones in every format and mode, and ways to break them."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image


def drawn(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth, different at every corner, so that a turn or a swap of colours shows; transparency goes from left to right."""
    across = Image.linear_gradient("L").rotate(90).resize((width, height))
    down = Image.linear_gradient("L").resize((width, height))
    rgb = Image.merge("RGB", (across, down, Image.new("L", (width, height), 40 + seed % 200)))
    if mode in ("RGBA", "LA"):
        return Image.merge("RGBA", (*rgb.split(), across)).convert(mode)
    return rgb.convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int = 64, height: int = 64, seed: int = 0) -> bytes:
    return encoded(drawn(width, height, seed=seed))


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def exif(orientation: int, *, order: str = "<") -> bytes:
    """A directory with the orientation in it, after an entry that does not matter."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    entries = struct.pack(f"{order}HHIHxx", 0x0110, 3, 1, 7) + struct.pack(f"{order}HHIHxx", 0x0112, 3, 1, orientation)
    return b"Exif\0\0" + head + struct.pack(f"{order}H", 2) + entries + bytes(4)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of_size(width: int, height: int) -> bytes:
    """A small file that says it is large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")
