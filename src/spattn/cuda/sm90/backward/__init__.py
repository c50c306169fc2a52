"""Backward kernels for compute capability 9.0: TMA, WGMMA and persistent CTAs, for 16-bit types.

Either a dK/dV kernel and a dQ kernel run, or a fused one. No sum depends on the order of atomics: gradients are bitwise
reproducible.
"""
