"""Sound documents -> broken ones, the same for the same seed."""

import io
import random
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pikepdf

_EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
_NUMBERS = (
    b"0",
    b"1",
    b"-1",
    b"65536",
    b"2147483647",
    b"2147483648",
    b"-2147483649",
    b"99999999999",
    b"1e9",
    b"0.0001",
)
_OPERATORS = (
    *("q", "Q", "cm", "w", "J", "j", "M", "d", "ri", "i", "gs", "m", "l", "c", "v", "y", "h", "re", "S", "s", "f", "F"),
    *(
        "f*",
        "B",
        "B*",
        "b",
        "b*",
        "n",
        "W",
        "W*",
        "BT",
        "ET",
        "Tc",
        "Tw",
        "Tz",
        "TL",
        "Tf",
        "Tr",
        "Ts",
        "Td",
        "TD",
        "Tm",
    ),
    *(
        "T*",
        "Tj",
        "TJ",
        "'",
        '"',
        "d0",
        "d1",
        "CS",
        "cs",
        "SC",
        "SCN",
        "sc",
        "scn",
        "G",
        "g",
        "RG",
        "rg",
        "K",
        "k",
        "sh",
    ),
    *("BI", "ID", "EI", "Do", "MP", "DP", "BMC", "BDC", "EMC", "BX", "EX"),
)


def mutated(chance: random.Random, corpus: Mapping[str, bytes]) -> tuple[str, bytes]:
    """A document of `corpus` after one to three mutations, under a name that tells which; its ending may lie."""
    name = chance.choice(sorted(corpus))
    data = corpus[name]
    kinds = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        mutation = chance.choice(_fitting(data))
        kinds.append(mutation.__name__.strip("_"))
        data = mutation(chance, data) if mutation is not _splice else _splice(chance, data, corpus)
    stem, _, ending = name.rpartition(".")
    if chance.random() < 0.1:
        ending = chance.choice(("pdf", "png", "jpg", "tiff", "txt", "docx"))
    return f"{stem}-{'-'.join(kinds)}.{ending}", data


def _fitting(data: bytes) -> list[Any]:
    anywhere: list[Any] = [_flip, _truncate, _splice, _repeat, _remove, _set_length, _set_length]
    if data.startswith(b"%PDF"):
        return [*anywhere, _edit_number, _edit_number, *[_edit_object] * 4, *[_edit_operators] * 2]
    if data.startswith(b"\x89PNG"):
        return [*anywhere, _edit_chunk, _edit_chunk, _edit_chunk]
    if data[:4] in (b"II*\0", b"MM\0*"):
        return [*anywhere, _edit_tag, _edit_tag, _edit_tag]
    return anywhere


def _flip(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 30) if data else 0):
        changed[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(changed)


def _truncate(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _splice(chance: random.Random, data: bytes, corpus: Mapping[str, bytes]) -> bytes:
    other = corpus[chance.choice(sorted(corpus))]
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other)) :]


def _repeat(chance: random.Random, data: bytes) -> bytes:
    start = chance.randrange(len(data) + 1)
    part = data[start : start + chance.randint(1, 400)]
    return data[:start] + part * chance.choice((1, 1, 2, 100)) + data[start:]


def _remove(chance: random.Random, data: bytes) -> bytes:
    start = chance.randrange(len(data) + 1)
    return data[:start] + data[start + chance.randint(1, 400) :]


def _set_length(chance: random.Random, data: bytes) -> bytes:
    """A number of two or four bytes, mostly near the front, where headers are."""
    size = chance.choice((2, 4))
    reach = len(data) if chance.random() < 0.3 else min(len(data), 256)
    if reach <= size:
        return data
    start = chance.randrange(reach - size)
    order: Literal["big", "little"] = "big" if chance.random() < 0.5 else "little"
    value: int = chance.choice(_EDGES) % 256**size
    return data[:start] + value.to_bytes(size, order) + data[start + size :]


def _edit_number(chance: random.Random, data: bytes) -> bytes:
    numbers = list(re.finditer(rb"(?<=[ \[(])-?\d+", data))
    if not numbers:
        return data
    chosen = chance.choice(numbers)
    return data[: chosen.start()] + chance.choice(_NUMBERS) + data[chosen.end() :]


def _edit_object(chance: random.Random, data: bytes) -> bytes:
    """A value somewhere in a PDF becomes another, in a file that is otherwise sound."""
    return _with_pdf(data, lambda pdf: _set_values(chance, pdf))


