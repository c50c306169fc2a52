"""Option ``--hf``: the time of each part of MiniLM in Hugging Face Transformers, with SDPA and with spattn.

Needs PyTorch and Transformers beside the example's requirements.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from spattn.patterns import Pattern, SlidingWindow

from . import machine, text
from .model import DemoUnavailable, Encoder, missing
from .others import Others
from .progress import Progress
from .results import PARTS, TOLERANCE, Profile
from .startup import begin

TOKENS, QUICK_TOKENS = 4096, 1024
ROUNDS = 5
Part = tuple[int | None, str]  # (layer, or None outside of the layers; name)
Seconds = defaultdict[Part, float]
CONTENDERS: dict[str, tuple[str, Pattern | None]] = {
    "before: sdpa, every pair": ("sdpa", None),
    "after: spattn, every pair": ("spattn", None),
    "after: spattn, window ±256": ("spattn", SlidingWindow(256)),
}
"""Name -> ``attn_implementation`` (Transformers' default first) and ``config.spattn_pattern``."""


def run(out: Path, backend: str = "auto", quick: bool = False, say: Callable[[str], None] = print) -> bool:
    """Time each part of each layer and write ``layers.png`` and ``layers.json`` to `out`.

    Parameters
    ----------
    out : Path
        Output folder, created if missing.
    backend : {"auto", "cpu", "cuda"}
        Device of the model; "auto" is the CPU.
    quick : bool
        1024 tokens instead of 4096.
    say : callable
        Receives the lines of the report.

    Returns
    -------
    bool
        Whether the last hidden states of dense attention, before and after, agree within 1e-5.

    Raises
    ------
    DemoUnavailable
        If the backend, the weights or a package is missing.
    OSError
        If `out` cannot be written.
    """
    figures, backend, (encoder, tokenizer) = begin(out, backend)
    bert = in_transformers(encoder).to(backend)
    tokens = QUICK_TOKENS if quick else TOKENS
    ids = text.chunks(tokenizer, tokens // encoder.max_len, encoder.max_len).reshape(1, -1)
    others = Others()
    profiles, difference = measure(bert, ids, encoder.max_len)
    taken = others.share()
    _tell(say, profiles, tokens, difference)
    known = machine.facts() | {"taken by other programs": round(taken, 3)}
    found = {
        "machine": known,
        "settings": {"backend": backend, "tokens": tokens, "rounds": ROUNDS},
        "difference": difference,
        "profiles": [asdict(p) | {"whole": p.whole} for p in profiles],
    }
    figures.layers(out / "layers.png", profiles, f"{known['processor']}, {known['cpus']} CPUs; {tokens} tokens")
    (out / "layers.json").write_text(json.dumps(found, indent=1) + "\n")
    for name in ("layers.png", "layers.json"):
        say(f"wrote {(out / name).resolve()}")
    return difference <= TOLERANCE


def in_transformers(encoder: Encoder) -> Any:
    """The encoder as a ``transformers.BertModel`` of the same weights; registers "spattn".

    Raises
    ------
    DemoUnavailable
        If PyTorch or Transformers is missing.
    """
    try:
        import torch
        from transformers import BertConfig, BertModel

        from spattn.transformers import register
    except ModuleNotFoundError as error:
        raise DemoUnavailable(missing(error.name or "transformers")) from error
    register()
    weights = encoder.weights
    vocabulary, features = weights["embeddings.word_embeddings.weight"].shape
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=features,
        num_hidden_layers=encoder.layers,
        num_attention_heads=encoder.heads,
        intermediate_size=len(weights["encoder.layer.0.intermediate.dense.bias"]),
        max_position_embeddings=encoder.max_len,
        layer_norm_eps=encoder.eps,
    )
    bert = BertModel(config, add_pooling_layer=False)
    bert.load_state_dict({name: torch.tensor(weights[name]) for name in bert.state_dict() if name in weights})
    return bert.eval()


def measure(
    bert: Any,
    ids: np.ndarray,
    text_len: int,
    contenders: dict[str, tuple[str, Pattern | None]] = CONTENDERS,
    rounds: int | None = None,
    seconds: Callable[[], float] | None = None,
) -> tuple[list[Profile], float]:
    """Profile all contenders in turns, after a warm-up round, on packed texts.

    Parameters
    ----------
    bert : transformers.BertModel
    ids : (1, tokens) array of int
    text_len : int
        Positions are modulo this length.
    contenders : dict
        Name -> ``attn_implementation`` and ``config.spattn_pattern``.
    rounds : int, optional
        Timed runs of each; by default :data:`ROUNDS`.
    seconds : callable, optional
        The clock; by default that of the wall.

    Returns
    -------
    list of Profile
    float
        Largest absolute difference from the first contender's hidden states of those without a pattern.
    """
    import torch

    positions = torch.arange(ids.shape[1], device=bert.device)[None] % text_len
    given = {"input_ids": torch.from_numpy(ids).to(bert.device), "position_ids": positions}
    runs: dict[str, list[Seconds]] = {name: [] for name in contenders}
    dense = {}
    rounds = ROUNDS if rounds is None else rounds
    progress = Progress()
    progress.start(f"{rounds + 1} rounds of {len(contenders)} contenders", rounds + 1)
    with torch.no_grad(), _Clock(bert, seconds) as clock:
        for _ in progress.each(range(rounds + 1)):
            for name, (implementation, pattern) in contenders.items():
                bert.set_attn_implementation(implementation)
                bert.config.spattn_pattern = pattern
                hidden = bert(**given).last_hidden_state
                if pattern is None:
                    dense[name] = hidden
                runs[name].append(clock.read())
    progress.finish()
    before, *after = dense.values()
    profiles = [_profile(name, own[1:], len(bert.encoder.layer)) for name, own in runs.items()]
    return profiles, float(torch.stack([(x - before).abs().max() for x in after]).max())


def _profile(name: str, runs: list[Seconds], layers: int) -> Profile:
    def median(part: Part) -> float:
        return float(np.median([run[part] for run in runs]))

    of_layers = [{what: median((number, what)) for what in PARTS} for number in range(layers)]
    return Profile(name, median((None, "embedding")), of_layers, median((None, "rest")))


class _Clock:
    """Attributes the time of a forward pass to the innermost running part."""

    def __init__(self, bert: Any, seconds: Callable[[], float] | None = None) -> None:
        self._bert, self._seconds_now = bert, seconds or time.perf_counter
        self._hooks: list[Any] = []
        self._running: list[Part] = []
        self._seconds: Seconds = defaultdict(float)
        self._last = 0.0

    def __enter__(self) -> _Clock:
        self._watch(self._bert, (None, "rest"))
        self._watch(self._bert.embeddings, (None, "embedding"))
        for number, layer in enumerate(self._bert.encoder.layer):
            own = layer.attention.self
            self._watch(own, (number, "attention"))
            for module in (own.query, own.key, own.value, layer.attention.output.dense):
                self._watch(module, (number, "projections"))
            for module in (layer.intermediate, layer.output.dense):
                self._watch(module, (number, "MLP"))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def read(self) -> Seconds:
        """Seconds of each part since the last call."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def _watch(self, module: Any, part: Part) -> None:
        def enter(*_: object) -> None:
            self._count()
            self._running.append(part)

        def leave(*_: object) -> None:
            self._count()
            self._running.pop()

        self._hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def _count(self) -> None:
        if self._bert.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        now = self._seconds_now()
        if self._running:
            self._seconds[self._running[-1]] += now - self._last
        self._last = now


def _tell(say: Callable[[str], None], profiles: list[Profile], tokens: int, difference: float) -> None:
    verdict = "ok" if difference <= TOLERANCE else "TOO LARGE"
    say(f"MiniLM in Hugging Face Transformers, {tokens} tokens of packed source, float32: ms of each part")
    say(
        f"    last hidden states of dense attention, before and after, differ by {difference:.1e}, "
        f"tolerance {TOLERANCE:.0e}: {verdict}"
    )
    for profile in profiles:
        numbers = range(len(profile.layers))
        say("")
        say(f"    {profile.name:30}" + "".join(f"{f'layer {n}':>10}" for n in numbers) + f"{'all':>10}")
        for part in PARTS:
            own = [1e3 * layer[part] for layer in profile.layers]
            say(f"    {part:30}" + "".join(f"{ms:10.1f}" for ms in [*own, sum(own)]))
        for what, seconds in (("embedding", profile.embedding), ("rest", profile.rest), ("whole", profile.whole)):
            say(f"    {what:30}" + " " * 10 * len(numbers) + f"{1e3 * seconds:10.1f}")
    say("")
