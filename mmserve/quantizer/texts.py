"""From documents to the token ids that a model is calibrated on, or measured by."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import torch

from mmserve.errors import DocumentError
from mmserve.vision.pages import PageReader
from mmserve.weights.tokenizer import Tokenizer


async def read_texts(paths: Sequence[Path], reader: PageReader) -> AsyncGenerator[tuple[Path, str | DocumentError]]:
    """Each document's text through the reading of pages, or why it cannot be read."""
    for path in paths:
        try:
            document = await reader.open(path)
            texts = [page.text async for page in reader.pages(document)]
        except DocumentError as error:
            yield path, error
            continue
        text = "\n\n".join(text for text in texts if text.strip())
        yield path, text or DocumentError("empty_document", f"{path.name} has no text that can be read")


def samples_of(
    texts: Sequence[str], tokenizer: Tokenizer, *, num_samples: int, seq_len: int, seed: int
) -> torch.Tensor:
    """Token ids `[N, seq_len]`, N at most `num_samples`: pieces of the texts one after the other, drawn at random.

    Raises `DocumentError` (`empty_document`) where there is not one whole piece.
    """
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=True, parse_special=False)
    count = len(ids) // seq_len
    if count == 0:
        raise DocumentError(
            "empty_document",
            f"the calibration texts have {len(ids)} tokens, and one sample takes {seq_len}: "
            "give more text, or a smaller --seq-len",
        )
    pieces = torch.tensor(ids[: count * seq_len]).view(count, seq_len)
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:num_samples]
    return pieces[chosen.sort().values]
