"""Patterns by their registered names."""

from .base.named import example, get
from .base.registry import names

__all__ = ["example", "get", "names"]
