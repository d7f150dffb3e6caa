"""Files inside a request: base64, alone or as a data URL."""

import base64
import binascii
import re

from mmserve.errors import RequestError

_DATA_URL = re.compile(r"data:[^,]{0,256}?(;base64)?,", re.I)
_HEAD_CHARACTERS = 300


def is_data_url(source: str) -> bool:
    return _DATA_URL.match(source[:_HEAD_CHARACTERS]) is not None


def decode_base64(source: str) -> bytes:
    """The bytes of a data URL, or of base64 alone; white space in it is left out. Raises `RequestError`."""
    head = _DATA_URL.match(source[:_HEAD_CHARACTERS])
    if head is not None and head[1] is None:
        raise RequestError("invalid_request", "only data URLs in base64 are read: write data:...;base64,...")
    try:
        return base64.b64decode("".join(source[head.end() if head else 0 :].split()), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("invalid_request", "the file is not valid base64: encode its bytes, all of them") from None
