"""Patterns of a sequence: windows, documents, padding, global tokens."""
