"""Hugging Face Transformers integration: the attention implementation "spattn".

:func:`use` enables it in a model, and rejects models whose results would differ. After :func:`register`, model
constructors also accept ``attn_implementation="spattn"``.
"""

from ._cache import Cache
from ._register import register, use

__all__ = ["Cache", "register", "use"]
