"""Hints: lattices, interval conjuncts, permutations and lookup tables."""
