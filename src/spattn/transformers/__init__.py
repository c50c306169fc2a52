"""For Hugging Face Transformers: the attention implementation "spattn" of its models.

After :func:`register` any model whose attention is an interface of Transformers takes
``attn_implementation="spattn"``, and ``model.set_attn_implementation("spattn")`` swaps it in a model that is there.
"""

from ._register import register

__all__ = ["register"]
