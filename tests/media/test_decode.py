"""Good files of every kind become the image that one sees; bad ones are refused before they cost anything."""

from __future__ import annotations

import contextlib
import io
import random
import struct

import pytest
from PIL import Image, ImageChops, ImageOps

from kvrelay.errors import MediaError
from kvrelay.media.container import read_container
from kvrelay.media.decode import Limits, check, decode
from tests.media.images import chunk, drawn, encoded, exif, png, png_of_size

LIMITS = Limits(max_bytes=1 << 20, max_pixels=1 << 20)
KINDS = [
    ("PNG", "RGB"),
    ("PNG", "RGBA"),
    ("PNG", "L"),
    ("PNG", "LA"),
    ("PNG", "P"),
    ("PNG", "1"),
    ("JPEG", "RGB"),
    ("JPEG", "L"),
    ("JPEG", "CMYK"),
    ("WEBP", "RGB"),
    ("WEBP", "RGBA"),
    ("GIF", "P"),
    ("GIF", "RGBA"),
]


def on_white(data: bytes) -> Image.Image:
    """What Pillow alone makes of a file, upright and on white."""
    whole = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("RGB")


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.size == other.size and ImageChops.difference(one, other).getbbox() is None


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_every_format_and_mode(kind: str, mode: str) -> None:
    data = encoded(drawn(90, 50, mode), kind)
    assert check(data, LIMITS) == (50, 90)
    seen = decode(data, LIMITS)
    assert seen.mode == "RGB"
    assert same(seen, on_white(data))


@pytest.mark.parametrize("kind", ["WEBP", "GIF"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    frames = [drawn(40, 30, seed=seed) for seed in (0, 150)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert same(decode(data, LIMITS), decode(encoded(frames[0], kind, **options), LIMITS))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_upright(kind: str, orientation: int) -> None:
    data = encoded(drawn(90, 50), kind, exif=exif(orientation, order="<" if orientation % 2 else ">"))
    assert check(data, LIMITS) == ((50, 90) if orientation < 5 else (90, 50))
    assert same(decode(data, LIMITS), on_white(data))


@pytest.mark.parametrize("broken", [b"", b"II*\0", exif(9)[6:], exif(6)[6:20], b"II*\0" + struct.pack("<I", 2**31)])
def test_exif_that_cannot_be_read_turns_nothing(broken: bytes) -> None:
    data = encoded(drawn(90, 50), "JPEG", exif=b"Exif\0\0" + broken)
    assert check(data, LIMITS) == (50, 90)


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_a_file_that_breaks_off_is_refused(kind: str, mode: str) -> None:
    data = encoded(drawn(90, 50, mode), kind)
    for length in (len(data) // 2, len(data) // 3, 40, 12, 3):
        with pytest.raises(MediaError):
            check(data[:length], LIMITS)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "empty"),
        (b"GIF89a", "ends within its header"),
        (b"%PDF-1.7 ...", "not a JPEG, PNG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a JPEG, PNG, WebP or GIF"),
        (encoded(drawn(20, 20), "TIFF"), "not a JPEG, PNG, WebP or GIF"),
        (encoded(drawn(20, 20), "BMP"), "not a JPEG, PNG, WebP or GIF"),
        (bytes((1 << 20) + 1), "the limit is 1048576"),
        (png_of_size(1025, 1024), "1025x1024 is more than 1048576 pixels"),
        (png_of_size(2**31 - 1, 2**31 - 1), "pixels, the limit of this server"),
        (png_of_size(0, 5), "has no content"),
        (png_of_size(100, 100), "cannot be decoded"),
        (b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + bytes(9), "65535x65535"),
        (b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + b"," + struct.pack("<HHHHB", 60000, 60000, 9, 9, 0), "60009x60009"),
        (b"RIFF\0\0\0\0WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff" * 6, "16777216x16777216"),
        (b"RIFF\0\0\0\0WEBPnope" + bytes(30), "does not give its size"),
        (b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 11, 8, 65000, 65000, 1) + bytes(3) + b"\xff\xda\0\2", "65000x65000"),
        (b"\xff\xd8\xff\xda", "does not give its size"),
        (b"\xff\xd8\xff\xe0\0\0", "without content"),
        (b"\xff\xd8\xff\xe0\0\x04xxno marker", "a marker is missing"),
    ],
)  # fmt: skip
def test_what_is_no_image_or_too_large_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(MediaError, match=complaint):
        check(data, LIMITS)


