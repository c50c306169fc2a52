"""Backward kernels for compute capability 9.0: TMA, WGMMA and persistent CTAs, for 16-bit types.

A dK/dV kernel and a dQ kernel, or a fused backward. No sum depends on the order of atomics: gradients are bitwise
reproducible.
"""
