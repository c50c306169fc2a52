"""Type stub without Python API; documented in _held.pyx."""
