"""Draw patterns, and the gallery of known compositions."""

from ..papers.recipes import gallery
from .draw import draw

__all__ = ["draw", "gallery"]
