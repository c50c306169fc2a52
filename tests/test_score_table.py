"""The table of docs/scores.rst, "What kernels compute": each of its cells has tests, of each dtype and launch kind."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scores.rst"
DTYPES = "float32", "float64", "float16", "bfloat16"
HALF = "float16", "bfloat16"
CPU_SCORES, CPU_TABLES = "cpu/test_cpu_scores.py", "cpu/test_cpu_scores_tables.py"
HOPPER, PORTABLE = "cuda/sm90/test_wgmma_scores.py", "cuda/sm80/test_mma_scores.py"
TRACED, LAUNCHES = "cuda/test_traced_scores.py", "cuda/test_score_launches.py"
COLUMNS = "forward", "backward", "gradients of captured arrays"


def each(form, *values):
    """The formatted strings, one for each combination of values."""
    return [form.format(*one) for one in itertools.product(*values)]


CPU_TILES = [
    *each(CPU_SCORES + "::test_tiles[{}-{}-{}-{}]", ("alibi", "softcap"), DTYPES, ("partials", "permuted"),
          ("vectors", "AMX", "decode", "pairs")),
    *each(CPU_SCORES + "::test_few_queries[alibi-{}-1-pattern0]", DTYPES),
    *each(CPU_SCORES + "::test_amx_kernels_run[{}]", ("alibi", "softcap")),
]  # fmt: skip
HOPPER_TILES = each(
    HOPPER + "::test_calls[{}-{}-more keys]", ("alibi", "softcap"), ("float16-two passes", "bfloat16-one pass")
)
PORTABLE_TILES = each(
    PORTABLE + "::test_patterns[{}-{}-union]",
    ("alibi", "softcap"),
    ("float32-None", "float32-tf32", "float64-None", "float16-None", "bfloat16-None"),
)
FALLBACK = [
    *each(CPU_SCORES + "::test_hidden_keys[alibi-{}-vectors-nan-baseline]", DTYPES),
    *each(HOPPER + "::test_hidden_values[{}-alibi]", ("two passes", "one pass")),
    *each(PORTABLE + "::test_hidden_keys[{}-nan]", (*each("{}-None", DTYPES), "float32-tf32")),
]
OTHER_LAUNCHES = "gathered", "ordered", "dynamic"
# The tests of each cell, by row: its text, then those of its columns.
TABLE = {
    "CPU: tiles, pair by pair, decoding, AMX": (
        ("fused", CPU_TILES),
        ("fused", CPU_TILES),
        ("fused", [*CPU_TILES, *each(CPU_TABLES + "::test_gradients_of_tables[{}-{}]", ("head", "diagonal", "full"),
                                     ("vectors", "AMX", "decode", "pairs"))]),
    ),
    "Hopper: tiles": (
        ("fused", HOPPER_TILES),
        ("fused", HOPPER_TILES),
        ("fused, or second pass", [*each(HOPPER + "::test_table_gradients[{}-{}]", ("clipped", "slopes"),
                                         ("more keys", "window", "mask")),
                                   TRACED + "::test_index_classes[sm90-bfloat16-None-head]",
                                   TRACED + "::test_random_trees[sm90-float16-None-1]"]),
    ),
    "Hopper: gathered and permuted tokens, groups, dynamic masks": (
        ("fused", [*each(HOPPER + "::test_looked_up_tokens[{}]", ("gathered", "ordered")), HOPPER + "::test_groups",
                   HOPPER + "::test_dynamic_masks[alibi-padding]"]),
        ("fused, as tiles", [*each(LAUNCHES + "::test_gradients[{}]", OTHER_LAUNCHES), LAUNCHES + "::test_groups"]),
        ("second pass", [*each(LAUNCHES + "::test_gradients[{}]", OTHER_LAUNCHES), LAUNCHES + "::test_groups"]),
    ),
    "portable CUDA kernels, every dtype": (
        ("fused", PORTABLE_TILES),
        ("fused", PORTABLE_TILES),
        ("second pass", [*each(TRACED + "::test_index_classes[sm80-{}-head]", ("bfloat16-None", "float32-None",
                                                                                "float32-tf32", "float64-None")),
                         LAUNCHES + "::test_portable_float16"]),
    ),
    "float64 fallback of single rows": (
        ("fused", [*FALLBACK, *each(HOPPER + "::test_huge_scores[{}]", HALF)]),
        ("fused", FALLBACK),
        ("with its tile", [*each(CPU_TABLES + "::test_fallback[{}-baseline]", ("vectors", "AMX", "decode", "pairs")),
                           *each(LAUNCHES + "::test_fallback[sm{}]", ("90-bfloat16", "80-float32"))]),
    ),
}  # fmt: skip


def rows_of_page():
    """The rows of the table in the page, as tuples of their cells' text."""
    text = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"^   \* - kernels\n.*?(?=^\S)", text, re.MULTILINE | re.DOTALL)
    rows = re.split(r"^   \* - ", table, flags=re.MULTILINE)[1:]
    return [tuple(" ".join(cell.split()) for cell in re.split(r"^     - ", row, flags=re.MULTILINE)) for row in rows]


def test_the_page_has_the_cells_that_are_tested():
    header, *rows = rows_of_page()
    assert header == ("kernels", *COLUMNS)
    assert rows == [(name, *(text for text, _ in cells)) for name, cells in TABLE.items()]


@pytest.fixture(scope="module")
def collected():
    """The names of all tests of the modules that the table names."""
    files = sorted({f"tests/{test.partition('::')[0]}" for cells in TABLE.values() for _, own in cells for test in own})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(re.findall(r"^tests/(.*::.*)$", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("column", range(len(COLUMNS)), ids=COLUMNS)
@pytest.mark.parametrize("row", TABLE)
def test_each_cell_has_its_tests(collected, row, column):
    _, tests = TABLE[row][column]
    assert tests and not [test for test in tests if test not in collected]
