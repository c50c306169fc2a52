"""asv benchmarks over the pattern registry: a new pattern is included automatically."""
