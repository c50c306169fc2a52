"""Below every kernel: devices and their contexts, memory, compilation and its cache, launches, errors."""
