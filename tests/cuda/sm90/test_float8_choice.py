"""float8 on the Hopper kernels, without a GPU: which calls they take, and the parameters of a launch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from spattn import patterns
from spattn.arrays import FLOAT8
from spattn.arrays.operand import Operand, row_major
from spattn.choose.specializations import TILE, WIDEST
from spattn.cuda import families
from spattn.cuda.host.forward_pass import ForwardPass
from spattn.cuda.host.score import BoundScore
from spattn.cuda.sm90.forward import launches, params, prepared
from spattn.request.call import Call
from spattn.schedule import compiler

pytestmark = pytest.mark.family("sm90")


class Gpu:
    """A device, as far as launches read it."""

    sm_count, ordinal = 132, 0


class Ampere(Gpu):
    capability, name = (8, 0), "A100"


def call_of(dim=128, tile=TILE, lengths=(300, 410), **changes):
    """A forward of grouped-query heads with arrays at 1 to 4 GiB and scales at 6 GiB."""
    shapes = [
        (2, heads, length, dim) for heads, length in zip((8, 2, 2, 8), (*lengths, lengths[1], lengths[0]), strict=True)
    ]
    arrays = {
        name: Operand((n + 1) << 30, shape, row_major(shape))
        for n, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))
    }
    plan = compiler.plan(patterns.strided(16), *lengths, batch=2, heads=8, tile=tile)
    return ForwardPass(
        Gpu(),
        0,
        plan,
        **(arrays | changes),
        lse=0,
        dtype=FLOAT8,
        scale=0.125,
        allocate=lambda nbytes: 1 << 40,
        score=SCALES,
    )


NAMES = ("q", "k", "v", "out")
SCALES = BoundScore(scales=6 << 30)


@pytest.fixture
def loaded(monkeypatch, tensor_maps):
    """The requests for kernels; tables have made-up addresses."""
    found = []
    monkeypatch.setattr(launches, "load_kernels", lambda device, requests: found.extend(requests) or requests)
    monkeypatch.setattr(launches, "Launch", lambda kernel, blocks, packed, *rest: (kernel, packed))
    monkeypatch.setattr(launches, "start", lambda made, counter: found.append(made))
    monkeypatch.setattr(prepared, "upload", lambda device, arrays, *staging: (None, dict.fromkeys(arrays, 4096)))
    return found


@pytest.mark.parametrize(("dim", "lengths"), [(128, (300, 410)), (48, (1, 410))], ids=str)
def test_launch(loaded, dim, lengths):
    """Views are of bytes, the output is bfloat16, and the heads of a group are not packed: each has its scales."""
    call = call_of(dim, lengths=lengths)
    launches_of = prepared.prepare(call)
    assert launches_of.part.call.packed == 1 and not launches_of.moves
    launches_of.run(call)
    *requests, made = loaded
    assert requests[0].defines["SPATTN_FLOAT8"] == 1 and requests[0].defines["SPATTN_DTYPE"] == "bfloat16"
    filled = np.frombuffer(made[0][1], params.params_dtype(16))[0]
    problem, layout = filled["problems"][0], prepared.make_layout(call.plan)
    assert problem["scales"] == 6 << 30 and problem["heads_q"] == 8
    of_q, of_k, of_v, of_out = ((n + 1) << 30 for n in range(4))
    expected = [at for s in layout.query_specs for at in (of_q + s.offset * dim, of_out + 2 * s.offset * dim)]
    expected += [first + s.offset * dim for s in layout.key_specs for first in (of_k, of_v)]
    assert [int.from_bytes(bytes(own[:8]), "little") for own in filled["maps"][: len(expected)]] == expected


def test_unsuitable_arrays(loaded):
    """There are no other kernels for them."""
    family = families.FLOAT8_FAMILY
    call = call_of()
    odd = Operand(call.k.pointer, call.k.shape, (820 * 130, 410 * 130, 130, 1))
    with pytest.raises(ValueError, match=r"k has shape .*rows must be contiguous and 16-byte aligned.*bfloat16"):
        family.forward(call_of(k=odd))
    with pytest.raises(ValueError, match=r"v starts at 0xc0000008, .*copy the array, or convert"):
        family.forward(call_of(v=call.v._replace(pointer=call.v.pointer + 8)))


def test_which_problems_and_plans(card, monkeypatch):
    family = families.of(card, FLOAT8, 128, 16)
    assert family is families.FLOAT8_FAMILY and family.launcher is None
    for gpu, dims in (
        (card, (136, 128)),
        (card, (24, 32)),
        (Ampere(), (64, 64)),
    ):
        with pytest.raises(ValueError, match=f"float8 needs .* got {dims[0]} and {dims[1]} on {gpu.name}; convert"):
            families.of(gpu, FLOAT8, *dims)
    monkeypatch.setenv("SPATTN_CUDA_KERNEL", "portable")
    with pytest.raises(ValueError, match="float8 needs"):
        families.of(card, FLOAT8, 128, 128)
    assert all(family.accepts(call_of(tile=tile).plan) for tile in (TILE, WIDEST)) and not family.accepts(
        call_of().plan, backward=True
    )
    with pytest.raises(ValueError, match="no CUDA kernel has tiles of 64 × 64"):
        families.executing(family, call_of(tile=(64, 64)).plan)


@pytest.mark.parametrize(
    ("pattern", "lengths", "tile"),
    [
        (patterns.Full(), (2000, 2000), WIDEST),
        (patterns.Causal(), (8192, 8192), WIDEST),
        (patterns.SlidingWindow(1024), (8192, 8192), WIDEST),
        (patterns.SlidingWindow(256), (8192, 8192), TILE),
        (patterns.Full(), (128, 2000), TILE),
        (patterns.Full(), (200, 2000), TILE),  # 384 rows instead of 256
        (patterns.BlockLocal(128), (4096, 4096), TILE),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, patterns.Pattern) else str(x),
)
def test_tiles_of_a_plan(card, pattern, lengths, tile):
    """192 queries, unless items are short or their tiles cover many more pairs."""
    q, k = (np.zeros((1, 16, length, 128), ml_dtypes.float8_e4m3fn) for length in lengths)
    call = Call.of(q, k, k, dtypes=(FLOAT8,))
    assert families.FLOAT8_FAMILY.plan_for(pattern, call, card, None, False).tile == tile
