"""The small kernels of a GPU under the names of their twins in `reference.py`."""

from mmserve.kernels.rms_norm import add_rms_norm, rms_norm
