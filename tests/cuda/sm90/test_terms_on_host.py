"""float32 as bfloat16 terms, without a GPU: the terms themselves, what is launched, and which calls take them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from spattn import patterns
from spattn.arrays.operand import Operand, row_major
from spattn.choose.specializations import TILE, has_build, terms_of
from spattn.cuda import families
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.sm80.family import FAMILY as PORTABLE
from spattn.cuda.sm90 import family as hopper
from spattn.cuda.sm90.forward import launches, params, prepared, terms
from spattn.request.call import Call
from spattn.schedule import compiler
from spattn.testing import inputs

pytestmark = pytest.mark.family("sm90")

TERMS = {None: 3, "tf32": 2}
precisions = pytest.mark.parametrize("precision", TERMS)
BFLOAT16 = ml_dtypes.bfloat16


def split(x: np.ndarray, count: int) -> list[np.ndarray]:
    """The terms of float32 numbers, as terms.cuh computes them."""
    found = []
    for _ in range(count):
        found.append(x.astype(BFLOAT16).astype(np.float32))
        x = x - found[-1]
    return found


def test_terms_are_exact():
    """Three terms of normal numbers; two leave 2⁻¹⁶. What the six products omit is below 2⁻²³ of |x y|."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(1 << 16) * 2.0 ** rng.integers(-80, 80, 1 << 16) for _ in range(2))
    x, y = x.astype(np.float32), y.astype(np.float32)
    (x0, x1, x2), (y0, y1, y2) = ([t.astype(np.float64) for t in split(z, 3)] for z in (x, y))
    assert np.array_equal(x0 + x1 + x2, x.astype(np.float64))
    products = x0 * y0 + x0 * y1 + x1 * y0 + x1 * y1 + x0 * y2 + x2 * y0
    wanted = x.astype(np.float64) * y
    assert (np.abs(products - wanted) <= 2.0**-23 * np.abs(wanted)).all()
    two = x0 * y0 + x0 * y1 + x1 * y0
    assert (np.abs(two - wanted) <= 2.0**-15 * np.abs(wanted)).all()
    assert np.abs(two - wanted).max() > 0
    tiny = np.float32(2.0**-126) * (1 + rng.random(1000, np.float32))  # values, which are multiplied by 2⁴⁰
    assert np.array_equal(sum(t.astype(np.float64) for t in split(tiny * np.float32(2.0**40), 3)), tiny * 2.0**40)


class Gpu:
    """A device, as far as launches read it."""

    sm_count, ordinal = 132, 0


class Kernel:
    """A loaded kernel, as far as launches read it."""

    def __init__(self, request):
        sizes = {"attention": params.params_dtype(16), "merge": params.MERGE, "split": terms.SPLIT}
        self.name = request.entry.removeprefix("hopper_")
        self.bytes = sizes[self.name].itemsize


@pytest.fixture
def launched(monkeypatch, tensor_maps):
    """The launches made, (name, CTAs, parameters, early); tables have made-up addresses."""
    found = []

    def launch(kernel, blocks, packed, stream, counter_at=None, moving=None, early=False):
        assert len(packed) == kernel.bytes and moving is None
        found.append((kernel.name, blocks, packed, early))

    monkeypatch.setattr(launches, "load_kernels", lambda device, requests: list(map(Kernel, requests)))
    monkeypatch.setattr(launches, "Launch", launch)
    monkeypatch.setattr(prepared, "upload", lambda device, arrays: (None, dict.fromkeys(arrays, 4096)))
    return found


def call_of(precision, heads=(4, 2), lengths=(300, 410), dim=64, tile=TILE, workers=4):
    """A forward whose lists are split, with arrays at 1 to 4 GiB."""
    shapes = [(2, heads[n], lengths[n], dim) for n in (0, 1, 1, 0)]
    q, k, v, out = (Operand((n + 1) << 30, shape, row_major(shape)) for n, shape in enumerate(shapes))
    made = compiler.plan(patterns.strided(16), *lengths, batch=2, heads=heads[0], tile=tile, workers=workers)
    return ForwardPass(Gpu(), 0, made, q, k, v, out, 5 << 30, "float32", 0.125, None, precision)


