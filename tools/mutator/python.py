"""Mutants of Python, by its syntax tree."""

from __future__ import annotations

import ast
import io
import itertools
import tokenize
from bisect import bisect_left

from .operators import OTHER, TIMES, Site

__all__ = ["sites"]


def sites(source: str) -> list[Site]:
    visitor = _Python(source)
    visitor.visit(ast.parse(source))
    return visitor.sites


def _is_sequence(node: ast.AST) -> bool:
    """A string, list or tuple, which has no - and no //."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


class _Python(ast.NodeVisitor):
    def __init__(self, source: str):
        self.sites: list[Site] = []
        self.functions: list[str] = []
        self.lines = source.split("\n")
        self.starts = [0, *itertools.accumulate(len(line) + 1 for line in self.lines)]
        skipped = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT
        self.tokens = [
            (self.place(*token.start), self.place(*token.end), token.string)
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type not in skipped
        ]
        self.begins = [begin for begin, _, _ in self.tokens]

    def place(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def of_bytes(self, line: int, column: int) -> int:
        """The place of a column in bytes of UTF-8, as ast counts."""
        return self.place(line, len(self.lines[line - 1].encode()[:column].decode()))

    def start(self, node: ast.AST) -> int:
        return self.of_bytes(node.lineno, node.col_offset)

    def end(self, node: ast.AST) -> int:
        return self.of_bytes(node.end_lineno, node.end_col_offset)

    def add(self, operator: str, start: int, end: int, new: str) -> None:
        self.sites.append(Site(".".join(self.functions) or "<module>", operator, start, end, new))

    def replace(self, operator: str, node: ast.AST, new: str) -> None:
        self.add(operator, self.start(node), self.end(node), new)

    def swap(self, begin: int, end: int) -> None:
        """Mutates the operator between two operands."""
        tokens = self.tokens[bisect_left(self.begins, begin) : bisect_left(self.begins, end)]
        words = [token for token in tokens if token[2] not in "()"]
        if not words:
            return
        text = " ".join(word for _, _, word in words)
        if text in OTHER:
            operator, new = OTHER[text]
        elif text in TIMES["Python"]:
            operator, new = "times", TIMES["Python"][text]
        else:
            return
        self.add(operator, words[0][0], words[-1][1], new)

    # Names of functions; what is left out.

    def enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.functions.append(node.name)
        if not isinstance(node, ast.ClassDef):
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if default is not None:
                    self.visit(default)
        for child in node.body:
            self.visit(child)
        self.functions.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = enter

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.replace("statement", node, "pass")
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.replace("statement", node, "pass")
        self.visit(node.test)

    # Operators.

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, right in zip(operands, operands[1:], strict=False):
            self.swap(self.end(left), self.start(right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.swap(self.end(left), self.start(right))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not _is_sequence(node.left) and not _is_sequence(node.right):
            self.swap(self.end(node.left), self.start(node.right))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.Invert):
            start = self.start(node)
            self.add("not", start, start + (3 if isinstance(node.op, ast.Not) else 1), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("flag", node, str(not node.value))
        elif isinstance(node.value, int | float) and node.value + 1 != node.value:
            self.replace("constant", node, repr(node.value + 1))

    def named(self, name: str, end: int) -> None:
        if name in OTHER and OTHER[name][0] == "extreme":
            self.add("extreme", end - len(name), end, OTHER[name][1])

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.named(node.id, self.end(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.named(node.attr, self.end(node))
        self.visit(node.value)

    # Statements.

    def guard(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            return
        if not isinstance(node.test, ast.Constant):
            self.replace("guard", node.test, "False")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = guard

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.replace("statement", node, "pass")
        elif not isinstance(node.value, ast.Constant):
            self.replace("return", node.value, "None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if keyword.arg not in (None, "strict"):  # zip(strict=True) is an assertion
                self.keyword(keyword)
        self.generic_visit(node)

    def keyword(self, node: ast.keyword) -> None:
        start, end = self.start(node), self.end(node)
        before, after = self.tokens[bisect_left(self.begins, start) - 1], self.tokens[bisect_left(self.begins, end)]
        if after[2] == ",":
            self.add("keyword", start, after[1], "")
        elif before[2] == ",":
            self.add("keyword", before[0], end, "")
        else:
            self.add("keyword", start, end, "")

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Call):  # a docstring, an ellipsis, a yield
            if not isinstance(node.value, ast.Constant):
                self.generic_visit(node)
            return
        self.replace("statement", node, "pass")
        if ast.unparse(node.value.func) != "warnings.warn":
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("statement", node, "pass")
        self.swap(self.end(node.target), self.start(node.value))
        self.generic_visit(node)

    def dropped(self, node: ast.Delete | ast.Break | ast.Continue) -> None:
        self.replace("statement", node, "pass")
        self.generic_visit(node)

    visit_Delete = visit_Break = visit_Continue = dropped
