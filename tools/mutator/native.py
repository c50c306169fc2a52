"""Mutants of Cython, C++ and CUDA, by their tokens.

A binary operator has white space on both sides, as clang-format and cython-lint demand; pointers, references and
template brackets have not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .operators import OTHER, TIMES, Site

__all__ = ["sites"]

_NUMBER = r"\.?\d(?:[eEpP][+-]\d|['\w.])*"
_SIGNS = r"<<<|>>>|<<=|>>=|->\*?|\.\.\.|::|\+\+|--|&&|\|\||//=?|[<>=!+\-*/%&|^]=?|[()\[\]{};,?:.~@]"
_CPP = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<hash>^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<string>R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
    |(?P<number>"""
    + _NUMBER
    + r")|(?P<word>[^\W\d]\w*)|(?P<sign>"
    + _SIGNS
    + ")",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_CYTHON = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<string>\w{0,2}\"{3}.*?\"{3}|\b[rbfuRBFU]{0,2}"(?:\\.|[^"\\\n])*"|\b[rbfuRBFU]{0,2}'(?:\\.|[^'\\\n])*')
    |(?P<number>"""
    + _NUMBER
    + r")|(?P<word>[^\W\d]\w*)|(?P<sign>"
    + _SIGNS
    + ")",
    re.DOTALL | re.VERBOSE,
)
_CPP_WORDS = set(
    "alignas asm auto break case catch class const constexpr continue default delete do else enum explicit extern for "
    "goto if inline namespace new operator return sizeof static static_assert struct switch template throw try typedef "
    "typename union using virtual volatile while".split()
)
_CYTHON_WORDS = set(
    "cdef cimport class cpdef ctypedef def elif else except finally for from if import raise return try while with "
    "yield".split()
)
_BEFORE_BRACKETS = set("__launch_bounds__ __attribute__ __cluster_dims__ alignas decltype noexcept requires".split())
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int
    spaced: bool  # white space on both sides


def _tokens(source: str, cython: bool) -> list[_Token]:
    found = []
    for match in (_CYTHON if cython else _CPP).finditer(source):
        kind = match.lastgroup if match.lastgroup != "mark" else "string"
        if kind not in ("comment", "hash"):
            around = source[match.start() - 1 : match.start()] + source[match.end() : match.end() + 1]
            found.append(_Token(kind, match.group(), match.start(), match.end(), around.isspace() and len(around) == 2))
    return found


def sites(source: str, cython: bool) -> Iterator[Site]:
    tokens = _tokens(source, cython)
    skipped = _skipped(source, tokens, cython)
    functions = _cython_functions(source, tokens) if cython else _cpp_functions(tokens)
    for at, token in enumerate(tokens):
        edit = None if at in skipped else _edit_of(token, "Python" if cython else "C++")
        if edit is not None and (edit[0] != "extreme" or tokens[at + 1].text == "("):
            yield Site(functions[at], *edit)
    statements = _cython_statements(source, tokens) if cython else _cpp_statements(source, tokens)
    for at, *site in statements:
        if at not in skipped and not functions[at].startswith("<"):
            yield Site(functions[at], *site)


def _edit_of(token: _Token, language: str) -> tuple[str, int, int, str] | None:
    """(operator, start, end, new) of one token; None if no operator mutates it."""
    text = token.text
    if token.kind == "number":
        number = re.fullmatch(r"(\d[\d']*|0[xX][\da-fA-F']+)([uUlL]*)", text)
        if number and not re.fullmatch(r"0\d+", number[1]):
            return "constant", token.start, token.end, f"{int(number[1].replace(chr(39), ''), 0) + 1}{number[2]}"
        real = re.fullmatch(r"(\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(f?)", text)
        if real and float(real[1]) + 1 != float(real[1]):
            return "constant", token.start, token.end, f"{float(real[1]) + 1!r}{real[2]}"
        return None
    if text in ("!", "~", "not"):
        return "not", token.start, token.end, ""
    if text in TIMES[language]:
        return ("times", token.start, token.end, TIMES[language][text]) if token.spaced else None
    if text in OTHER and text not in ("is", "in"):
        operator, new = OTHER[text]
        if token.kind == "word" or token.spaced:
            return operator, token.start, token.end, new
    return None


def _closing(tokens: list[_Token], at: int) -> int:
    """The token that closes the bracket at `at`; the last token if there is none."""
    depth = 0
    for n in range(at, len(tokens)):
        depth += (tokens[n].text in _CLOSING) - (tokens[n].text in _CLOSING.values())
        if not depth:
            return n
    return len(tokens) - 1


def _skipped(source: str, tokens: list[_Token], cython: bool) -> set[int]:
    """Tokens that are not mutated: template arguments, casts, attributes, asm, static_assert; imports, raise."""
    skipped: set[int] = set()
    for at, token in enumerate(tokens):
        if token.text == "<" and not token.spaced:
            skipped.update(_template(tokens, at))
        elif token.text == "static_assert":
            skipped.update(range(at, _closing(tokens, at + 1) + 1))
        elif token.text == "asm":
            skipped.update(range(at, next(n for n in range(at, len(tokens)) if tokens[n].text == ";")))
        elif token.text == "[" and at + 1 < len(tokens) and tokens[at + 1].text == "[" and not cython:
            skipped.update(range(at, _closing(tokens, at) + 1))
        elif token.text == "operator" and not cython or token.text == "::" and cython:
            skipped.add(at + 1)
    if cython:
        for line in _lines(source, tokens):
            words = [tokens[n].text for n in line]
            if words[0] in ("cimport", "import", "from", "ctypedef", "raise", "@") or "extern" in words[:2]:
                skipped.update(line)
    return skipped


def _template(tokens: list[_Token], at: int) -> range:
    """The template arguments or the cast that start at `at`; empty if it is an operator."""
    depth, n = 0, at
    while n < len(tokens) and tokens[n].text not in (";", "{", "}"):
        text = tokens[n].text
        if text in ("(", "["):
            n = _closing(tokens, n)
        elif text in (")", "]"):
            break
        elif text == "<" and not tokens[n].spaced:
            depth += 1
        elif text in (">", ">>>") and not tokens[n].spaced:
            depth -= len(text)
        if depth <= 0:
            return range(at, n + 1)
        n += 1
    return range(at, at + 1)


def _cpp_functions(tokens: list[_Token]) -> list[str]:
    """The qualified name of the function, or else of the class, that encloses each token."""
    names: list[str] = []
    scopes: list[tuple[str, bool]] = []  # (name, whether it is a function) of each open brace
    head: list[int] = []  # tokens since the last ; { or }
    for at, token in enumerate(tokens):
        names.append("::".join(name for name, _ in scopes if name) or "<file>")
        if token.text == "{":
            scopes.append(("", True) if any(inside for _, inside in scopes) else _scope(tokens, head))
        elif token.text == "}" and scopes:
            scopes.pop()
        if token.text in ("{", "}", ";"):
            head = []
        else:
            head.append(at)
    return names


def _scope(tokens: list[_Token], head: list[int]) -> tuple[str, bool]:
    """The scope that a brace opens after these tokens."""
    if head and tokens[head[0]].text == "template":
        head = head[1 + len(_template(tokens, head[1])) :]
    words = [tokens[at].text for at in head]
    if "namespace" in words or words[:1] == ["extern"] and len(words) == 2:
        return "", False
    for n, at in enumerate(head[1:], 1):
        if words[n] == "(" and tokens[at - 1].kind == "word" and words[n - 1] not in _BEFORE_BRACKETS:
            first = n - 1
            while first >= 2 and words[first - 1] == "::" and tokens[head[first - 2]].kind == "word":
                first -= 2
            return "".join(words[first:n]), True
        if words[n] == "(" and "operator" in words[:n]:
            return "".join(words[words.index("operator") : n]), True
    for n, word in enumerate(words):
        if word in ("struct", "class", "union", "enum") and "=" not in words:
            named = (
                text for text in words[n + 1 :] if text.isidentifier() and text not in ("class", "alignas", "final")
            )
            return next(named, ""), False
    return "", False


def _cpp_statements(source: str, tokens: list[_Token]) -> Iterator[tuple[int, str, int, int, str]]:
    """(token, operator, start, end, new) of conditions and of statements."""
    of_headers = {  # parentheses after which a statement begins
        _closing(tokens, at + 1)
        for at, token in enumerate(tokens[:-1])
        if token.text in ("if", "for", "while", "constexpr") and tokens[at + 1].text == "("
    }
    for at, token in enumerate(tokens):
        before = tokens[at - 1].text if at else ";"
        if token.text == "if" and at + 2 < len(tokens):
            opening = at + 2 if tokens[at + 1].text == "constexpr" else at + 1
            closing = _closing(tokens, opening)
            inside = {tokens[n].text for n in range(opening, closing)}
            if tokens[opening].text == "(" and not inside & {";", "="}:
                start, end = tokens[opening].end, tokens[closing].start
                yield at, "guard", start, end, f"false && ({source[start:end]})"
        elif token.kind == "word" and (before in (";", "{", "}", "else") or at - 1 in of_headers):
            if token.text in ("break", "continue") and tokens[at + 1].text == ";":
                yield at, "statement", token.start, token.end, ""
            elif token.text not in _CPP_WORDS:
                end = _cpp_statement_end(tokens, at)
                if end is not None:
                    yield at, "statement", token.start, tokens[end].start, ""


def _cpp_statement_end(tokens: list[_Token], at: int) -> int | None:
    """The semicolon of a call or assignment that starts at `at`; None for a declaration or anything else."""
    n, called, assigned = at + 1, False, False
    while n < len(tokens):
        text = tokens[n].text
        if text == ";":
            return n if called or assigned else None
        if text in ("(", "["):
            called |= text == "("
            n = _closing(tokens, n)
        elif text in ("=", "+=", "-=", "*=", "/=", "|=", "&=", "^=", "<<=", ">>="):
            assigned = True
        elif text in ("{", "}", ":", "?"):
            return None
        elif not assigned and text not in (".", "->", "::"):
            if tokens[n].kind != "word" or tokens[n - 1].kind == "word":  # of an expression; a declaration
                return None
        n += 1
    return None


def _lines(source: str, tokens: list[_Token]) -> Iterator[list[int]]:
    """The logical lines of Cython, as tokens."""
    line: list[int] = []
    depth = 0
    for at, token in enumerate(tokens):
        gap = source[tokens[at - 1].end : token.start] if at else "\n"
        if depth == 0 and "\n" in gap and not gap.rstrip(" ").endswith("\\\n") and line:
            yield line
            line = []
        depth += (token.text in _CLOSING) - (token.text in _CLOSING.values())
        line.append(at)
    if line:
        yield line


def _cython_functions(source: str, tokens: list[_Token]) -> list[str]:
    names = [""] * len(tokens)
    scopes: list[tuple[int, str]] = []  # (indentation, name)
    for line in _lines(source, tokens):
        first = tokens[line[0]].start
        indent = first - source.rfind("\n", 0, first) - 1
        while scopes and scopes[-1][0] >= indent:
            scopes.pop()
        head = " ".join(tokens[at].text for at in line)
        named = re.match(r"(?:cdef )?class (\w+)|(?:def|cp?def)\b[^=(]*?(\w+) \(", head)
        if named and head.endswith(":"):
            scopes.append((indent, named[1] or named[2]))
        for at in line:
            names[at] = ".".join(name for _, name in scopes) or "<module>"
    return names


def _cython_statements(source: str, tokens: list[_Token]) -> Iterator[tuple[int, str, int, int, str]]:
    for line in _lines(source, tokens):
        first, texts = tokens[line[0]], [tokens[at].text for at in line]
        if texts[0] in ("if", "elif", "while") and len(line) > 2:
            depth = 0
            for at in line[1:]:
                depth += (tokens[at].text in _CLOSING) - (tokens[at].text in _CLOSING.values())
                if depth == 0 and tokens[at].text == ":":
                    yield line[0], "guard", tokens[line[1]].start, tokens[at - 1].end, "False"
                    break
        elif texts in (["break"], ["continue"]):
            yield line[0], "statement", first.start, first.end, "pass"
        elif first.kind == "word" and texts[0] not in _CYTHON_WORDS and texts[1:] and ":" not in texts[:1]:
            assigned = set(texts) & {"+=", "-=", "*=", "//=", "/=", "|=", "&="}
            if assigned or texts[1] in (".", "[", "("):
                yield line[0], "statement", first.start, tokens[line[-1]].end, "pass"
