"""Scheduling passes, in NumPy and Cython: they turn plans into the work tables of the backends."""
