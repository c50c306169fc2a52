"""What a plan is, how it is validated, and the cache of plans."""
