"""Recipes of published models, and the gallery of well-known compositions."""

from __future__ import annotations

from typing import Annotated, Any

from ..base.check import Count, Positive, Range, integer, integers
from ..base.pattern import Pattern
from ..base.per_head import PerBatch
from ..base.recipe import recipe
from ..sequence.basic import BlockLocal, Causal, Columns, Sinks, Stride
from ..sequence.documents import Documents
from ..sequence.tokens import GlobalTokens
from ..sequence.windows import DilatedWindow, SlidingWindow

__all__ = [
    "a_shape",
    "chunked_causal",
    "fixed",
    "gallery",
    "longformer",
    "prefix_lm",
    "shared_prefix",
    "strided",
    "tri_shape",
]


@recipe("strided", example=((6,), 36), typical=((128,), 16384))
def strided(stride: Positive) -> Pattern:
    """Allow the last `stride` keys and every `stride`-th key before them.

    For periodic data, such as music, or images in row-major order.

    Parameters
    ----------
    stride : int
        Length of the local window, and distance between the column keys, in tokens.

    Returns
    -------
    Pattern
        ``SlidingWindow(stride - 1, 0) | (Causal() & Stride(stride))``:
        about ``stride + p / stride`` keys at position p.

    References
    ----------
    Child, Gray, Radford, Sutskever. Generating Long Sequences with Sparse Transformers. arXiv:1904.10509, §4.2.
    """
    # A union rather than Causal() & (...): an enclosing union can flatten it, and plan both operands as separate parts.
    return SlidingWindow(stride - 1, 0) | (Causal() & Stride(stride))


