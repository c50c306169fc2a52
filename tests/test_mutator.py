"""The mutator of ``make mutants``: each operator makes its mutants, and their names survive edits elsewhere."""

import ast
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import mutants  # noqa: E402
from mutator import mutants_of  # noqa: E402

PYTHON = {
    "boundary": ("return low < x, x >= high", ["low <= x, x >= high", "low < x, x > high"]),
    "equal": (
        "return a == b, a is b, a not in b",
        ["a != b, a is b, a not in b", "a == b, a is not b, a not in b", "a == b, a is b, a in b"],
    ),
    "plus": ("return (a + b) - c + 'text'", ["(a - b) - c + 'text'", "(a + b) + c + 'text'"]),
    "times": ("return a * b, a // b, a / b", ["a // b, a // b, a / b", "a * b, a * b, a / b", "a * b, a // b, a * b"]),
    "logic": ("return a and (b or c) & d", ["a or (b or c) & d", "a and (b and c) & d", "a and (b or c) | d"]),
    "not": ("return not (a or b), ~c", [" (a or b), ~c", "not (a or b), c"]),
    "constant": ("return a[1], 2.5, f'{3}', True", ["a[2], 2.5, f'{3}', True", "a[1], 3.5, f'{3}', True"]),
    "flag": ("return True, None, False", ["False, None, False", "True, None, True"]),
    "extreme": (
        "return min(a), a.maximum(), a.any()",
        ["max(a), a.maximum(), a.any()", "min(a), a.minimum(), a.any()", "min(a), a.maximum(), a.all()"],
    ),
    "return": ("return a", ["None"]),
    "keyword": (
        "return f(a, b=1, c=2), g(d=3), zip(strict=True)",
        [f"{calls}, zip(strict=True)" for calls in ("f(a,  c=2), g(d=3)", "f(a, b=1), g(d=3)", "f(a, b=1, c=2), g()")],
    ),
}


def changed(source, file="x.py"):
    """The sources of all mutants, by operator."""
    found = {}
    for mutant in mutants_of(file, source):
        found.setdefault(mutant.operator, []).append(mutant.apply(source))
    return found


def python(body):
    return f"def f(a: int = None, *, b=None):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"


@pytest.mark.parametrize("operator", PYTHON)
def test_an_operator_in_an_expression(operator):
    body, expected = PYTHON[operator]
    assert changed(python(body)).get(operator) == [python(f"return {new}") for new in expected]


BODY = """
if a > 0:
    raise ValueError(f"{a + 1}", 1 < 2)
elif b:
    a.count += g(a)
    a[b] = c
    print(a)
    c = g(a)
while a.b:
    break
assert a, "text"
return
"""


def test_conditions_and_statements():
    replaced = {
        "guard": [("if a > 0", "if False"), ("elif b", "elif False"), ("while a.b", "while False")],
        "boundary": [("a > 0", "a >= 0")],
        "constant": [("a > 0", "a > 1")],
        "plus": [("+=", "-=")],
        "statement": [
            (line, "pass")
            for line in ("a.count += g(a)", "a[b] = c", "print(a)", "break", 'assert a, "text"', "return")
        ],
    }
    expected = {operator: [python(BODY.replace(*pair)) for pair in pairs] for operator, pairs in replaced.items()}
    assert changed(python(BODY)) == expected


def test_annotations_decorators_and_docstrings_are_not_mutated():
    source = '''
    """Text: 1 < 2."""
    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        import x

    @cache(maxsize=1)
    class A(B[1], c=2):
        """1 < 2."""

        name: Annotated[int, 1 < 2]

        @cache(maxsize=1)
        def f(self, x: int | None) -> int | None:
            """1 < 2."""
    '''
    assert mutants_of("x.py", textwrap.dedent(source)) == []


def test_all_python_mutants_parse():
    for name in ("request/call.py", "request/layout.py"):
        source = (ROOT / "src" / "spattn" / name).read_text(encoding="utf-8")
        before = ast.dump(ast.parse(source))
        for mutant in mutants_of(name, source):
            assert ast.dump(ast.parse(mutant.apply(source))) != before, mutant


def test_columns_count_characters():
    source = 'x = "− − −", a < b\n'
    assert changed(source) == {"boundary": [source.replace("<", "<=")]}


CPP = """
#include <vector>
#define LINES(a) (a + 1)
// 1 < 2
template <int N, class T = Vec<float, 16>>
struct Rows {
  static_assert(N < 64);
  int64_t count(const T* x, std::array<int, 4>&& y) const {
    if (first < N && !x) return static_cast<int>(2.5f);
    total -= x[i] * 3;
    for (int i = first; i != last; ++i) add(i, "1 < 2");
    const int own = std::min(total, other), min = total;
    return own;
  }
};
"""


