"""Who computes a plan, and when: passes from a plan, or the tables of one, to tables. NumPy only."""
