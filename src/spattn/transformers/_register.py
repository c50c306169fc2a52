"""What a user calls."""

from __future__ import annotations

from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ._attention import attend
from ._configuration import install
from ._mask import pattern_mask

__all__ = ["register"]

_NAME = "spattn"


def register() -> None:
    """Makes ``attn_implementation="spattn"`` known to Transformers; called again, it changes nothing.

    Attention goes over the pairs that the model's own mask allows: causal, windows and chunks of the layers that have
    them, padding on either side, packed sequences (`position_ids` without `attention_mask`), caches of any kind.
    ``config.spattn_pattern``, a :class:`spattn.patterns.Pattern` or the JSON of its ``to_dict()``, which a saved
    configuration keeps, restricts that further: a pair is computed that both allow. Its positions are those of tokens
    in their own sequence, from 0, wherever that stands in a padded or packed batch.

    Notes
    -----
    Masks are patterns: nothing of q_len × kv_len is ever written down. A model's mask that is no window, chunk or
    packing of Transformers' own is traced, as by :func:`spattn.patterns.from_mask_mod`. Queries that may attend to
    nothing, as those of padding, give 0, where other implementations give a mean of all values. The host reads padding,
    which waits for a GPU once a forward pass and kind of layer; ``torch.compile`` breaks its graph there and at
    attention.

    A model raises ValueError, when it is called, for what attention cannot compute here: dropout while training,
    soft-capped logits, learnt sinks, biases of positions, keys that an indexer chooses, a paged cache, weights to
    return (`output_attentions`), a mask that was given with four axes and is not made of 0 and −∞, and
    ``config.spattn_pattern`` of a model that has cross-attention. TypeError comes of a model that computes with its
    mask instead of handing it on.

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
