"""The operands, sizes and layout of one attention call."""
