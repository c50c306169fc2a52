"""Well-known compositions as functions."""

from __future__ import annotations

from ..base.check import integer, integers
from ..base.pattern import Pattern
from ..sequence.basic import BlockLocal, Causal, Sinks
from ..sequence.documents import Documents
from ..sequence.tokens import GlobalTokens
from ..sequence.windows import SlidingWindow

__all__ = ["a_shape", "chunked_causal", "gallery", "shared_prefix", "tri_shape"]


def chunked_causal(chunk: int, offset: int = 0) -> Pattern:
    """Causal attention inside chunks of `chunk` tokens (Llama 4's local layers).

    Parameters
    ----------
    chunk : int
        Tokens of a chunk.
    offset : int, optional
        Start of the first chunk: the padding before the first token.

    Returns
    -------
    Pattern
        ``Causal() & BlockLocal(chunk, offset)``.
    """
    return Causal() & BlockLocal(chunk, offset)


def a_shape(sinks: int, window: int) -> Pattern:
    """The first `sinks` keys and the last `window` ones, including the query's own, causal.

    StreamingLLM's mask (arXiv:2309.17453), the A-shape of MInference (arXiv:2407.02490).

    Parameters
    ----------
    sinks : int
        Number of leading keys.
    window : int
        Number of last keys, including the query's own.

    Returns
    -------
    Pattern
        ``Causal() & (Sinks(sinks) | SlidingWindow(window - 1, 0))``.
    """
    return Causal() & (Sinks(sinks) | SlidingWindow(integer("window", window, 1) - 1, 0))


def tri_shape(sinks: int, window: int, last: int, length: int) -> Pattern:
    """The A-shape, and causal attention for the last `last` of `length` queries (SCBench, arXiv:2412.10319).

    Parameters
    ----------
    sinks, window : int
        As for :func:`a_shape`.
    last : int
        Number of last queries that see every earlier key.
    length : int
        Length of the sequence in tokens.

    Returns
    -------
    Pattern
    """
    first = integer("length", length, 0) - integer("last", last, 0, length)
    last_queries = GlobalTokens(length, keys=False) - GlobalTokens(first, keys=False)
    return a_shape(sinks, window) | Causal() & last_queries


def shared_prefix(prefix: int, lengths: tuple[int, ...]) -> Pattern:
    """Documents that each continue a common prefix, causal.

    Parameters
    ----------
    prefix : int
        Tokens of the prefix.
    lengths : tuple of int
        Tokens of each document after it.

    Returns
    -------
    Pattern
        ``Causal() & (Sinks(prefix) | Documents((prefix, *lengths)))``.
    """
    documents = integer("prefix", prefix, 0), *integers("lengths", lengths, 0)
    return Causal() & (Sinks(prefix) | Documents(tuple(n for n in documents if n)))


def gallery() -> dict[str, tuple[Pattern, int]]:
    """Return well-known compositions by name: a small pattern and a length to show it at.

    Returns
    -------
    dict of str to (Pattern, int)
        A new dict.

    Examples
    --------
    >>> pattern, length = gallery()["streaming LLM"]
    >>> pattern.index_set(length, length).row(20)
    array([ 0,  1,  2,  3, 16, 17, 18, 19, 20])
    """
    return {
        "chunked causal": (chunked_causal(8), 32),
        "A-shape": (a_shape(2, 6), 32),
        "tri-shape": (tri_shape(2, 6, 6, 32), 32),
        "streaming LLM": (a_shape(4, 5), 32),
        "shared prefix": (shared_prefix(6, (10, 8, 8)), 32),
        "causal documents": (Causal() & Documents((10, 14, 8)), 32),
        "FlashAttention window_size=(6, 2)": (SlidingWindow(6, 2), 32),
        "Mistral sliding_window=6": (SlidingWindow(6 - 1, 0), 32),
        "attention-gym sliding window 6": (SlidingWindow(6, 0), 32),
    }
