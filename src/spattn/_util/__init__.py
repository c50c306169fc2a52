"""Small helpers shared by the package: caching, frozen arrays, limits, checks."""
