"""The header of an image file, read without decoding a pixel: format, size and rotation.

Files come from strangers. A small file can keep a library that reads all of it busy for hours, or make it use up all memory:
thousands of comments, directories whose entries all point at the same megabytes, a size beyond any memory. So the few bytes
that matter are found here, with a limit on everything that is counted, and the library gets only what makes up the image: no
comments, profiles, thumbnails or EXIF. The content decides the format, not a name or a declared type.
"""

from __future__ import annotations

import re
import struct
from typing import Literal

import msgspec

from kvrelay.errors import MediaError

Format = Literal["JPEG", "PNG", "WEBP", "GIF"]

_MAX_PARTS = 20_000  # segments, chunks or blocks of a file
_MAX_SCANS = 32  # of a JPEG file; each costs as much as an image
_MAX_EXIF_ENTRIES = 1000
_ORIENTATION_TAG = 0x0112


class ImageFile(msgspec.Struct, frozen=True, kw_only=True):
    format: Format
    width: int  # as stored, before rotation
    height: int
    orientation: int = 1  # EXIF's: 1 is upright
    data: bytes  # what a decoder needs of the file


def read_container(data: bytes) -> ImageFile:
    """Raises MediaError if it is none of the four formats, or ends within its header."""
    try:
        if data.startswith(b"\xff\xd8\xff"):
            return _read_jpeg(data)
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _read_png(data)
        if data[:6] in (b"GIF87a", b"GIF89a"):
            return _read_gif(data)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return _read_webp(data)
    except (struct.error, IndexError) as error:
        raise MediaError("the file ends within its header") from error
    raise MediaError("not a JPEG, PNG, WebP or GIF file")


# JPEG: segments FF marker, length (which counts itself), content; the first scan ends the header.

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # between and after scans; the others belong to a scan's data
_LEFT_OUT = frozenset({*range(0xE1, 0xEE), 0xEF, 0xFE})  # all APPn but JFIF's and Adobe's, which say how colours are coded


def _read_jpeg(data: bytes) -> ImageFile:
    kept, orientation = [data[:2]], 1
    size: tuple[int, int] | None = None
    at = 2
    for _ in range(_MAX_PARTS):
        lead, marker = data[at], data[at + 1]
        if lead != 0xFF:
            raise MediaError("the JPEG file is broken: a marker is missing")
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker in _WITHOUT_LENGTH:
            at += 2
            continue
        if marker == 0xDA:
            break
        (length,) = struct.unpack_from(">H", data, at + 2)
        if length < 2 or marker in (0xD8, 0xD9):
            raise MediaError("the JPEG file is broken: a segment without content")
        if marker in _START_OF_FRAME:
            if size is not None:
                raise MediaError("the JPEG file has two frames")
            height, width = struct.unpack_from(">HH", data, at + 5)
            size = (width, height)
        elif marker == 0xE1 and orientation == 1 and data.startswith(b"Exif\0\0", at + 4):
            orientation = _orientation(data[at + 10 : at + 2 + length])
        if marker not in _LEFT_OUT:
            kept.append(data[at : at + 2 + length])
        at += 2 + length
    else:
        raise _too_many("JPEG", "segments")
    if size is None:
        raise MediaError("the JPEG file does not give its size")
    kept.append(data[at : _end_of_scans(data, at)])
    return ImageFile(format="JPEG", width=size[0], height=size[1], orientation=orientation, data=b"".join(kept))


def _end_of_scans(data: bytes, at: int) -> int:
    """Where the image ends: phones append videos and further images."""
    num_scans = 0
    for _ in range(_MAX_PARTS):
        found = _MARKER.search(data, at)
        if found is None:
            return len(data)
        at, marker = found.end(), data[found.end() - 1]
        if marker == 0xD9:
            return at
        if marker == 0xDA:
            num_scans += 1
            if num_scans > _MAX_SCANS:
                raise _too_many("JPEG", "scans")
        at += struct.unpack_from(">H", data, at)[0]
    raise _too_many("JPEG", "segments")


# PNG: chunks of length, type, content, checksum.

_NEEDED_CHUNKS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})


def _read_png(data: bytes) -> ImageFile:
    kept, orientation = [data[:8]], 1
    if data[12:16] != b"IHDR":
        raise MediaError("the PNG file does not begin with its header")
    width, height = struct.unpack_from(">II", data, 16)
    at = 8
    for _ in range(_MAX_PARTS):
        if at >= len(data):
            break
        (length,) = struct.unpack_from(">I", data, at)
        kind = data[at + 4 : at + 8]
        end = at + 12 + length
        if kind == b"IHDR" and at > 8:
            raise MediaError("the PNG file has two headers")
        if kind in _NEEDED_CHUNKS:
            kept.append(data[at:end])
        elif kind == b"eXIf" and orientation == 1:
            orientation = _orientation(data[at + 8 : at + 8 + length])
        if kind == b"IEND":
            break
        at = end
    else:
        raise _too_many("PNG", "chunks")
    return ImageFile(format="PNG", width=width, height=height, orientation=orientation, data=b"".join(kept))


# GIF: the screen, its colours, then extensions and frames; what follows the first frame's description is left to the decoder.


def _read_gif(data: bytes) -> ImageFile:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    kept = [data[:at]]
    num_left = _MAX_PARTS
    while data[at] == 0x21:
        begin, label = at, data[at + 1]
        at += 2
        while data[at]:
            at += 1 + data[at]
            num_left -= 1
            if num_left < 0:
                raise _too_many("GIF", "blocks")
        at += 1
        num_left -= 1
        if num_left < 0:
            raise _too_many("GIF", "blocks")
        if label == 0xF9:  # which colour is transparent
            kept.append(data[begin:at])
    if data[at] != 0x2C:
        raise MediaError("the GIF file has no image")
    left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, at + 1)
    kept.append(data[at:])
    return ImageFile(
        format="GIF",
        width=max(width, left + frame_width),
        height=max(height, top + frame_height),
        data=b"".join(kept),
    )


# WebP: chunks of type, length, content, padded to even; the first one has the size, in one of three forms.


def _read_webp(data: bytes) -> ImageFile:
    kind = data[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise MediaError("the WebP file does not give its size")
    return ImageFile(format="WEBP", width=width, height=height, orientation=_webp_orientation(data), data=data)


def _webp_orientation(data: bytes) -> int:
    at = 12
    for _ in range(_MAX_PARTS):
        if at + 8 > len(data):
            return 1
        (length,) = struct.unpack_from("<I", data, at + 4)
        if data[at : at + 4] == b"EXIF":
            return _orientation(data[at + 8 : at + 8 + length].removeprefix(b"Exif\0\0"))
        at += 8 + length + (length & 1)
    raise _too_many("WebP", "chunks")


def _orientation(exif: bytes) -> int:
    """Of the first directory. EXIF that cannot be read is ignored, as in browsers."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for place in range(min(count, _MAX_EXIF_ENTRIES)):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, at + 2 + 12 * place)
            if tag == _ORIENTATION_TAG:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        return 1  # it is cut off
    return 1


def _too_many(kind: str, parts: str) -> MediaError:
    return MediaError(f"the {kind} file has too many {parts}")
