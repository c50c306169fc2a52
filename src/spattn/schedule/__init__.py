"""Scheduling passes from plans to work tables for every backend, in NumPy and Cython."""
