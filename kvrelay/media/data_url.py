"""Files inside URLs: data:[type][;base64],content. The declared type is ignored."""

from __future__ import annotations

import base64
import binascii
import urllib.parse

from kvrelay.errors import MediaError

_WHITESPACE = str.maketrans("", "", " \t\n\r\f")


def read_data_url(url: str, max_bytes: int) -> bytes:
    """Base64 as browsers read it: white space and missing padding are accepted, any other fault is an error."""
    head, comma, content = url.partition(",")
    if not comma:
        raise MediaError("the data: URL has no comma before its content")
    is_base64 = head.lower().endswith(";base64")
    if len(content) > 4 * max_bytes:  # even if every byte were written as %XX, or in lines
        raise _too_large(max_bytes)
    if not is_base64:
        data = urllib.parse.unquote_to_bytes(content)
    else:
        data = _from_base64(urllib.parse.unquote(content) if "%" in content else content, max_bytes)
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def _from_base64(text: str, max_bytes: int) -> bytes:
    text = text.translate(_WHITESPACE) if any(space in text for space in " \t\n\r\f") else text
    if len(text) // 4 * 3 > max_bytes + 3:
        raise _too_large(max_bytes)
    text += "=" * (-len(text) % 4)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("the data: URL is not valid base64") from error


def _too_large(max_bytes: int) -> MediaError:
    return MediaError(f"the file is larger than {max_bytes} bytes, the limit of this server")
