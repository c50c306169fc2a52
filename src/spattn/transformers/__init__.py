"""For Hugging Face Transformers: the attention implementation "spattn" of its models.

:func:`use` swaps it in a model, and refuses models that would not compute the same with it. After :func:`register`,
models also take ``attn_implementation="spattn"`` where they are made.
"""

from ._register import register, use

__all__ = ["register", "use"]
