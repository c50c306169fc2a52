"""Forward kernels for compute capability 9.0: TMA, WGMMA and persistent CTAs, for 16-bit types and float32."""
