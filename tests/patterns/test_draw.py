"""The picture of a pattern."""

import builtins

import numpy as np
import pytest

from spattn import patterns as p
from spattn.patterns.show import density_map


def test_density_is_exact():
    rng = np.random.default_rng(0)
    for pattern in (p.Causal(), p.strided(7), p.Mask(rng.random((300, 700)) < 0.3)):
        picture = density_map(pattern.index_set(300, 700))
        dense = pattern.index_set(300, 700).to_dense()
        assert picture.shape == (100, 234)
        assert picture[3, 5] == pytest.approx(dense[9:12, 15:18].mean())
        assert picture[99, 233] == pytest.approx(dense[297:, 699:].mean())


def test_small_picture_is_the_pattern():
    pattern = p.longformer(8, global_tokens=2)
    assert np.array_equal(density_map(pattern.index_set(40, 40)), pattern.index_set(40, 40).to_dense())


@pytest.mark.parametrize(("q_len", "kv_len"), [(32, 32), (5, 64), (2000, 2000), (0, 0), (0, 7)])
def test_draw(q_len, kv_len):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = p.show.draw(p.Causal(), q_len, kv_len, title="causal")
    axes.figure.canvas.draw()
    top, bottom = axes.get_ylim()[::-1]
    assert top < bottom  # queries downwards
    assert axes.get_title() == "causal"
    matplotlib.pyplot.close("all")


def test_missing_matplotlib_says_what_to_do(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        p.show.draw(p.Causal(), 4, 4)
