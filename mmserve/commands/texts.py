"""Texts for the commands that quantize and measure models: documents and text files, read as pages are."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from mmserve.commands.inputs import DOCUMENT_SUFFIXES, DocumentFinder, Selection
from mmserve.commands.options import DocumentOptions
from mmserve.errors import RequestError
from mmserve.pipelines.batch import displayable

# In folders; a file that is named is read whatever its name.
_PATTERNS = tuple(f"*{suffix}" for suffix in sorted({*DOCUMENT_SUFFIXES, ".md", ".rst"}))


def load_texts(
    arguments: Sequence[Path], options: DocumentOptions, tell: Callable[[str], None], note: Callable[[str], None]
) -> list[str]:
    """The texts of files and of what is in folders; `note` hears of files in folders that cannot be read.

    Raises `RequestError` where there is no text at all, `DocumentError` for a file that was named.
    """
    selection = Selection(recursive=True, include=_PATTERNS)
    paths = [source.path for source in DocumentFinder(arguments, selection) if source.problem is None]
    texts = asyncio.run(_read(paths, set(arguments), options, tell, note))
    if not texts:
        shown = ", ".join(displayable(path) for path in arguments)
        raise RequestError("invalid_request", f"there is no text in {shown}: give documents or text files")
    return texts


async def _read(
    paths: Sequence[Path],
    named: set[Path],
    options: DocumentOptions,
    tell: Callable[[str], None],
    note: Callable[[str], None],
) -> list[str]:
    from mmserve.quantizer.texts import read_texts

    texts: list[str] = []
    async with options.open_reader() as reader, contextlib.aclosing(read_texts(paths, reader)) as reading:
        async for path, text in reading:
            if isinstance(text, str):
                texts.append(text)
                tell(f"Reading texts: {len(texts)} of {len(paths)}")
            elif path in named:
                raise text
            else:
                note(f"{displayable(path)}: {text.message}")
    return texts