def jpeg_with(extra: bytes) -> bytes:
    data = encoded(drawn(32, 32), "JPEG")
    return data[:2] + extra + data[2:]


def gif_with(extra: bytes) -> bytes:
    data = encoded(drawn(32, 32), "GIF")
    at = 13 + (3 << (data[10] & 7) + 1)
    return data[:at] + extra + data[at:]


def png_with(extra: bytes) -> bytes:
    data = png(32, 32)
    return data[:33] + extra + data[33:]


def with_scans(count: int) -> bytes:
    """Of a file with one scan: it again and again."""
    data = encoded(drawn(32, 32), "JPEG")
    at = data.index(b"\xff\xda")
    return data[:at] + data[at:-2] * count + data[-2:]


BOMB = (  # a directory of entries that each claim a large part of the file
    b"II*\0" + struct.pack("<IH", 8, 40_000) + b"".join(struct.pack("<HHII", n, 7, 500_000, 0) for n in range(40_000))
)


@pytest.mark.parametrize(
    "data",
    [
        jpeg_with(b"\xff\xfe\0\x02" * 100_000),
        jpeg_with(b"\xff" * 100_000),
        png_with(chunk(b"tEXt", b"a\0b") * 50_000),
        png_with(chunk(b"abCd", b"") * 50_000),
        gif_with(b"!\xfe" + b"\x01x" * 100_000 + b"\0"),
        gif_with(b"!\xfe\0" * 100_000),
        with_scans(33),
    ],
    ids=["comments", "fill bytes", "texts", "unknown chunks", "long comment", "short comments", "scans"],
)
def test_too_many_parts_are_refused_at_once(data: bytes) -> None:
    with pytest.raises(MediaError, match="too many"):
        check(data, LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        png_with(chunk(b"eXIf", BOMB)),
        jpeg_with(b"".join(b"\xff\xe1" + struct.pack(">H", 60_008) + b"Exif\0\0" + BOMB[:60_000] for _ in range(8))),
        png_with(chunk(b"zTXt", b"a\0\0" + bytes(1000))),
        png_with(chunk(b"iCCP", b"broken")),
    ],
    ids=["exif of PNG", "exif of JPEG", "text", "profile"],
)
def test_what_does_not_make_the_image_is_not_read(data: bytes) -> None:
    assert check(data, LIMITS) == (32, 32)
    assert len(read_container(data).data) < 3000


def test_what_follows_the_image_is_not_read() -> None:
    """As in photographs that carry a film."""
    data = encoded(drawn(64, 48), "JPEG", progressive=True)
    longer = data + b"film" + b"\xff\xda" * 1000
    assert read_container(longer).data == read_container(data).data
    assert same(decode(longer, LIMITS), on_white(data))


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_a_damaged_file_is_refused_or_read_and_never_worse(kind: str, mode: str) -> None:
    draw = random.Random(f"{kind} {mode}")
    original = encoded(drawn(40, 30, mode), kind)
    for _ in range(60):
        data = bytearray(original)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(min(len(data), 200))
            data[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        with contextlib.suppress(MediaError):
            height, width = check(bytes(data), LIMITS)
            assert decode(bytes(data), LIMITS).size == (width, height)


def test_comments_and_profiles_do_not_change_the_image() -> None:
    data = encoded(drawn(64, 48), "JPEG", comment=b"hello", icc_profile=bytes(200), exif=exif(1))
    assert same(decode(data, LIMITS), on_white(data))
    assert len(read_container(data).data) < len(data)