@precisions
@pytest.mark.parametrize("dim", [64, 40, 128])
def test_launches(launched, precision, dim):
    """A split, then attention, which reads the terms; both start early and wait for the launch before them."""
    tile = (64, 64) if (dim, precision) == (128, None) else TILE
    call = call_of(precision, dim=dim, tile=tile)
    made = prepared.HopperPlan(call.plan, call.device, 2, 4, 2, False).launches(call)
    workspace = 1 << 40
    made.write(
        [(call.q.pointer, call.k.pointer, call.v.pointer, call.out.pointer, call.lse, 0.125, 0, 0)], workspace, 7
    )
    assert [name for name, *_ in launched[:2]] == ["split", "attention"]
    assert [early for *_, early in launched] == [True, True] + [False] * (len(launched) - 2)
    _, blocks, packed, _ = launched[0]
    padded, count = -(-dim // 64) * 64, TERMS[precision]
    assert blocks == -(-(2 * 4 * 300 + 2 * 2 * 2 * 410) * padded // 2048)
    sources = np.frombuffer(packed, terms.SPLIT)["of"][0]
    ends = [workspace + made.workspace_bytes]
    for source, x, factor in reversed(list(zip(sources, (call.q, call.k, call.v), (1, 1, 2.0**40), strict=True))):
        batch, heads, tokens, _ = x.shape
        assert (source["from"], *source["stride"]) == (x.pointer, *x.strides)
        sizes = [source[name] for name in ("rows", "heads", "tokens", "head_dim")]
        assert sizes == [batch * heads * tokens, heads, tokens, dim]
        assert source["factor"] == factor and source["aligned"] == 1 and source["to"] % 256 == 0
        assert source["to"] + 2 * count * padded * source["rows"] <= ends[-1]  # no overlap
        ends.append(int(source["to"]))
    assert ends[-1] >= workspace + call.partial_bytes()[1]
    filled = np.frombuffer(launched[1][2], params.params_dtype(16))[0]
    assert filled["terms"].tolist() == sources["to"].tolist() and filled["kv_len"] == 410
    problem = filled["problems"][0]
    assert [problem[name] for name in "qkv"] == [x.pointer for x in (call.q, call.k, call.v)]
    layout = prepared.make_layout(call.plan)
    row, of_out = 2 * count * padded, 4 * dim  # bytes
    to = sources["to"].tolist()
    expected = [at for s in layout.query_specs for at in (to[0] + s.offset * row, call.out.pointer + s.offset * of_out)]
    expected += [first + s.offset * row for s in layout.key_specs for first in to[1:]]
    assert [int.from_bytes(bytes(own[:8]), "little") for own in filled["maps"][: len(expected)]] == expected


def test_any_strides_but_those_of_the_output(launched):
    """The split reads arrays that TMA cannot; the output is TMA's."""
    call = call_of(None)
    odd = Operand(call.k.pointer + 4, call.k.shape, (0, 0, 65, 1))
    own = prepared.HopperPlan(call.plan, call.device, 2, 4, 2, False)
    made = own.launches(replace(call, k=odd))
    made.write([(call.q.pointer, odd.pointer, call.v.pointer, call.out.pointer, 0, 0.125, 0, 0)], 1 << 40, 7)
    assert np.frombuffer(launched[0][2], terms.SPLIT)["of"]["aligned"][0].tolist() == [1, 0, 1]
    assert own.launches(replace(call, out=Operand(call.out.pointer, call.out.shape, (19200 * 4, 19201, 64, 1)))) is None


@precisions
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("q_len", [255, 256, 1000])
def test_which_calls_are_split(monkeypatch, card, precision, dim, q_len):
    """Calls of few queries, gradients, and plans without a specialization are those of the portable kernels."""
    own, taken = hopper.HopperFloat32(PORTABLE), []
    monkeypatch.setattr(families, "of", lambda *problem: own)

    def prepare(call):
        built = has_build(call.plan.block_q, (call.q.shape[3], call.v.shape[3]), terms_of(call.dtype, call.precision))
        return SimpleNamespace(run=lambda call: taken.append("terms")) if built else None

    monkeypatch.setattr(hopper.forwards, "prepare", prepare)
    monkeypatch.setattr(type(PORTABLE), "forward", lambda self, call: taken.append("portable"))
    call = Call.of(*inputs(1, 2, 2, q_len, 1000, dim, dtype="float32"), precision=precision)
    family = families.of_call(call, card)
    assert family is (own if q_len >= 256 else PORTABLE)
    plan = family.plan_for(patterns.Causal(), call, card, None, False)
    wide = (precision, dim) != (None, 128)  # 128 queries fit
    assert family is PORTABLE or plan.block_q in ((64, 128) if wide else (64,))
    for made, expected in ((plan, "terms"), (compiler.plan(patterns.Causal(), q_len, 1000, heads=2, tile=TILE), wide)):
        own.forward(replace(call_of(precision, (2, 2), (q_len, 1000), dim), plan=made))
        assert family is PORTABLE or taken[-1] == ("terms" if expected else "portable")
        assert own.accepts(made) and own.accepts(made, True)
    assert own.launcher is None


def test_which_problems_are_split(card):
    own = hopper.HopperFloat32(PORTABLE)
    assert own.supports(card, "float32", 8, 128) and not own.supports(card, "bfloat16", 64, 64)
    assert not own.supports(card, "float32", 64, 132) and not own.supports(card, "float32", 60, 64)
    assert not own.supports(SimpleNamespace(capability=(10, 0)), "float32", 64, 64)