def _set_values(chance: random.Random, pdf: pikepdf.Pdf) -> None:
    objects: list[Any] = list(pdf.objects)
    places = [(one, key) for one in objects for key in _keys(one)]
    for holder, key in [*places]:
        places += [(holder[key], inner) for inner in _keys(holder[key])]
    for _ in range(chance.randint(1, 3)):
        holder, key = chance.choice(places)
        if key == "/Length":
            continue
        value = _odd_value(chance, objects, holder)
        if value is None:
            del holder[key]
        else:
            holder[key] = value


def _keys(value: Any) -> list[Any]:
    if isinstance(value, pikepdf.Dictionary | pikepdf.Stream):
        return sorted(value.keys())
    return list(range(len(value))) if isinstance(value, pikepdf.Array) else []


def _odd_value(chance: random.Random, objects: list[Any], holder: Any) -> Any:
    choices: list[Callable[[], Any]] = [
        lambda: None,
        lambda: chance.choice((0, 1, -1, 90, 65536, 2**31 - 1, -(2**31))),
        lambda: pikepdf.Array([chance.choice((0, -1, 3, 10**6, 2**31 - 1)) for _ in range(chance.randint(0, 8))]),
        lambda: pikepdf.Name(chance.choice(("/FlateDecode", "/LZWDecode", "/DCTDecode", "/Type3", "/Page", "/X"))),
        lambda: pikepdf.String("\x00" * chance.randint(0, 40)),
        lambda: chance.choice(objects),
        lambda: chance.choice(objects),
        lambda: pikepdf.Dictionary(),
    ]
    return chance.choice(choices)()


def _edit_operators(chance: random.Random, data: bytes) -> bytes:
    """The first page gets operators in no sensible order, some of them very often."""
    return _with_pdf(data, lambda pdf: _add_operators(chance, pdf))


def _add_operators(chance: random.Random, pdf: pikepdf.Pdf) -> None:
    page = pdf.pages[0]
    resources = page.obj.get("/Resources", {})
    names = [str(name) for kind in _keys(resources) for name in _keys(resources[kind])] or ["/X"]
    words = []
    for _ in range(chance.randint(1, 60)):
        for _ in range(chance.randint(0, 6)):
            words.append(
                chance.choice((*(one.decode() for one in _NUMBERS), "(text)", "[1 (a) 2]", "<< /A 1 >>", *names))
            )
        words.append(chance.choice(_OPERATORS))
    times = chance.choice((1, 1, 1, 50, 2000))
    page.obj.Contents = pikepdf.Stream(pdf, (" ".join(words) + "\n").encode() * times)


def _with_pdf(data: bytes, edit: Callable[[pikepdf.Pdf], None]) -> bytes:
    """A PDF that is too broken already to be edited stays as it is."""
    try:
        with pikepdf.open(io.BytesIO(data)) as pdf:
            edit(pdf)
            target = io.BytesIO()
            pdf.save(target, static_id=True, fix_metadata_version=False)
    except (
        pikepdf.PdfError,
        pikepdf.PasswordError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RuntimeError,
    ):
        return data
    return target.getvalue()


def _edit_chunk(chance: random.Random, data: bytes) -> bytes:
    """A chunk of a PNG is changed and its checksum made right, so that what is inside is looked at."""
    chunks, position = [], 8
    while position + 12 <= len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        chunks.append((position, length))
        position += 12 + length
    if not chunks:
        return data
    start, length = chance.choice(chunks)
    kind, body = data[start + 4 : start + 8], data[start + 8 : start + 8 + length]
    body = chance.choice((_flip, _set_length, _truncate, _repeat))(chance, body) if body else b"\0"
    checked = kind + body
    chunk = len(body).to_bytes(4, "big") + checked + zlib.crc32(checked).to_bytes(4, "big")
    return data[:start] + chunk + data[start + 12 + length :]


def _edit_tag(chance: random.Random, data: bytes) -> bytes:
    """One of the four fields of a TIFF's tag: number, type, count, value."""
    order: Any = "little" if data[:2] == b"II" else "big"
    start = int.from_bytes(data[4:8], order)
    count = int.from_bytes(data[start : start + 2], order)
    if not count or start + 2 + 12 * count > len(data):
        return data
    entry = start + 2 + 12 * chance.randrange(count)
    offset, size = chance.choice(((0, 2), (2, 2), (4, 4), (8, 4), (8, 4), (8, 2)))
    value: int = chance.choice((*_EDGES, 3, 4, 5, 12, 254, 262, 273, 279, 330)) % 256**size
    return data[: entry + offset] + value.to_bytes(size, order) + data[entry + offset + size :]
