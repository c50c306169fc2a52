"""Finds the patterns that an example builds, and compares each with its entry in allowed_pairs.py."""

import ast
import types

import numpy as np

from spattn.patterns import Pattern, QueriesAt

from .allowed_pairs import ALLOWED, Asked

_COMPARED_WHOLE = 1 << 22  # cells; of larger ones the check compares a sample of the rows


def check_example(page, source, space):
    """Checks the patterns of an example of `page` that has just run in the namespace `space`."""
    for text, pattern in built(source, space):
        check(page, text, pattern, space)


def check(page, text, pattern, space, lengths=None):
    """AssertionError unless `pattern` allows the pairs of its entry, which has these lengths if any are given."""
    assert text in ALLOWED.get(page, {}), f"{page}: add the pairs that {text} allows to docs/allowed_pairs.py"
    expected = ALLOWED[page][text]
    q_len, kv_len = expected.lengths
    assert lengths in (None, expected.lengths), f"{page}: {text} has the lengths {lengths}"
    for own, number in zip(pattern.sizes(), (expected.batch, expected.heads), strict=True):
        assert own <= number, f"{page}: {text} tells {pattern.sizes()} batch entries and heads apart"
    rows = np.arange(q_len)
    if q_len * kv_len > _COMPARED_WHOLE:
        assert q_len == kv_len
        rows = np.unique(np.r_[:100, np.linspace(0, q_len - 1, 20, dtype=int), q_len - 20 : q_len])
        pattern = QueriesAt(pattern, rows)
    for b, h in np.ndindex(expected.batch, expected.heads):
        asked = Asked(b, h, rows[:, None] + kv_len - q_len, np.arange(kv_len), space)
        differ = np.argwhere(
            pattern.index_set(len(rows), kv_len, batch=b, head=h).to_dense() != expected.allowed(asked)
        )
        first = [(b, h, int(rows[n]), int(k)) for n, k in differ[:3]]
        assert not first, (
            f"{page}: {text}: wrong for (batch entry, head, row, key) in {first}, {len(differ)} pairs in all"
        )


def built(source, space):
    """(text, pattern) of each pattern that an example has built."""
    return list(_built(ast.parse(source), space, set()))


def _built(node, space, parameters):
    """Those of a part of the example, but for expressions with parameters of the functions around them."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        value = space.get(node.targets[0].id)
        if isinstance(value, Pattern):
            yield ast.unparse(node.value), value
            return
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        parameters = parameters | {parameter.arg for parameter in node.args.args}
    if _builds(node, space):
        if parameters & {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}:
            return
        value = eval(ast.unparse(node), space)
        if isinstance(value, Pattern):
            yield ast.unparse(node), value
            return
    for child in ast.iter_child_nodes(node):
        yield from _built(child, space, parameters)


def _builds(node, space):
    """Whether an expression calls a pattern's class or a function of spattn.patterns, or joins such calls."""
    if isinstance(node, ast.BinOp):
        return _builds(node.left, space) or _builds(node.right, space)
    if isinstance(node, ast.UnaryOp):
        return _builds(node.operand, space)
    if not isinstance(node, ast.Call):
        return False
    first, *rest = ast.unparse(node.func).split(".")
    called = space.get(first)
    for name in rest:
        called = getattr(called, name, None)
    if isinstance(called, type):
        return issubclass(called, Pattern)
    return isinstance(called, types.FunctionType | types.MethodType) and called.__module__.startswith("spattn.patterns")
