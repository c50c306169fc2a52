"""Patterns on 1-, 2- and 3-D grids."""
