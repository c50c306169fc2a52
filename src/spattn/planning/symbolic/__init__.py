"""Evaluate predicates on whole tiles: intervals, congruences and tables."""
