"""asv benchmarks that run on every commit of commits.json, whatever its API."""
