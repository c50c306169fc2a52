"""Random score functions: the text of a Python expression, and arrays that it captures."""

import numpy as np

import spattn.score as functions

HEADS, REACH = 3, 4
UNARY = ("-{}", "abs({})", "tanh({})", "sigmoid({})", "exp(-abs({}))", "log(1.0 + abs({}))", "sqrt(0.25 + abs({}))")
BINARY = ("{} + {}", "{} - {}", "{} * {}", "{} / (1.0 + abs({}))", "minimum({}, {})", "maximum({}, {})")
BINARY += ("{} // (0.5 + abs({}))", "{} % (0.5 + abs({}))", "{} / {}")
FUNCTIONS = {name: getattr(functions, name) for name in functions.__all__}
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


class Tree:
    """A random expression of `depth` levels, drawn with a seed."""

    def __init__(self, seed, depth=4):
        self._random = np.random.default_rng(seed)
        draw = self._random.normal
        self.variables = {
            "slopes": draw(size=HEADS),
            "relative": draw(size=(HEADS, 2 * REACH + 1)),
            "grid": draw(size=(4, 5)),
            "scalar": draw(size=()),
            "number": float(draw()),
            "flags": draw(size=7) > 0,
            "buckets": self._random.integers(-4, 4, 9),
        }
        self.text = self._float(depth)
        self._code = compile(f"lambda score, b, h, q, k: {self.text}", "tree", "eval")
        self.function = self.with_variables({})

    def with_variables(self, changed):
        """The function with other arrays or numbers."""
        return eval(self._code, FUNCTIONS | self.variables | changed)

    def _one(self, of):
        return of[self._random.integers(len(of))]

    def _float(self, depth):
        if depth == 0:
            return self._one(
                ("score", "score", "1.5", "-0.75", "2.0", "number", "scalar", "slopes[h]", "grid[q % 4, k % 5]")
                + (f"relative[h, minimum(maximum(k - q, -{REACH}), {REACH}) + {REACH}]", "grid[b, buckets[k % 9]]")
            )
        kind = self._random.integers(8)
        if kind < 2:
            return self._one(UNARY).format(f"({self._float(depth - 1)})")
        if kind < 6:
            return self._one(BINARY).format(*(f"({self._float(depth - 1)})" for _ in range(2)))
        if kind == 6:
            return f"({self._integer(depth - 1)}) * ({self._float(depth - 1)})"
        return f"where({self._truth(depth - 1)}, {self._float(depth - 1)}, {self._float(depth - 1)})"

    def _integer(self, depth):
        if depth == 0:
            return self._one(("q", "k", "h", "b", "2", "-3", "buckets[q % 9]", "(q - k)"))
        form = self._one(("{} + {}", "{} - {}", "{} * {}", "minimum({}, {})", "maximum({}, {})", "{} // 3", "{} % -5"))
        return form.format(*(f"({self._integer(depth - 1)})" for _ in range(2)))

    def _truth(self, depth):
        kind = self._random.integers(5)
        if depth == 0 or kind == 0:
            return f"({self._integer(depth and 1)} {self._one(COMPARISONS)} {self._one('qkhb')})"
        if kind == 1:
            return f"(({self._float(depth - 1)}) {self._one(COMPARISONS)} score)"
        if kind == 2:
            return f"(~{self._truth(depth - 1)})"
        if kind == 3:
            return "flags[q % 7]"
        return f"({self._truth(depth - 1)} {self._one(('&', '|', '^'))} {self._truth(depth - 1)})"


def points(seed, count=40):
    """Arrays for the inputs of score functions."""
    random = np.random.default_rng(seed)
    of = {"score": random.normal(size=count), "b": random.integers(0, 3, count), "h": random.integers(0, HEADS, count)}
    return of | {name: random.integers(0, 12, count) for name in ("q", "k")}
