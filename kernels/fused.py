"""The small kernels of a GPU under the names of their twins in `reference.py`."""
