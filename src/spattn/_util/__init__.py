"""Helpers that the whole package shares: caching, immutable arrays, limits, checks."""
