"""One attention call as data: its operands, sizes and layout."""
