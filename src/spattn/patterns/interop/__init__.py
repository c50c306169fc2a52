"""Importers of other libraries' masks."""
