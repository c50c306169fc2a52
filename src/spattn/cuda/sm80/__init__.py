"""Kernels for compute capability 8.0 and later."""
