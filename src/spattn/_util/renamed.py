"""Names from before 0.1.0 and their successors; imported only for an unknown name. Delete this module at 1.0."""

from __future__ import annotations

__all__ = ["unknown"]

_MOVED = {
    "patterns.authoring": "register ByContent Range Lattice Part Span Ends apply member RowRuns",
    "patterns.interop": "from_block_mask from_deepspeed from_flash_attention from_flashmask from_mask_mod from_natten "
    "from_pairs from_scipy from_torch_sparse from_xformers",
    "patterns.registry": "get names example",
    "patterns.show": "draw gallery",
}
_RENAMED = {
    "BackendUnavailable": "BackendUnavailableError",
    "demo": "examples/sentence_encoder",
    "selections": "patterns.KeyBlocks, patterns.VerticalSlash, patterns.KeyPadding.from_lengths, "
    "patterns.Documents.from_cu_seqlens with arrays on a GPU, and patterns.dynamic",
    "patterns.Strided": "patterns.strided",
    "patterns.Fixed": "patterns.fixed",
    "patterns.Longformer": "patterns.longformer",
    "patterns.PrefixLM": "patterns.prefix_lm",
    "patterns.Windowed": "patterns.windowed",
    "patterns.Axial": "patterns.axial",
    "patterns.from_dict": "patterns.from_json",
    "patterns.from_text": "patterns.from_json",
    "patterns.deepspeed.Dense": "patterns.deepspeed.dense",
    "patterns.deepspeed.Fixed": "patterns.deepspeed.fixed",
    "patterns.deepspeed.Variable": "patterns.deepspeed.variable",
    "patterns.deepspeed.BigBird": "patterns.deepspeed.bigbird",
    "patterns.deepspeed.BSLongformer": "patterns.deepspeed.bslongformer",
    "patterns.deepspeed.LocalSlidingWindow": "patterns.deepspeed.local_sliding_window",
    "testing.error_budget": "testing.error_bound",
    "testing.assert_within_budget": "testing.assert_within_bound",
    **{f"patterns.{name}": f"{module}.{name}" for module, moved in _MOVED.items() for name in moved.split()},
}


def unknown(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module lacks; its message has the successor of a removed name."""
    successor = _RENAMED.get(f"{module}.{name}".removeprefix("spattn."))
    if successor is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return AttributeError(f"{module} has no {name!r}; use {successor}")
