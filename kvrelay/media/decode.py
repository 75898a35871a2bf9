"""From a file's bytes to an upright RGB image, within limits that are checked before anything is decoded.

Colours become RGB as in the processors that models were trained with: transparent areas become white. An animation
counts as its first frame.
"""

from __future__ import annotations

import io

import msgspec
from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError, WebPImagePlugin

from kvrelay.errors import MediaError
from kvrelay.media.container import ImageFile, read_container

# Importing a plugin registers it: without this, Pillow would import all it has when it meets its first WebP.
_PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, GifImagePlugin)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one image."""

    max_bytes: int
    max_pixels: int


def check(data: bytes, limits: Limits) -> tuple[int, int]:
    """Height and width after rotation. Decodes the whole file, so that a broken one is found now. Raises MediaError."""
    file = _within(data, limits)
    _open(file).close()
    return (file.height, file.width) if file.orientation < 5 else (file.width, file.height)


def decode(data: bytes, limits: Limits) -> Image.Image:
    """The image itself. Raises MediaError."""
    file = _within(data, limits)
    try:
        image = _to_rgb(_open(file))
    except (ValueError, OSError) as error:
        raise MediaError(f"the colours of the {file.format} file cannot be read: {error}") from error
    turn = _TURNS.get(file.orientation)
    return image if turn is None else image.transpose(turn)


def _within(data: bytes, limits: Limits) -> ImageFile:
    if not data:
        raise MediaError("the file is empty")
    if len(data) > limits.max_bytes:
        raise MediaError(f"the file has {len(data)} bytes; the limit is {limits.max_bytes}")
    file = read_container(data)
    if file.width < 1 or file.height < 1:
        raise MediaError(f"an image of {file.width}x{file.height} pixels has no content")
    if file.width * file.height > limits.max_pixels:
        raise MediaError(f"{file.width}x{file.height} is more than {limits.max_pixels} pixels, the limit of this server")
    return file


def _open(file: ImageFile) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(file.data), formats=(file.format,))
        if image.size != (file.width, file.height):
            raise MediaError(f"the {file.format} file names two sizes")
        image.load()
    except MediaError:
        raise
    except UnidentifiedImageError as error:
        raise MediaError(f"the {file.format} file has a broken header") from error
    except Exception as error:  # Pillow raises many kinds on files that it cannot read
        raise MediaError(f"the {file.format} file cannot be decoded: {error}") from error
    return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        seen = image.convert("RGBA")
        background = Image.new("RGBA", seen.size, (255, 255, 255, 255))
        return Image.alpha_composite(background, seen).convert("RGB")
    return image.convert("RGB")
