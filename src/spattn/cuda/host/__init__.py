"""Host side of a call: cached dispatch, launches, buffers, shared by all kernel families."""
