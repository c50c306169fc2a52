"""Registration with Transformers, and models that use it."""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ._attention import attend
from ._configuration import checked, install
from ._mask import pattern_mask
from ._refusals import refusal

__all__ = ["register", "use"]

_NAME = "spattn"

_Model = TypeVar("_Model", bound=PreTrainedModel)


def register() -> None:
    """Make ``attn_implementation="spattn"`` known to Transformers; a second call changes nothing.

    Attention goes over the pairs that the model's own mask allows: causal, windows and chunks of the layers that have
    them, padding on either side, packed sequences (`position_ids` without `attention_mask`), caches of any kind.
    ``config.spattn_pattern`` restricts that further: a pair is computed that both allow. It is one
    :class:`spattn.patterns.Pattern` for all layers, a dict of patterns by the names in ``config.layer_types`` (a type
    that it leaves out is not restricted), or a list with a pattern, or None, for each layer; or the JSON of one of
    these. Its positions are those of tokens in their own sequence, from 0, wherever that stands in a padded or packed
    batch. The configuration holds JSON, which ``save_pretrained()`` writes, and gives back patterns.

    Notes
    -----
    :func:`use` also checks the model. Without it, a model that never calls Transformers' attention interface stays
    dense, with a line in Transformers' log.

    Masks are patterns: nothing of q_len × kv_len is ever written down. A model's mask that is no window, chunk or
    packing of Transformers' own is traced (:func:`spattn.patterns.interop.from_mask_mod`). Queries that may attend to
    nothing, as those of padding, give 0, where other implementations give a mean of all values. The host reads padding,
    which waits for a GPU once a forward pass and kind of layer; ``torch.compile`` breaks its graph there and at
    attention.

    A model raises ValueError, when it is called, for what attention cannot compute here: dropout while training,
    soft-capped logits, learnt sinks, biases of positions, keys that an indexer chooses, a paged cache, weights to
    return (`output_attentions`), a mask that was given with four axes and is not made of 0 and −∞, a layer that attends
    with a window of no keys, layers or layer types of ``config.spattn_pattern`` that the configuration lacks, and
    ``config.spattn_pattern`` of a model that has cross-attention. TypeError comes of a model that computes with its
    mask instead of handing it on, as BEiT adds a bias to it.

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
    """Compute the attention of a model by spattn.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model, or one inside of a composite model: ``use(model.get_decoder())`` leaves the vision tower as it is.
    pattern : Pattern, dict, list or str, optional
        ``config.spattn_pattern`` from now on, see :func:`register`: one pattern for all layers; a dict of patterns by
        the names in ``config.layer_types``, where a type that is left out keeps the model's mask alone; or a list with
        a pattern, or None, for each layer. None leaves what the configuration has. In a composite model the pattern is
        that of the text model, ``config.get_text_config()``.

    Returns
    -------
    transformers.PreTrainedModel
        The same model.

    Raises
    ------
    TypeError
        If `model` is no model of Transformers.
    ValueError
        If the model computes attention by itself (BLOOM, MPT, Longformer), soft-caps logits, or has learnt sinks or
        biases of positions; if `pattern` is none, cannot be written as JSON, or names layers or layer types that the
        configuration lacks. Nothing has changed then.

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
        raise TypeError(f"model: expected a PreTrainedModel of Transformers, got {type(model).__name__}")
    register()
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"model: {type(model).__name__} is not supported, as {reason}; leave its attention as it is")
    if pattern is not None:
        config = model.config.get_text_config()
        text = checked(config, pattern)
        model.set_attn_implementation(_NAME)
        config.spattn_pattern = text
    else:
        model.set_attn_implementation(_NAME)
    return model
