"""The decode step in Numba-CUDA: one file per op, one file of intrinsics, one launch path (docs/kernels.md)."""
