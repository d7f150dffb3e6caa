"""The small kernels of a GPU under the names of their twins in `reference.py`."""

from mmserve.kernels.layer_norm import add_layer_norm, layer_norm
from mmserve.kernels.reference import add
from mmserve.kernels.rms_norm import add_rms_norm, rms_norm
from mmserve.kernels.rotary import apply_rotary
from mmserve.kernels.silu_and_mul import silu_and_mul

__all__ = ["add", "add_layer_norm", "add_rms_norm", "apply_rotary", "layer_norm", "rms_norm", "silu_and_mul"]
