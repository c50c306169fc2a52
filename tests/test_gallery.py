"""The pages of the documentation's gallery, written from the registry."""

import importlib
from pathlib import Path

import pytest

from spattn import patterns

EXTENSIONS = Path(__file__).parents[1] / "docs" / "_ext"


@pytest.fixture
def gallery(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(EXTENSIONS)
    return importlib.import_module("gallery")


@pytest.mark.parametrize("name", patterns.registry.names())
def test_page(gallery, name):
    entry = gallery._registered(name)
    page = gallery._page(entry)
    assert f"Registered as ``{name}``." in page and f".. figure:: {entry.file}.png" in page
    assert "   def " in page.partition("Definition\n")[2] and "   Plan(" in page.partition("\nPlan\n----\n")[2]
    assert f":doc:`{entry.title} <generated/{entry.file}>`" in gallery._overview([entry])


@pytest.mark.parametrize(
    "name, shown, hidden",
    [
        ("longformer", ["DilatedWindow(side, side, dilation)", "GlobalTokens("], []),
        ("causal", ["return k <= q"], []),
        ("neighborhood", ["def allows(", "def _span("], ["def runs("]),
        ("mask", ["def _table("], ["def sizes("]),
        ("deepspeed_dense", ["LengthLayout(block", "np.ones"], []),
        ("bigbird", ["def regular(", "def _side("], ["def block_runs("]),
    ],
)
def test_definition_is_what_decides(gallery, name, shown, hidden):
    definition = gallery._registered(name).definition
    assert all(text in definition for text in shown) and not any(text in definition for text in hidden)


def test_table_of_uses(gallery):
    table = gallery._uses([gallery._registered("longformer")])
    assert "longformer <generated/pattern-longformer>" in table and "For long documents with a few tokens" in table


def test_plans_are_of_a_usual_size(gallery):
    for name, least in {"longformer": 0.6, "sliding_window": 0.7, "strided": 0.4}.items():
        pattern, length = gallery._registered(name).typical
        made = gallery.spattn.plan(pattern, length)
        assert length >= 4096 and made.efficiency > least
