"""The pages of the documentation's gallery, written from the registry."""

import html
import importlib
import json
import re
from pathlib import Path

import numpy as np
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
    table = gallery._overview([gallery._registered("longformer")])
    assert "For long documents with a few tokens" in table and "pattern-longformer-small.png" in table


@pytest.mark.parametrize("name", patterns.registry.names())
def test_every_pattern_has_a_sentence(gallery, name):
    assert len(gallery._registered(name).use) > 20


@pytest.mark.parametrize("name", ["causal", "strided", "bigbird", "per_head", "csr"])
def test_view_shows_the_allowed_keys(gallery, name):
    """The ranges that the page's script draws."""
    pattern, length = patterns.registry.example(name)[:2]
    for head in range(max(1, pattern.sizes()[1])):
        view = html.unescape(gallery._view(pattern, length, head, 2))
        rows = json.loads(re.search(r'data-ranges="(.*)"', view)[1])
        drawn = np.zeros((length, length), bool)
        for row, ranges in zip(drawn, rows, strict=True):
            for start, stop in ranges:
                assert not row[max(0, start - 1) : stop].any()  # ranges are apart
                row[start:stop] = True
        assert np.array_equal(drawn, pattern.index_set(length, length, head=head).to_dense())


def test_plans_are_of_a_usual_size(gallery):
    for name, least in {"longformer": 0.6, "sliding_window": 0.7, "strided": 0.4}.items():
        pattern, length = gallery._registered(name).typical
        made = gallery.spattn.plan(pattern, length)
        assert length >= 4096 and made.efficiency > least
