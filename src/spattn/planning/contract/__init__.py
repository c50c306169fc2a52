"""The plan's data contract, its validation and its cache."""
