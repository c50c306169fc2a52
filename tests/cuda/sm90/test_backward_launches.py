"""The launches of a backward call, with a GPU that is not there: what is launched, and what is written only once."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from spattn import Tiling, patterns, plan
from spattn.arrays.operand import Operand, row_major
from spattn.cuda.host.backward_pass import BackwardPass
from spattn.cuda.sm90 import maps
from spattn.cuda.sm90.backward import params as params_of
from spattn.cuda.sm90.backward import prepared
from spattn.schedule.tensor_maps import MAPS

pytestmark = pytest.mark.family("sm90")

PARAMETERS = {"backward": "Params", "statistics": "Rows", "sum": "Sum", "convert": "Converted"}


@pytest.fixture
def launched(monkeypatch):
    """Names of kernels in the order in which they are started; addresses are numbers."""
    names, written, waits, addresses = [], [], [], itertools.count(1 << 20, 1 << 20)

    def upload(device, arrays):
        return None, {name: next(addresses) for name in arrays}

    def kernel(one):
        name = one.entry.removeprefix("hopper_")
        what = f"{name} by {'keys' if one.defines['SPATTN_BY_KEYS'] else 'queries'}" if name == "backward" else name
        return SimpleNamespace(name=what, params_bytes=one.structs[PARAMETERS[name]].itemsize)

    class Launch:
        def __init__(self, kernel, blocks, params, stream, counter_at=None, early=False):
            assert len(params) == kernel.params_bytes and blocks > 0
            assert early == (kernel.name != "statistics")  # all but the first may start before the one before has ended
            assert (counter_at is not None) == kernel.name.startswith("backward")
            if kernel.name.startswith("backward"):
                dtypes = (params_of.params_dtype(room) for room in MAPS)
                dtype = next(dtype for dtype in dtypes if dtype.itemsize == len(params))
                waits.append(bool(np.frombuffer(params, dtype)["waits"][0]))
            self.name = kernel.name
            written.append(self.name)

    def start(launches, next_counter):
        names.extend(launch.name for launch in launches)

    monkeypatch.setattr(prepared, "upload", upload)
    monkeypatch.setattr(prepared, "load_kernels", lambda device, requests: list(map(kernel, requests)))
    monkeypatch.setattr(prepared, "Launch", Launch)
    monkeypatch.setattr(prepared, "start", start)
    monkeypatch.setattr(maps, "address", lambda name: 0)
    monkeypatch.setattr(maps, "encode_map", lambda *args: 0)
    monkeypatch.setattr(maps, "replace_address", lambda *args: None)
    return SimpleNamespace(names=names, written=written, waits=waits)


def run(pattern, tokens, heads, calls=1):
    """Runs calls that differ in nothing."""
    made = plan(pattern, tokens, tiling=Tiling(workers=1), heads=heads)
    x = Operand(1 << 12, (1, heads, tokens, 64), row_major((1, heads, tokens, 64)))
    lse = Operand(1 << 12, (1, heads, tokens), row_major((1, heads, tokens)))
    of_plan = prepared.BackwardPlan(made, SimpleNamespace(sm_count=4), 1, heads, heads)
    for _ in range(calls):
        call = BackwardPass(None, 0, made, x, x, x, x, x, lse, None, x, x, x, "bfloat16", 0.125, lambda nbytes: 1 << 30)
        of_plan.ready(call).run(call)


def test_two_passes(launched):
    """All items begin at the same queries, and one head is not enough to keep SMs busy meanwhile."""
    run(patterns.Full(), 400, 1)
    assert launched.names == ["statistics", "backward by keys", "backward by queries"]
    assert launched.waits == [True, False]  # the passes may run side by side


@pytest.mark.parametrize("pattern", [patterns.Full(), patterns.SlidingWindow(512)], ids=repr)
def test_one_pass(launched, pattern):
    """Items are long, or go ahead of each other. The pass by queries asks whether it is needed."""
    run(pattern, 4096, 2)
    assert launched.names == ["statistics", "backward by keys", "convert", "backward by queries"]
    assert launched.waits == [True, True]


def test_two_passes_where_one_would_compute_much_in_vain(launched):
    """Items go ahead of each other, but most steps have pairs in one of their two subtiles of keys only."""
    run(patterns.Neighborhood((128, 128), 13), 128 * 128, 2)
    assert launched.names == ["statistics", "backward by keys", "backward by queries"]


def test_rows_that_several_items_compute_are_summed(launched):
    """A few of them, of the keys that all queries see: a launch of their items alone would not pay."""
    run(patterns.longformer(64, global_tokens=range(8)), 20000, 1)
    assert launched.names[1:] == ["backward by keys", "backward by queries", "sum", "sum"]


def test_reductions_sum_what_they_share_with_others(launched):
    """All rows have two sources; those items that finish run last, after those of both passes that do not."""
    run(patterns.strided(16), 1000, 2)
    assert launched.names[1:] == ["backward by keys", "backward by queries"] * 2
    assert launched.waits == [True, False, True, False]


def test_a_call_that_repeats_writes_nothing(launched):
    run(patterns.SlidingWindow(100), 1000, 2, calls=3)
    assert len(launched.names) == 3 * len(launched.written) > 0


def test_nothing_allowed_launches_no_pass(launched):
    run(patterns.Full() - patterns.Full(), 200, 2)
    assert launched.names == ["statistics", "sum", "sum", "sum"]
    assert np.isin(launched.written, launched.names).all()
