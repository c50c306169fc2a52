"""Random score functions, as operands of calls, and what NumPy computes of them."""

from __future__ import annotations

import numpy as np

from spattn.request.score import ScoreOperands, TableType
from spattn.score.evaluate import evaluate
from spattn.score.graph import BOOL, FLOAT, INT, Builder, Graph
from spattn.score.program import program_of
from spattn.score.tracing import trace

_FLOAT_TABLES = ("float32", "float64", "float16")


def operands(function, wanted=True, sinks=None):
    """The operands of a traced function; `wanted`: gradients of its floating arrays."""
    found = trace(function)
    return _operands(program_of(found.graph), found.parameters, found.tables, wanted, sinks)


def _operands(program, parameters, tables, wanted, sinks=None):
    types = tuple(type_of(x) for x in tables)
    floats = tuple(bool(wanted) and "float" in one.dtype for one in types)
    return ScoreOperands(program, tuple(parameters), tuple(tables), types, sinks, floats)


def type_of(x):
    if hasattr(x, "data_ptr"):
        return TableType(str(x.dtype).removeprefix("torch."), tuple(x.shape), tuple(x.stride()))
    return TableType(str(x.dtype), x.shape, tuple(s // x.itemsize for s in x.strides))


def random_score(seed, wanted=True, smooth=False):
    """A random expression tree on top of the score, with captured numbers and arrays.

    A `smooth` one has no jump or kink in the score, where float32 and float64 may differ by more than rounding.
    """
    return _Tree(np.random.default_rng(seed), smooth).score(wanted)


class _Tree:
    def __init__(self, rng, smooth):
        self.rng, self.build, self.parameters, self.tables = rng, Builder(), [], []
        self.smooth, self.scored = smooth, True

    def score(self, wanted):
        build = self.build
        score, tree = build.input("score"), self.float(4)
        bounded = build.apply("mul", self.number(1.5), build.apply("tanh", tree))
        kept = build.apply("mul", build.constant(0.75), score)
        result = build.apply("add", kept, bounded)
        if self.rng.random() < 0.3:
            cap = self.table(1)
            result = build.apply("mul", cap, build.apply("tanh", build.apply("div", result, cap)))
        graph = Graph(tuple(build.operations), (result,)).only([result])
        return self.used(graph, wanted)

    def used(self, graph, wanted):
        """Renumber the parameters and tables that are left."""
        parameters = sorted({int(op.number) for op in graph.operations if op.name == "parameter"})
        tables = sorted({int(op.number) for op in graph.operations if op.name == "look_up"})
        new = {"parameter": parameters.index, "look_up": tables.index}
        renumbered = tuple(
            op._replace(number=new[op.name](int(op.number))) if op.name in new else op for op in graph.operations
        )
        return _operands(
            program_of(graph._replace(operations=renumbered)),
            [self.parameters[n] for n in parameters],
            [self.tables[n] for n in tables],
            wanted,
        )

    def pick(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def number(self, value):
        """A constant, or a captured number."""
        if self.rng.random() < 0.5:
            return self.build.constant(value)
        self.parameters.append(value)
        return self.build.parameter(len(self.parameters) - 1, INT if isinstance(value, int) else FLOAT)

    def float(self, depth):
        build, rng = self.build, self.rng
        if depth <= 0 or rng.random() < 0.1:
            return self.pick(
                lambda: build.input("score") if self.scored else self.number(0.25),
                lambda: build.apply("mul", build.constant(0.03), build.to_float(self.int(1))),
                lambda: self.number(float(np.round(rng.normal(), 2))),
                lambda: self.table(int(rng.integers(0, 4))),
                lambda: self.table(int(rng.integers(1, 3))),
            )()
        name = self.pick("add", "sub", "mul", "div", "minimum", "maximum", "abs", "neg", "where", "where")
        name = name if rng.random() < 0.6 else self.pick("exp", "log", "tanh", "sigmoid", "sqrt", "pow")
        before = self.scored
        self.scored = before and not (self.smooth and name in ("minimum", "maximum", "abs"))
        try:
            return self.of(name, depth)
        finally:
            self.scored = before

    def of(self, name, depth):
        """An operation on random operands."""
        build = self.build
        a = self.float(depth - 1)
        above = build.apply("add", build.constant(0.5), build.apply("mul", a, a))
        if name in ("add", "sub", "mul", "minimum", "maximum"):
            return build.apply(name, a, self.float(depth - 1))
        if name == "div":
            return build.apply(name, self.float(depth - 1), above)
        if name == "where":
            return build.apply(name, self.bool(depth - 1), a, self.float(depth - 1))
        if name in ("log", "sqrt"):
            return build.apply(name, above)
        if name == "pow":
            return build.apply(name, above, self.number(0.5))
        return build.apply(name, build.apply("neg", above) if name == "exp" else a)

    def int(self, depth):
        build = self.build
        if depth <= 0:
            kinds = (
                lambda: build.input(self.pick("b", "h", "q", "k", "offset")),
                lambda: build.input(self.pick("q", "k")),
            )
            return self.pick(*kinds, lambda: self.number(int(self.rng.integers(-9, 9))), self.distance)()
        name = self.pick("add", "sub", "mul", "floordiv", "mod", "minimum", "maximum", "abs", "table")
        if name == "table":
            table = self.rng.integers(-4, 9, self.rng.integers(1, 9)).astype(
                self.pick("int64", "int32", "int8", "uint8")
            )
            return self.look_up(table, INT)
        a = self.int(depth - 1)
        return build.apply(name, a) if name == "abs" else build.apply(name, a, self.int(depth - 1))

    def distance(self):
        return self.build.apply("sub", *map(self.build.input, self.pick("qk", "kq")))

    def bool(self, depth):
        build = self.build
        name = self.pick("eq", "ne", "lt", "le", "and", "or", "xor", "not", "table", "float")
        if name == "table":
            return self.look_up(self.rng.random((3, 4)) < 0.5, BOOL)
        if name in ("and", "or", "xor", "not"):
            own = [self.bool(depth - 1) for _ in range(1 if name == "not" else 2)]
            return build.apply(name, *own)
        if name == "float" and self.scored and not self.smooth:
            return build.apply("lt", self.float(min(depth, 1)), self.float(0))
        name = "lt" if name == "float" else name
        return build.apply(name, self.int(1), self.int(1))

    def table(self, axes):
        """An element of an array of floats, of any strides."""
        table = self.rng.normal(0.5, 1, self.rng.integers(1, 12, axes)).astype(self.pick(*_FLOAT_TABLES))
        if axes == 1:
            table = np.abs(table) + table.dtype.type(0.5)
        if axes > 1:
            kinds = lambda x: x.swapaxes(0, 1), lambda x: x[..., ::2], lambda x: np.broadcast_to(x[:1], x.shape)
            table = self.pick(lambda x: x, *kinds)(table)
        return self.look_up(table, FLOAT)

    def look_up(self, table, dtype):
        """At indices inside the array, counted from its start or end."""
        build, indices = self.build, []
        for size in table.shape:
            x = self.pick(lambda: self.int(int(self.rng.integers(0, 2))), self.distance, lambda: build.input("h"))()
            index = build.apply("mod", x, build.constant(int(size)))
            indices.append(index if self.rng.random() < 0.7 else build.apply("sub", index, build.constant(int(size))))
        self.tables.append(table)
        return build.look_up(len(self.tables) - 1, dtype, indices)


def evaluated(score, inputs, dtype=np.float64):
    """The value of each pair, its derivative, and (table, indices, derivative) of each use of an array."""
    program = score.program
    uses = [use for use in program.captured if use.name == "look_up"]
    indices = [x for use in uses for x in use.indices]
    derivatives = [use.derivative for use in uses]
    graph = program.graph._replace(results=(*program.graph.results[:2], *derivatives, *indices))
    tables = [np.asarray(x) for x in score.tables]
    shape = np.broadcast_shapes(*(np.shape(x) for x in inputs.values()))
    found = [np.broadcast_to(x, shape) for x in evaluate(graph, inputs, score.parameters, tables, dtype)]
    rest = iter(found[2 + len(uses) :])
    each = [
        (use.number, tuple(np.asarray(next(rest)) for _ in use.indices), derivative)
        for use, derivative in zip(uses, found[2:], strict=False)
    ]
    return found[0], found[1], each


def table_gradients(score, uses, gradient):
    """Sums of contributions by element of each array, in float64; NaN and infinities as they come."""
    sums = [np.zeros(one.shape) for one in score.types]
    gradient = np.asarray(gradient)
    for number, indices, derivative in uses:
        contribution = np.where(gradient == 0, 0, gradient * np.where(gradient == 0, 0, derivative))
        if indices:
            np.add.at(sums[number], indices, contribution.astype(np.float64))
        else:
            sums[number] += contribution.sum(dtype=np.float64)
    return sums


def positions(heads, batch, q_len, kv_len):
    """Inputs of a score function, as arrays that broadcast."""
    offset = kv_len - q_len
    return {
        "b": np.arange(batch)[:, None, None, None],
        "h": np.arange(heads)[:, None, None],
        "q": np.arange(offset, kv_len)[:, None],
        "k": np.arange(kv_len),
        "offset": offset,
    }


def dense(score, arrays, mask, scale, dlse=0.0, dtype=None, factor=1.0, fused=False):
    """Out, lse, dq, dk, dv and gradients of captured arrays by the formula in float64; with `dtype` in float32, and
    rounded where kernels round.

    Kernels multiply by unnormalised weights, relative to any recent maximum; `factor` is that of other roundings.
    Backwards that are `fused` sum rounded dS for the gradients of captured arrays.
    """
    wide = np.float64 if dtype is None else np.float32
    q, k, v, dout = (x.astype(wide) for x in arrays)
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (k, v))
    inputs = positions(q.shape[1], q.shape[0], q.shape[2], k.shape[2])

    def rounded(x):
        return x if dtype is None else (x * wide(factor)).astype(dtype).astype(wide) / wide(factor)

    def over_group(x):
        return rounded(x.reshape(*k.shape[:2], group, *x.shape[2:]).sum(axis=2))

    s, derivative, uses = evaluated(score, inputs | {"score": q @ keys.swapaxes(2, 3) * wide(scale)}, wide)
    s = np.where(mask, s, -np.inf)
    largest = s.max(axis=3, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(largest == -np.inf, 0, largest))
    total = p.sum(axis=3, keepdims=True)
    empty = total == 0
    lse = largest + np.log(np.where(empty, 1, total))
    out = rounded(rounded(p) @ values / np.where(empty, 1, total))
    p = p / np.where(empty, 1, total)
    delta = (dout * out).sum(axis=3) - dlse
    ds = p * (dout @ values.swapaxes(2, 3) - delta[..., None])
    tables = table_gradients(score, uses, rounded(ds) if fused else ds)
    ds = rounded(np.where(ds == 0, 0, ds * derivative))
    dk, dv = over_group(ds.swapaxes(2, 3) @ q * wide(scale)), over_group(rounded(p).swapaxes(2, 3) @ dout)
    return out, lse[..., 0], rounded(ds @ keys * wide(scale)), dk, dv, *tables
