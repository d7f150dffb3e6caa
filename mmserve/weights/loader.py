"""Hands a checkpoint's tensors to a model, and checks that none is missing, left over or of another shape."""

import re

import torch

from mmserve.config import has_tied_embeddings
from mmserve.errors import SetupError
from mmserve.weights.checkpoint import Checkpoint, QuantizedTensor

# Buffers that old checkpoints stored although they follow from the configuration.
_IGNORABLE = re.compile(r"(^|\.)rotary_emb\.inv_freq$|(^|\.)attn\.(masked_)?bias$|(^|\.)position_ids$")
_MAX_NAMES_SHOWN = 8


class WeightReader:
    """Tensors by name; remembers which were taken.

    Tensors come in `dtype` if it is given, otherwise as the checkpoint has them (possibly a view of a memory-mapped
    file).
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype | None = None) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._names = checkpoint.names()
        self._taken: set[str] = set()
        self._left: tuple[str, ...] = ()

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`. `SetupError` names it if it is absent or not of `shape`."""
        self._taken.add(name)
        return self._checkpoint.tensor(name, shape).to(dtype=self._dtype)

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def take_any(self, name: str) -> torch.Tensor:
        """As `take`, of whatever shape it is stored in."""
        self._taken.add(name)
        return self._checkpoint.tensor(name)

    def ignore(self, name: str) -> None:
        """The checkpoint may have it, and it says nothing that is not known."""
        self._taken.add(name)

    def take_quantized(self, name: str, shape: tuple[int, int]) -> QuantizedTensor | None:
        """The packed blocks of `name`, or None where it is stored unquantised (then use `take`)."""
        packed = self._checkpoint.quantized(name)
        if packed is None:
            return None
        check_shape(name, packed.shape, shape)
        self._taken.add(name)
        return packed

    def leave(self, prefix: str) -> None:
        """The model has no use for weights whose names start with `prefix`."""
        self._left = (*self._left, prefix)

    def finish(self) -> None:
        """Raise `SetupError` naming every weight of the checkpoint that the model neither took nor left."""
        left_over = sorted(name for name in self._names - self._taken if not self._is_ignorable(name))
        if left_over:
            shown = ", ".join(left_over[:_MAX_NAMES_SHOWN])
            more = f" and {len(left_over) - _MAX_NAMES_SHOWN} more" if len(left_over) > _MAX_NAMES_SHOWN else ""
            raise SetupError(
                "model_unavailable", f"the checkpoint has weights that this model has no place for: {shown}{more}"
            )

    def _is_ignorable(self, name: str) -> bool:
        is_tied_head = name == "lm_head.weight" and has_tied_embeddings(self._checkpoint.config)
        return is_tied_head or name.startswith(self._left) or _IGNORABLE.search(name) is not None


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """`SetupError` naming the weight if the shapes differ."""
    if tuple(found) != tuple(expected):
        raise SetupError(
            "model_unavailable",
            f"weight {name} has shape {list(found)}, but config.json asks for {list(expected)}: "
            "the configuration and the weights are not of the same model",
        )


def missing_weight(name: str) -> SetupError:
    """The error for a weight that the checkpoint does not have."""
    return SetupError("model_unavailable", f"the checkpoint has no weight {name}: it is incomplete or of another model")
