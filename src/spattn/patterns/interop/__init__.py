"""Import masks from other libraries."""

from .flex_attention import from_block_mask, from_mask_mod
from .other_libraries import from_deepspeed, from_flash_attention, from_flashmask, from_natten, from_xformers
from .sparse import from_pairs, from_scipy, from_torch_sparse

__all__ = [
    "from_block_mask",
    "from_deepspeed",
    "from_flash_attention",
    "from_flashmask",
    "from_mask_mod",
    "from_natten",
    "from_pairs",
    "from_scipy",
    "from_torch_sparse",
    "from_xformers",
]
