"""Patterns as text where torch.compile may be tracing: a text is then a constant of the graph."""

from __future__ import annotations

import torch

from .. import _text
from .._text import pattern_of

__all__ = ["pattern_of", "text_of"]

text_of = torch.compiler.assume_constant_result(_text.text_of)