def test_operators_in_cpp():
    replaced = {
        "boundary": [("first < N", "first <= N")],
        "equal": [("i != last", "i == last")],
        "plus": [("total -= x", "total += x")],
        "times": [("x[i] * 3", "x[i] / 3")],
        "logic": [("N && !x", "N || !x")],
        "not": [("!x", "x")],
        "constant": [("2.5f", "3.5f"), ("* 3", "* 4")],
        "extreme": [("std::min", "std::max")],
        "guard": [("first < N && !x", "false && (first < N && !x)")],
        "statement": [("total -= x[i] * 3;", ";"), ('add(i, "1 < 2");', ";")],
    }
    expected = {operator: [CPP.replace(*pair) for pair in pairs] for operator, pairs in replaced.items()}
    assert changed(CPP, "x.h") == expected
    assert {mutant.function for mutant in mutants_of("x.cuh", CPP)} == {"Rows::count"}


CYTHON = '''
from libc.stdint cimport int64_t  # 1 < 2
cdef class Rows:
    """1 < 2"""
    cdef int64_t sum(self, const int64_t[:, ::1] x, int64_t* own) except -1 nogil:
        cdef int64_t n = <int64_t>x.size
        if not n or n < x.shape[1]:
            raise ValueError(f"{n + 1}")
        own[n] += n * n
        return max(n, 7)

def total(x):
    return x is not None
'''


def test_operators_in_cython():
    replaced = {
        "boundary": [("n < x", "n <= x")],
        "plus": [("own[n] += n", "own[n] -= n")],
        "times": [("n * n", "n // n")],
        "logic": [("n or n", "n and n")],
        "not": [("not n", " n"), ("is not None", "is  None")],
        "constant": [("except -1", "except -2"), ("shape[1]", "shape[2]"), ("7", "8")],
        "extreme": [("max(", "min(")],
        "guard": [("not n or n < x.shape[1]:", "False:")],
        "statement": [("own[n] += n * n", "pass")],
    }
    expected = {operator: [CYTHON.replace(*pair) for pair in pairs] for operator, pairs in replaced.items()}
    assert changed(CYTHON, "x.pyx") == expected
    assert {mutant.function for mutant in mutants_of("x.pyx", CYTHON)} == {"Rows.sum", "total"}


def test_names_do_not_depend_on_edits_elsewhere():
    one = "def one(x):\n    return x < 1 and x < 2\n"
    two = "class Two:\n    def two(self):\n        def inner():\n            return 1 < 2\n        return inner\n"
    before = {mutant.identity for mutant in mutants_of("a.py", one + two)}
    assert {"a.py::one boundary 2", "a.py::Two.two.inner boundary 1", "a.py::Two.two return 1"} <= before
    edited = "# comment: 1 < 2\n" + two + "def new(x):\n    return not x\n" + one
    after = {mutant.identity for mutant in mutants_of("a.py", edited)}
    assert after - before == {"a.py::new not 1", "a.py::new return 1"} and before <= after


def test_a_draw_does_not_depend_on_edits_elsewhere():
    source = "".join(f"def f{n}(x):\n    return x < {n}\n" for n in range(40))
    drawn = mutants.draw(mutants_of("a.py", source), 20, seed=1)
    assert len(set(drawn)) == 20 and drawn != mutants.draw(mutants_of("a.py", source), 20, seed=2)
    edited = {mutant.identity for mutant in mutants.draw(mutants_of("a.py", "import x\n" + source), 20, seed=1)}
    assert edited == {mutant.identity for mutant in drawn}


@pytest.fixture
def selection(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "b.py").touch()
    (tmp_path / "src" / "_a.py").write_text("def one(x):\n    return x < 1\ndef example(x):\n    return x < 1\n")
    rules = tmp_path / "mutants.toml"
    skipped = 'skipped_functions = ["example"]\nskipped_files = ["*/b.py"]\n'
    rules.write_text(skipped + '[[rule]]\nfiles = ["src/*.py"]\ntests = ["tests/test_{name}.py"]\n')
    return mutants.DynamicMask(rules, tmp_path)


def test_rules_select_files_and_functions(selection):
    assert selection.files("python") == ["src/_a.py"] and selection.files("gpu") == []
    assert {mutant.function for mutant in selection.mutants("src/_a.py")} == {"one"}
    rule = mutants.Rule(["src/*"], ["tests/test_{name}.py", "tests/plan", "tests/no_such"])
    assert rule.tests_of("src/_mutator.py") == ["tests/test_mutator.py", "tests/plan"]


def test_survivors_that_do_not_exist_are_stale(selection):
    listed = {
        "src/_a.py": {"one boundary 1": "", "one boundary 2": "", "example boundary 1": ""},
        "src/gone.py": {"one boundary 1": ""},
    }
    assert selection.stale(listed) == [
        "src/_a.py::one boundary 2",
        "src/_a.py::example boundary 1",
        "src/gone.py::one boundary 1",
    ]


def test_the_committed_lists_agree_with_the_sources():
    selection, survivors = mutants.DynamicMask(), mutants.read_survivors()
    assert selection.stale(survivors) == []
    assert all(rule.tests_of("x.py") for rule in selection.rules)
    for rule in selection.rules:
        assert any(rule.matches(str(path.relative_to(ROOT))) for path in (ROOT / "src").rglob("*.*")), rule.files
    kinds = "equivalent: ", "performance: ", "message: ", "unreachable: ", "open: "
    assert [reason for places in survivors.values() for reason in places.values() if not reason.startswith(kinds)] == []
