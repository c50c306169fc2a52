"""Public API: attention, grouped attention, plans and explain()."""
