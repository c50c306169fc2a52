"""The public calls: attention, grouped attention, plans and their explanation."""
