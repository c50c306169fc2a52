"""Trace PyTorch mask functions into pattern predicates."""
