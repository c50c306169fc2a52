"""Host side of a call, shared by all kernel families: cached dispatch, launches, buffers."""
