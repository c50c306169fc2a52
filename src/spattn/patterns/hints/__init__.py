"""Optional structure of patterns: lattices, intervals of distances, permutations, grids."""
