"""GPTQ checkpoints (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write them.

`qweight` int32 `[in * bits / 32, out]` has consecutive rows in a word, `qzeros` int32 `[groups, out * bits / 32]`
consecutive columns, `scales` float16 `[groups, out]`, and `g_idx` int32 `[in]` says which group a row belongs to. In
the format `gptq` zero points are stored minus one, in `gptq_v2` as they are.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mmserve.errors import SetupError
from mmserve.quantization.bits import unpack
from mmserve.quantization.grouped import grouped_weight
from mmserve.quantization.grouped_ints import GroupedInts
from mmserve.quantization.scheme import LinearSpec, LinearWeight, Placement, TensorSource

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


class GptqScheme:
    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is the checkpoint's `quantization_config`. Raises `SetupError` for a layout that is not served."""
        self._bits = int(config["bits"])
        self._group_size = int(config.get("group_size", 128))
        stored = config.get("checkpoint_format") or config.get("format") or "gptq"
        if self._bits not in _BITS or stored not in _FORMATS:
            raise SetupError(
                "model_unavailable",
                f"a GPTQ checkpoint of {self._bits} bits in the format {stored!r} is not served: "
                f"2, 3, 4 or 8 bits in {' or '.join(_FORMATS)} are",
            )
        self._missing_from_zeros = 1 if stored == "gptq" else 0

    def load(self, spec: LinearSpec, source: TensorSource, placement: Placement) -> LinearWeight | None:
        if not source.has(f"{spec.names[0]}.qweight"):
            return None
        sizes = zip(spec.names, spec.out_features, strict=True)
        return grouped_weight([self._ints(name, spec.in_features, size, source) for name, size in sizes], placement)

    def _ints(self, name: str, in_features: int, out_features: int, source: TensorSource) -> GroupedInts:
        bits = self._bits
        group_size = in_features if self._group_size == -1 else self._group_size
        num_groups = -(-in_features // group_size)
        words = source.take(f"{name}.qweight", (in_features * bits // 32, out_features))
        zeros = source.take(f"{name}.qzeros", (num_groups, out_features * bits // 32))
        scales = source.take(f"{name}.scales", (num_groups, out_features)).T.contiguous()
        numbers = unpack(words.T.contiguous(), bits, in_features)
        # The sum may be one too many for its bits, and is meant so: the format loses it only in storing.
        zeros = unpack(zeros, bits, out_features).T.to(torch.float32) + self._missing_from_zeros
        order = self._order(name, in_features, group_size, source)
        if order is not None:
            numbers = numbers.index_select(1, order)
        return GroupedInts.with_zeros(
            numbers, scales, zeros.contiguous(), bits=bits, group_size=group_size, order=order
        )

    def _order(self, name: str, in_features: int, group_size: int, source: TensorSource) -> torch.Tensor | None:
        if not source.has(f"{name}.g_idx"):
            return None
        return columns_by_group(source.take(f"{name}.g_idx", (in_features,)), group_size, name)


def columns_by_group(groups: torch.Tensor, group_size: int, name: str) -> torch.Tensor | None:
    """Columns brought together by their groups, int64 `[in]`; None where they are so already. Raises `SetupError`."""
    in_features = len(groups)
    groups = groups.long()
    if torch.equal(groups, torch.arange(in_features, device=groups.device) // group_size):
        return None
    counts = torch.bincount(groups, minlength=-(-in_features // group_size))
    if not bool((counts == group_size).all()):
        raise SetupError(
            "model_unavailable", f"{name}: its activation order has groups of other sizes than {group_size}"
        )
    return torch.argsort(groups, stable=True)
