"""Explicitly listed patterns: masks, blocks, pairs, clusters."""
