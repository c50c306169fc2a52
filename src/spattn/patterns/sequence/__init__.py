"""Sequence patterns: windows, documents, padding, global tokens."""
