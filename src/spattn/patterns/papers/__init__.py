"""Patterns of published models."""
