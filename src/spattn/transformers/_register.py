"""Register spattn with Transformers and enable it in models."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ._attention import attend
from ._configuration import checked, install
from ._mask import pattern_mask
from ._refusals import refusal
from ._replacements import replace, set_implementation

__all__ = ["register", "use"]

_NAME = "spattn"

_Model = TypeVar("_Model", bound=PreTrainedModel)


def register() -> None:
    """Register ``attn_implementation="spattn"`` with Transformers; idempotent.

    Supports the model's own masks: causal masks, sliding windows and chunks per layer type, left and right padding,
    packed sequences (`position_ids` without `attention_mask`), and all cache types. ``config.spattn_pattern`` is
    intersected with the model's mask. It is one :class:`spattn.patterns.Pattern` for all layers, a dict from names in
    ``config.layer_types`` to patterns (missing types are unrestricted), a list with a pattern or None per layer, the
    JSON of one of these, or a pattern's text, ``"causal & sinks(4)"``. Pattern positions count from 0 within each
    sequence, independent of padding and packing. The configuration stores JSON, which ``save_pretrained()`` writes;
    reading the attribute returns patterns.

    Notes
    -----
    :func:`use` also checks that the model is supported. Without it, a model that does not use Transformers'
    AttentionInterface stays dense, with a message in Transformers' log, or raises TypeError at its mask.

    Soft-caps, learned sinks and position biases are computed in the kernels, with gradients: see
    :mod:`spattn.score`. A 4-D mask of floats masks where it is −inf or the dtype's minimum, and is added elsewhere.

    Masks are patterns: no q_len × kv_len array is materialized. Mask functions other than the window, chunk and packing
    functions of Transformers are traced (:func:`spattn.patterns.interop.from_mask_mod`). Query rows with no allowed
    key, e.g. padding, give 0, where other implementations give the mean of all values. The host reads padding masks,
    which synchronizes with the GPU once per forward pass and layer type; ``torch.compile`` breaks the graph there and
    at each attention call.

    In training, attention dropout draws a seed per call from PyTorch's generator on the CPU.

    The forward pass of a model raises ValueError for unsupported features: indexer-selected keys, paged caches,
    attention weights (`output_attentions`), an empty sliding window in use, a ``config.spattn_pattern`` with layers
    or layer types that the configuration lacks, or a ``config.spattn_pattern`` in a model with cross-attention or
    attention over its layers. A model that computes with its mask, other than to add a bias, raises TypeError.

    Examples
    --------
    >>> import spattn.transformers
    >>> from transformers import BertConfig, BertModel
    >>> spattn.transformers.register()
    >>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    >>> model = BertModel._from_config(config, attn_implementation="spattn")
    >>> model.config._attn_implementation
    'spattn'
    """
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, pattern_mask)
    install()


def use(model: _Model, pattern: Any = None) -> _Model:
    """Enable spattn in a model.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model, or a submodel of a composite model: ``use(model.get_decoder())`` does not change the vision tower.
    pattern : Pattern, dict, list or str, optional
        New value of ``config.spattn_pattern``, see :func:`register`: one pattern for all layers, a dict from names in
        ``config.layer_types`` to patterns (missing types keep the model's mask), or a list with a pattern or None per
        layer. By default, the configuration keeps its value. In a composite model, the pattern applies to the text
        model, ``config.get_text_config()``.

    Returns
    -------
    transformers.PreTrainedModel
        The same model.

    Raises
    ------
    TypeError
        If `model` is not a PreTrainedModel.
    ValueError
        If the model does not use AttentionInterface (Longformer, XLNet; BLOOM and MPT are supported); if `pattern` is
        not a pattern, is not serializable, or has layers or layer types that the configuration lacks. The model is
        unchanged in that case.

    Notes
    -----
    In BLOOM, MPT, T5, mT5, UMT5 and Switch Transformers, the attention modules become instances of a subclass, in
    place; their parameters, hooks and names stay. In the latter four, the position bias stays a table instead of an
    array of heads × q_len × kv_len.

    Examples
    --------
    >>> import spattn.transformers
    >>> from spattn.patterns import SlidingWindow
    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    >>> model = LlamaModel(LlamaConfig(vocab_size=99, num_hidden_layers=2, **sizes))
    >>> model = spattn.transformers.use(model, [SlidingWindow(16, 0), None])
    >>> model.config.spattn_pattern
    [SlidingWindow(left=16, right=0), None]
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers.PreTrainedModel, got {type(model).__name__}")
    register()
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"model: {type(model).__name__} is not supported: {reason}; keep its attn_implementation")
    if pattern is not None:
        config = model.config.get_text_config()
        text = checked(config, pattern)
        set_implementation(model, _NAME)
        config.spattn_pattern = text
    else:
        set_implementation(model, _NAME)
    replace(model)
    return model
