"""Kernels for compute capability 9.0."""
