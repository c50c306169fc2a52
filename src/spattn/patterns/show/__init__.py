"""Draw patterns, and list well-known compositions."""

from ..papers.recipes import gallery
from .draw import draw

__all__ = ["draw", "gallery"]
