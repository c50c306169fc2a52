"""Hints: lattices, interval conjuncts, permutations, grids and lookup tables."""
