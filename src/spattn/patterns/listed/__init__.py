"""Patterns given by their content: masks, blocks, pairs, clusters."""
