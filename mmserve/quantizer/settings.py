"""What a user may choose when a model is quantized."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mmserve.errors import RequestError

if TYPE_CHECKING:
    import torch

SchemeName = Literal["awq", "gptq", "rtn", "fp8", "int8"]
OutputDType = Literal["auto", "float32", "bfloat16", "float16"]
GROUP_SIZES = (32, 64, 128)
NUM_BITS = 4
# Their weights are rounded by what the model does with texts, those of FP8 and int8 if there are any.
_CALIBRATED: frozenset[SchemeName] = frozenset({"awq", "gptq"})
_EIGHT_BITS: frozenset[SchemeName] = frozenset({"fp8", "int8"})


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """`rtn` is plain rounding to the nearest number, the measure for the others.

    Raises `RequestError` (`invalid_request`) naming the option at fault.
    """

    scheme: SchemeName
    group_size: int = 64
    symmetric: bool = False
    act_order: bool = True
    damping: float = 0.01
    keep: float = 0.125
    num_samples: int = 512
    seq_len: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ", ".join(map(str, GROUP_SIZES))
        _check(self.group_size in GROUP_SIZES, "group-size", f"must be one of {sizes}")
        _check(0.0 < self.damping < 1.0, "damping", "must be above 0 and below 1")
        _check(0.0 <= self.keep <= 1.0, "keep", "must be between 0 and 1")
        _check(self.num_samples >= 1, "samples", "must be at least 1")
        _check(self.seq_len >= 2, "seq-len", "must be at least 2")

    @property
    def needs_texts(self) -> bool:
        return self.scheme in _CALIBRATED

    @property
    def takes_texts(self) -> bool:
        return self.scheme != "rtn"

    @property
    def makes_up_for_drift(self) -> bool:
        """Whether weights make up for what the layers before have lost: that of eight bits is little but chance."""
        return self.scheme == "gptq"

    @property
    def is_grouped(self) -> bool:
        """Whether weights have four bits in groups, rather than eight in rows."""
        return self.scheme not in _EIGHT_BITS


def output_dtype(name: OutputDType, stored: str) -> "torch.dtype":
    """Precision of scales and of what is not quantized; `auto` keeps float16 and makes all else bfloat16."""
    import torch

    if name == "auto":
        return torch.float16 if stored == "float16" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _check(condition: bool, option: str, sentence: str) -> None:
    if not condition:
        raise RequestError("invalid_request", f"--{option} {sentence}", param=option.replace("-", "_"))
