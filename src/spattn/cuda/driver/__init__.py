"""CUDA driver layer: devices, contexts, memory, compilation, kernel cache, launches, errors."""