def _random_fixed(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
    block = draw.size(1, sizes.kv_len + 3)
    return (block, draw.integer(1, block)), sizes


@recipe("fixed", example=((8, 2), 32), typical=((128, 8), 16384), random=_random_fixed)
def fixed(block: Positive, summary: Positive) -> Pattern:
    """Allow the query's own block and the last `summary` keys of every earlier block.

    For text and other aperiodic data, where the last tokens of a block summarize it.

    Parameters
    ----------
    block : int
        Tokens per block (the paper's stride).
    summary : int
        Tokens at the end of each block that later blocks attend to (the paper's c), at most `block`.

    Returns
    -------
    Pattern
        ``Causal() & (BlockLocal(block) | Columns(block, block - summary, block))``.

    References
    ----------
    Child, Gray, Radford, Sutskever. Generating Long Sequences with Sparse Transformers. arXiv:1904.10509, §4.2.
    """
    integer("summary", summary, 1, block)
    return Causal() & (BlockLocal(block) | Columns(block, block - summary, block))


def _random_longformer(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
    side, dilation = draw.size(1, sizes.kv_len // 2), draw.size(1, sizes.kv_len // 4)
    return (2 * side, dilation, draw.choice([draw.integer(0, 4), draw.positions(sizes.kv_len)])), sizes


@recipe("longformer", example=((8, 1, (0, 1)), 32), typical=((512, 1, 16), 16384), random=_random_longformer)
def longformer(
    window: Annotated[int, Range()], dilation: Positive = 1, global_tokens: Count | tuple[Count, ...] = ()
) -> Pattern:
    """Allow a (dilated) window around each query, and global tokens.

    For long documents with a few tokens that must attend to all others, as in classification and question answering.

    Parameters
    ----------
    window : int
        Total number of keys on both sides, as in the paper and in Hugging Face's ``attention_window``. It must be even:
        each query attends to its own key and to ``window // 2`` keys on either side.
    dilation : int, optional
        Distance between consecutive keys of the window in tokens.
    global_tokens : int or tuple of int, optional
        Number of leading global tokens, or positions of the global tokens.

    Returns
    -------
    Pattern
        ``DilatedWindow(window // 2, window // 2, dilation) | GlobalTokens(global_tokens)``.

    References
    ----------
    Beltagy, Peters, Cohan. Longformer: The Long-Document Transformer. arXiv:2004.05150.
    """
    side = integer("window", window) // 2
    if window < 2 or window % 2:
        raise ValueError(f"window: expected an even number >= 2, got {window}")
    local = DilatedWindow(side, side, dilation)
    return local | GlobalTokens(global_tokens) if global_tokens else local


def _random_prefix_lm(draw: Any, sizes: Any) -> tuple[tuple[Any, ...], Any]:
    def entry() -> int:
        tokens: int = draw.size(0, sizes.kv_len + 2)
        return tokens

    return (tuple(entry() for _ in range(sizes.batch)) if draw.flag() else entry(),), sizes


@recipe("prefix_lm", example=((8,), 32), typical=((1024,), 4096), random=_random_prefix_lm)
def prefix_lm(prefix: Count | tuple[Count, ...]) -> Pattern:
    """Allow bidirectional attention within a prefix, and causal attention after it: ``j < prefix or j <= p``.

    For models that read their input bidirectionally and then generate.

    Parameters
    ----------
    prefix : int or tuple of int
        Tokens of the prefix; a tuple has one entry per batch entry.

    Returns
    -------
    Pattern
        ``Causal() | Sinks(prefix)``, or :class:`PerBatch` of these.

    References
    ----------
    Raffel et al. T5. arXiv:1910.10683, §3.2.1.
    """
    if not isinstance(prefix, tuple):
        return Causal() | Sinks(prefix)
    if not prefix:
        raise ValueError("prefix: expected at least one batch entry, got ()")
    return PerBatch(tuple(Causal() | Sinks(tokens) for tokens in prefix))


def chunked_causal(chunk: int, offset: int = 0) -> Pattern:
    """Allow causal attention within chunks of `chunk` tokens (Llama 4's local layers).

    Parameters
    ----------
    chunk : int
        Tokens per chunk.
    offset : int, optional
        Start of the first chunk, e.g. the amount of left padding.

    Returns
    -------
    Pattern
        ``Causal() & BlockLocal(chunk, offset)``.
    """
    return Causal() & BlockLocal(chunk, offset)


def a_shape(sinks: int, left: int) -> Pattern:
    """Allow the first `sinks` keys, the query's own key and the `left` keys before it; causal.

    This is StreamingLLM's mask (arXiv:2309.17453) and the A-shape of MInference (arXiv:2407.02490).

    Parameters
    ----------
    sinks, left : int
        Number of leading keys, and of keys before the query, as :class:`SlidingWindow` counts them.

    Returns
    -------
    Pattern
        ``Causal() & (Sinks(sinks) | SlidingWindow(left, 0))``.
    """
    return Causal() & (Sinks(sinks) | SlidingWindow(left, 0))


def tri_shape(sinks: int, left: int, last: int, length: int) -> Pattern:
    """Allow the A-shape, and full causal attention for the last `last` of `length` queries (SCBench, arXiv:2412.10319).

    Parameters
    ----------
    sinks, left : int
        As for :func:`a_shape`.
    last : int
        Number of last queries, which attend to every earlier key.
    length : int
        Length of the sequence in tokens.

    Returns
    -------
    Pattern
    """
    first = integer("length", length, 0) - integer("last", last, 0, length)
    last_queries = GlobalTokens(length, keys=False) - GlobalTokens(first, keys=False)
    return a_shape(sinks, left) | Causal() & last_queries


def shared_prefix(prefix: int, lengths: tuple[int, ...]) -> Pattern:
    """Allow causal attention within each document and to a common prefix.

    Parameters
    ----------
    prefix : int
        Tokens of the prefix.
    lengths : tuple of int
        Tokens per document, without the prefix.

    Returns
    -------
    Pattern
        ``Causal() & (Sinks(prefix) | Documents((prefix, *lengths)))``.
    """
    documents = integer("prefix", prefix, 0), *integers("lengths", lengths, 0)
    return Causal() & (Sinks(prefix) | Documents(tuple(n for n in documents if n)))


def gallery() -> dict[str, tuple[Pattern, int]]:
    """Return well-known compositions: a dict from a name to a small pattern and a length at which to draw it.

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
        "A-shape": (a_shape(2, 5), 32),
        "tri-shape": (tri_shape(2, 5, 6, 32), 32),
        "streaming LLM": (a_shape(4, 4), 32),
        "shared prefix": (shared_prefix(6, (10, 8, 8)), 32),
        "causal documents": (Causal() & Documents((10, 14, 8)), 32),
        "FlashAttention window_size=(6, 2)": (SlidingWindow(6, 2), 32),
        "Mistral sliding_window=6": (SlidingWindow(6 - 1, 0), 32),
        "attention-gym sliding window 6": (SlidingWindow(6, 0), 32),
    }
