"""Pictures that once broke a reader, made from sound ones."""

import zlib


def cut_before_last_frame_data(gif: bytes) -> bytes:
    """A GIF that ends where its last frame's head does."""
    descriptor = gif.rindex(b"\x21\xf9\x04") + 8
    flags = gif[descriptor + 9]
    palette_bytes = 3 * 2 ** ((flags & 7) + 1) if flags & 128 else 0
    return gif[: descriptor + 10 + palette_bytes]


def with_transparency(png: bytes, alphas: bytes) -> bytes:
    """A PNG with a palette, and the alphas of its colours, be they as many as they may."""
    start = png.index(b"IDAT") - 4
    kind = b"tRNS" + alphas
    chunk = len(alphas).to_bytes(4, "big") + kind + zlib.crc32(kind).to_bytes(4, "big")
    return png[:start] + chunk + png[start:]
