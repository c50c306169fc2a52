"""The interface for pattern authors: hints, parameter ranges, predicates and registration."""

from .base.check import Range
from .base.class_registry import register
from .base.content import ByContent
from .base.pattern import Part
from .base.predicate import apply, member
from .base.recipe import recipe
from .hints.closed_forms import Ends, Lattice, Span
from .listed.pairs import RowRuns

__all__ = ["ByContent", "Ends", "Lattice", "Part", "Range", "RowRuns", "Span", "apply", "member", "recipe", "register"]
