"""Token embeddings, in full precision or in the blocks of a GGUF file."""

import torch

from mmserve.quantization.dense import dense_weight
from mmserve.quantization.gguf import grouped_ints
from mmserve.quantization.grouped import grouped_weight
from mmserve.quantization.scheme import LinearWeight, Placement


class Embedding:
    """`weight` `[vocab, hidden]`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[T]` -> `[T, hidden]`."""
        return self._weight.index_select(0, token_ids)

    def as_head(self) -> LinearWeight:
        """The same matrix as the output layer (Press and Wolf 2017)."""
        return dense_weight(self._weight)


class BlockEmbedding:
    """Rows of blocks, `data` uint8 `[vocab, bytes]` of ggml's type `kind`, of which those asked for are unpacked."""

    def __init__(self, data: torch.Tensor, kind: str, placement: Placement) -> None:
        self._data = data.to(placement.device)
        self._kind = kind
        self._placement = placement

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[T]` -> `[T, hidden]`."""
        return grouped_ints(self._data.index_select(0, token_ids), self._kind).dequantized().to(self._placement.dtype)

    def as_head(self) -> LinearWeight:
        return grouped_weight([grouped_ints(self._data, self._kind)], self._placement)
