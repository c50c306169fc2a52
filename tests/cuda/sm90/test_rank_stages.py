"""The stages of ranks with GPUs: emulated on the host, and on one GPU the bits of one process."""

import contextlib
import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import spattn  # noqa: E402
from spattn import patterns as p  # noqa: E402
from spattn.cuda import families  # noqa: E402
from spattn.cuda.sm90.backward.tables import lay_out_views  # noqa: E402
from spattn.distributed._on_gpu import Held, OnGpu, Partials, readable  # noqa: E402
from spattn.distributed._plans import Shape, call_of, whole_plan  # noqa: E402
from spattn.distributed._shardings import NAMES, named  # noqa: E402
from spattn.schedule import items, placement, shard, shard_gradients  # noqa: E402
from spattn.schedule.item_order import row_order  # noqa: E402
from spattn.schedule.placement import LATE, LENT, OWN  # noqa: E402
from spattn.schedule.reductions import Merges, find_reductions, merges_of_rows  # noqa: E402
from spattn.schedule.shard import spans_of  # noqa: E402
from spattn.schedule.subtiles import EMPTY, FULL, KEYS, subtile_masks  # noqa: E402
from spattn.testing.strategies import cases, compositions  # noqa: E402

pytestmark = pytest.mark.family("sm90")

HOPPER = families.FAMILIES[0]
GPU = SimpleNamespace(sm_count=132, name="emulated", capability=(9, 0))


class Wire:
    """Delivers rows from whole arrays, and checks that what a rank sends are these rows; partials are arrays, too."""

    def __init__(self, apart=0.0):
        self.whole, self.apart, self.open, self.bytes = [], apart, 0, 0

    def carry(self, transfers, *arrays):
        self.whole.append((transfers, arrays))

    def __call__(self, group, transfers, send, received):
        (arrays,) = (arrays for of, arrays in self.whole if of is transfers)

        def rows(block, number):
            heads, rows = (torch.from_numpy(x).to(arrays[0].device) for x in block)
            return arrays[number].flatten(0, 1)[heads][:, rows]

        self.open += 1
        for transfer, message in zip(transfers, send, strict=True):
            own = iter(message.tensors)
            for block in transfer.send:
                for number in range(len(arrays)):
                    torch.testing.assert_close(next(own), rows(block, number), atol=self.apart, rtol=self.apart)
            assert next(own, None) is None

        def finish():
            self.open -= 1
            for transfer, message in zip(transfers, received, strict=True):
                own = iter(message.tensors)
                for block in transfer.receive:
                    for number in range(len(arrays)):
                        next(own).copy_(rows(block, number))
                assert next(own, None) is None
                self.bytes += sum(x.nbytes for x in message.tensors)

        return finish


class Alone:
    """Keeps the partials of a rank without others."""

    def _run_forward(self, stage, arrays, lse, scale, partials):
        self.of_out = self._forward_partials(arrays[0].x)
        super()._run_forward(stage, arrays, lse, scale, self.of_out)

    def _run_backward(self, plan, stage, arrays, lse, results, scale, partials):
        self.of_gradients = self._gradient_partials(arrays[0].x, self.backward_plan()[1])
        super()._run_backward(plan, stage, arrays, lse, results, scale, self.of_gradients)


class AloneOnGpu(Alone, OnGpu):
    pass


def connected(own, alone, q, k, v, dout, out, lse, apart=0.0):
    """Give a rank the wires of all exchanges; return them."""
    wire, of_backward = Wire(apart), own.backward_plan()[2]
    wire.carry(own._keys, k, v)
    wire.carry(own._queries, q)
    wire.carry(own._partials, *alone.of_out.tensors)
    wire.carry(of_backward.rows, q, dout, out, lse)
    wire.carry(of_backward.keys, k, v)
    wire.carry(of_backward.query_partials, *alone.of_gradients.tensors[:1])
    wire.carry(of_backward.key_partials, *alone.of_gradients.tensors[1:])
    own._exchange = wire
    return wire


class Emulated(OnGpu):
    """Computes the items of stages in float64 from the rows that are held; what a kernel must not read is NaN."""

    def whole(self, held):
        """The array, NaN at rows that are not in memory."""
        found = torch.full_like(held.x[:, :, :1], math.nan).repeat(1, 1, self._shape.length, 1)
        found[:, :, held.first : held.stop] = held.x
        return found

    def spread(self, held, touched):
        """The array, NaN at rows of no tile; the kernels read all rows from the first to the last of the tiles."""
        assert held.covers(touched) or touched.first == touched.stop
        self.copied += 0 if any(held.x.data_ptr() == x.data_ptr() for x in self.local) else held.x.shape[2]
        found = self.whole(held)
        found[:, :, torch.from_numpy(~touched.mask)] = math.nan
        return found

    def heads(self, x):
        return x.repeat_interleave(self._shape.heads_q // self._shape.heads_kv, 1)

    def _in_workspace(self, like, nbytes, arrays):
        return Partials(None, tuple(torch.full(shape, math.nan, dtype=torch.float64) for _, shape in arrays))

    def run(self, items, made, merges, rows, of_item, compute, results, partials, combine):
        """Run `items`, (items,) bool: ``compute(item, batch, head)`` are its rows and their values, for each result.

        Rows with a slot go to `partials`, others to `results`; then ``combine`` adds the sources of the combines of
        `rows`, (variants, length) bool.
        """
        count = np.diff(merges.indptr)
        of_merge = np.repeat(np.arange(len(merges.variants) - 1), np.diff(merges.variants))
        read = np.repeat(of_merge, count).tolist(), merges.sources.tolist()
        sources = dict(zip(zip(*read, strict=True), np.repeat(merges.rows, count).tolist(), strict=True))
        variant_of = np.repeat(np.arange(len(made.work_indptr) - 1), np.diff(made.work_indptr))
        kind = np.broadcast_to(made.variant, results[0].x.shape[:2])
        for item in np.nonzero(items)[0]:
            slot = made.work["slot"][item]
            for batch, head in np.argwhere(kind == variant_of[item]):
                own, values = compute(item, batch, head)
                if slot < 0:
                    for held, x in zip(results, values, strict=True):
                        assert (own >= held.first).all() and (own < held.stop).all()
                        held.x[batch, head, own - held.first] = x.to(held.x.dtype)
                    continue
                place = {row: number for number, row in enumerate(own.tolist())}
                at = [at for at in range(slot * of_item, (slot + 1) * of_item) if (variant_of[item], at) in sources]
                from_item = [place[sources[variant_of[item], w]] for w in at]
                for to, x in zip(partials, values, strict=True):
                    to[batch, head, at] = x[from_item]
        for batch, head in np.ndindex(*kind.shape):
            variant = kind[batch, head]
            for merge in range(*merges.variants[variant : variant + 2]):
                row = merges.rows[merge]
                if rows[variant, row]:
                    at = merges.sources[merges.indptr[merge] : merges.indptr[merge + 1]].tolist()
                    values = combine([x[batch, head, at] for x in partials])
                    for held, x in zip(results, values, strict=True):
                        assert held.first <= row < held.stop
                        held.x[batch, head, row - held.first] = x.to(held.x.dtype)

    def lists(self, plan):
        """The rows of each item, its keys, and whether a row may attend to a key."""
        if plan not in self.listed:
            spans, found = spans_of(plan), [None] * len(plan.work)
            for number, item in enumerate(row_order(plan)):
                rows, keys, pairs = spans.queries[spans.lists[number]], [], []
                for run in np.nonzero(spans.item == number)[0]:
                    for tile in range(spans.start[run], spans.stop[run]):
                        keys.append(spans.keys[tile])
                        bits = np.full((plan.block_q, plan.block_kv), True)
                        if spans.mask[run] >= 0:
                            words = plan.masks[spans.mask[run]].view(np.uint8)
                            bits = np.unpackbits(words, axis=1, bitorder="little").astype(bool)
                        pairs.append(bits)
                keys, pairs = np.concatenate(keys), np.concatenate(pairs, axis=1)
                found[item] = rows[rows >= 0], keys[keys >= 0], torch.from_numpy(pairs[rows >= 0][:, keys >= 0])
            self.listed[plan] = found
        return self.listed[plan]

    def _run_forward(self, stage, arrays, lse, scale, partials):
        plan, (queries, keys, values, out) = self._plan, arrays
        q, k, v = self.spread(queries, stage.queries), self.spread(keys, stage.keys), self.spread(values, stage.keys)
        k, v = self.heads(k), self.heads(v)
        partials = partials or self._forward_partials(q)
        fixed = find_reductions(plan)
        merges = Merges(plan.merge_rows, plan.merge_indptr, plan.merge_sources, plan.merge_variants)
        # In-kernel reductions neither are lent nor read partials of others.
        assert stage.role == OWN or not stage.items[fixed.slots < -1].any()
        by_kernel = len(merges_of_rows(fixed.merges, stage.rows).rows)
        assert stage.role != LATE or by_kernel == len(merges_of_rows(merges, stage.rows).rows)

        def compute(item, batch, head):
            rows, columns, allowed = self.lists(plan)[item]
            s = torch.where(allowed, q[batch, head, rows] @ k[batch, head, columns].T * scale, -math.inf)
            own = torch.logsumexp(s, -1, keepdim=True)
            weights = torch.where(allowed, torch.exp(s - own), 0)
            return rows, (product(weights, v[batch, head, columns], allowed), own)

        def combine(sources):
            if not len(sources[0]):
                return torch.zeros(sources[0].shape[1], dtype=torch.float64), torch.tensor([-math.inf])
            whole = torch.logsumexp(sources[1], 0, keepdim=True)
            weights = torch.where(whole == -math.inf, 0, torch.exp(sources[1] - whole))
            return (weights * sources[0]).sum(0), whole[0]

        results = out, Held(lse[..., None], 0, self._shape.length)
        self.run(stage.items, plan, merges, stage.rows, plan.block_q, compute, results, partials.tensors, combine)

    def _run_backward(self, plan, stage, arrays, lse, results, scale, partials):
        given = zip(arrays, (stage.queries, stage.queries, stage.keys, stage.keys, stage.queries), strict=True)
        dout, q, k, v, out = (self.spread(*x) for x in given)
        shape, share = self._shape, self.backward_plan()[1]
        lse, delta = lse.double()[..., None], (dout * out).sum(-1, keepdim=True)
        partials = partials or self._gradient_partials(q, share)
        group = shape.heads_q // shape.heads_kv
        cut = lay_out_views(plan).cut

        def weigh(batch, head, rows, columns, allowed):
            of = head // group
            logits = torch.where(allowed, q[batch, head, rows] @ k[batch, of, columns].T * scale, -math.inf)
            weights = torch.where(
                allowed & (lse[batch, head, rows] > -math.inf), torch.exp(logits - lse[batch, head, rows]), 0
            )
            scores = weights * (dout[batch, head, rows] @ v[batch, of, columns].T - delta[batch, head, rows]) * scale
            return weights, torch.where(allowed, scores, 0)

        def of_queries(item, batch, head):
            rows, columns, allowed = self.lists(plan)[item]
            scores = weigh(batch, head, rows, columns, allowed)[1]
            return rows, (product(scores, k[batch, head // group, columns], allowed),)

        work, masks = share.work, subtile_masks(plan, cut)

        def of_keys(item, batch, head):
            one, columns = work.made.work[item], work.keys[item]
            dk, dv = (torch.zeros(len(columns), x.shape[3], dtype=torch.float64) for x in (k, v))
            for entry in range(one["begin"], one["end"]):
                of = work.made.entries[entry]
                order = cut.orders[cut.of_view[of["view"]]][of["part"] * cut.side : (of["part"] + 1) * cut.side]
                rows, bits = work.queries[work.entry[entry]][order], np.zeros((cut.side, len(columns)), bool)
                for part, number in enumerate(work.made.masks[entry]):
                    if number != EMPTY:
                        here = slice(KEYS * part, KEYS * part + KEYS)
                        bits[:, here] = True if number == FULL else masks.bits[number]
                real, there = rows >= 0, columns >= 0
                allowed = torch.from_numpy(bits[real][:, there])
                for number in range(one["heads"]):
                    at = batch, head * group + of["head"] + number, rows[real]
                    weights, scores = weigh(*at[:2], rows[real], columns[there], allowed)
                    dk[there] += product(scores.T, q[at], allowed.T)
                    dv[there] += product(weights.T, dout[at], allowed.T)
            return columns[columns >= 0], (dk[columns >= 0], dv[columns >= 0])

        def combine(sources):
            return [x.sum(0) for x in sources]

        queries = share.of_queries.partials
        made = SimpleNamespace(work=plan.work, work_indptr=plan.work_indptr, variant=plan.variant)
        rows = stage.rows, queries.rows
        self.run(stage.items, made, queries.merges, *rows, of_queries, results[:1], partials.tensors[:1], combine)
        rows = stage.key_rows, share.of_keys.partials.rows
        merges = work.made.merges
        self.run(stage.key_items, work.made, merges, *rows, of_keys, results[1:], partials.tensors[1:], combine)


class EmulatedAlone(Alone, Emulated):
    pass


def product(a, b, allowed):
    """The product of a matrix, 0 where it is not allowed; NaN in b reaches only rows that are allowed to read it."""
    found = torch.nan_to_num(a) @ torch.nan_to_num(b)
    found[(torch.isnan(a) | (allowed & torch.isnan(b[:, 0]))).any(-1)] = math.nan
    return found


def emulated_case(pattern, shape, name, world_size, seed):
    call = call_of(shape, "bfloat16")
    plan = HOPPER.plan_for(pattern, call, GPU, None, False)
    sharding = named(name, shape, world_size, plan)
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(shape.batch, heads, shape.length, width, generator=generator, dtype=torch.float64)
        for heads, width in ((shape.heads_q, 16), (shape.heads_kv, 16), (shape.heads_kv, 16), (shape.heads_q, 16))
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = spattn.attention(*leaves, pattern, return_lse=True, backend="cpu")
    want = [out, *torch.autograd.grad(out, leaves, dout)]
    out, lse = out.detach(), lse.detach()

    def emulated(kind, sharding, rank):
        backward = functools.partial(HOPPER.plan_for, pattern, call, GPU, None, True)
        own = kind(
            None, rank, sharding, shape, call, plan, backward if alone is None else alone._plan_backward, GPU, HOPPER
        )
        own.copied, own.listed = 0, {} if alone is None else alone.listed
        at = torch.from_numpy(sharding.rows(rank))
        own.local = [x[:, :, at] for x in (q, k, v, dout, out)]
        return own

    alone = None
    alone = emulated(EmulatedAlone, named("contiguous", shape, 1, plan), 0)
    made = alone.backward_plan()[0]
    alone._plan_backward = lambda: made
    check(alone, want)
    for rank in range(world_size):
        own = emulated(Emulated, sharding, rank)
        wire = connected(own, alone, q, k, v, dout, out, lse.float()[..., None], 1e-6)
        yield own, want, wire


def check(own, want):
    """Every row that a stage reads has come, every partial that is combined, and every row of a rank is written."""
    q, k, v, dout, _ = own.local
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    try:
        assert torch.isnan(q.new_empty(3)).all()
        out, lse, received = own.forward(q, k, v, 0.25)
        torch.testing.assert_close(out, want[0][:, :, own._rows], atol=1e-9, rtol=1e-9)
        own.local[-1] = out
        found = own.backward(dout, q, k, v, out, lse, received, 0.25)
    finally:
        torch.use_deterministic_algorithms(False)
    for got, expected in zip(found, want[1:], strict=True):
        torch.testing.assert_close(got, expected[:, :, own._rows], atol=1e-5, rtol=1e-5)
    return out, *found


@settings(max_examples=25, deadline=None)
@given(
    st.one_of(cases(max_len=300), compositions(max_len=300)).filter(lambda case: case.sizes.q_len == case.sizes.kv_len),
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(0, 9),
    st.booleans(),
)
def test_emulated_ranks(case, name, world_size, seed, lend):
    """Also with many short items, of which ranks lend as many as they can."""
    sizes = case.sizes
    shape = Shape(sizes.batch, sizes.heads_q, sizes.heads_kv, sizes.q_len, 16, 16)
    with short_items(lend):
        for own, want, wire in emulated_case(case.pattern, shape, name, world_size, seed):
            check(own, want)
            assert wire.open == 0


@contextlib.contextmanager
def short_items(lend):
    """With `lend`, lists are split into items of one tile, and items move wherever they read most."""
    with pytest.MonkeyPatch.context() as patch:
        if lend:
            patch.setattr(items, "_SHORTEST_PIECE", 1)
            patch.setattr(placement, "_MOST_WORK", (1 << 20, 1))
            for module in (shard, shard_gradients):
                patch.setattr(
                    module, "place", lambda *given: placement.place(*given[:-1], placement.Bytes(0, 0, 1 << 20))
                )
        yield


@pytest.mark.parametrize("rank", range(4))
def test_windows_copy_rows_near_the_bounds(rank):
    """Most rows of contiguous shards are read where they are, and results have no rows of other ranks."""
    shape = Shape(1, 2, 2, 4096, 16, 16)
    own, want, _ = list(emulated_case(p.SlidingWindow(60), shape, "contiguous", 4, 0))[rank]
    results = check(own, want)
    assert 0 < own.copied <= 40 * 256
    for x in results:
        assert x.untyped_storage().nbytes() <= 8 * 2 * 16 * (1024 + 4 * 128)


def test_later_stages_find_the_rows_that_earlier_ones_did_not_copy():
    """With a global token, the stage at a bound spans the rank's rows, of which its tiles have few."""
    shape = Shape(1, 1, 1, 1500, 16, 16)
    for own, want, _ in emulated_case(p.longformer(20, global_tokens=(3,)), shape, "contiguous", 3, 0):
        check(own, want)


@pytest.mark.parametrize("tokens", [(5, 1200), (5, 3500)])
def test_global_rows_are_computed_where_their_keys_are(tokens):
    """The rank of a global token receives partials instead of all rows, and the plan knows the bytes."""
    shape, pattern = Shape(1, 2, 1, 4096, 16, 16), p.longformer(20, global_tokens=tokens)
    for own, want, wire in emulated_case(pattern, shape, "contiguous", 2, 3):
        check(own, want)
        share, transfers = own.backward_plan()[1:]
        roles = {stage.role for stage in (*own._stages, *share.stages)}
        assert roles > {OWN} and (roles == {OWN, LENT, LATE}) == (tokens[1] > 2048)
        each = (own._keys, 2), (own._queries, 1), (transfers.keys, 2), (transfers.query_partials, 1)
        each += ((transfers.key_partials, 2),)
        rows = sum(number * received_rows(of) for of, number in each)
        floats = 16 * (rows + received_rows(own._partials) + 3 * received_rows(transfers.rows))
        assert wire.bytes == 8 * (floats + received_rows(own._partials)) + 4 * received_rows(transfers.rows)
        assert received_rows(own._keys) < 200 and received_rows(transfers.rows) < 2 * 700


def received_rows(transfers):
    return sum(len(block.heads) * len(block.rows) for transfer in transfers for block in transfer.receive)


#: Pattern, (batch, heads_q, heads_kv, length, head_dim, head_dim_v), name of the sharding, number of ranks.
ON_GPU = {
    "window": (p.SlidingWindow(100, 60), Shape(2, 4, 2, 1500, 64, 64), "contiguous", 3),
    "window, unaligned bounds": (p.SlidingWindow(100, 60), Shape(1, 16, 16, 5000, 128, 128), "contiguous", 2),
    "causal": (p.Causal(), Shape(1, 2, 2, 3000, 128, 128), "head_tail", 2),
    "causal, chunks": (p.Causal(), Shape(1, 4, 1, 1111, 64, 128), "contiguous", 4),
    "longformer": (p.longformer(60, global_tokens=tuple(range(20))), Shape(1, 4, 4, 2000, 128, 128), "contiguous", 2),
    "documents": (p.Causal() & p.Documents((700, 90, 1210)), Shape(1, 4, 2, 2000, 128, 128), "balanced", 2),
    "strided": (p.strided(32), Shape(1, 4, 4, 2048, 64, 64), "contiguous", 2),
    "dilated": (p.DilatedWindow(20, 20, 3), Shape(1, 2, 2, 1001, 64, 64), "striped", 2),
    "grid": (p.Neighborhood((40, 40), (7, 7)), Shape(1, 2, 2, 1600, 64, 64), "contiguous", 3),
    "heads": (
        p.PerHead((p.Causal(), p.SlidingWindow(90), p.strided(7), p.Full())),
        Shape(1, 4, 4, 1100, 64, 64),
        "contiguous",
        2,
    ),
    "sinks": (p.Causal() & (p.Sinks(4) | p.SlidingWindow(255, 0)), Shape(1, 8, 2, 4096, 128, 128), "contiguous", 4),
    "full": (p.Full(), Shape(1, 1, 1, 2500, 128, 128), "contiguous", 2),
    "lent: longformer": (p.longformer(60, global_tokens=64), Shape(1, 4, 4, 8192, 128, 128), "contiguous", 2),
    "lent: groups of heads": (p.longformer(60, global_tokens=64), Shape(1, 8, 2, 6000, 64, 128), "contiguous", 3),
    "lent: both ways": (
        p.longformer(60, global_tokens=(*range(30, 50), 4000)),
        Shape(1, 4, 4, 7000, 128, 64),
        "head_tail",
        2,
    ),
    "lent: bigbird": (p.BigBird(64, 3, 1, 1), Shape(2, 4, 4, 8192, 64, 64), "contiguous", 3),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_kernels")
@pytest.mark.parametrize("name", list(ON_GPU))
def test_ranks_on_one_gpu(name):
    """Forward and gradients of ranks have the bits of one rank; the forward and dK, dV those of spattn.attention."""
    lent = on_one_gpu(*ON_GPU[name])
    assert lent or not name.startswith("lent")


def on_one_gpu(pattern, shape, name, world_size):
    from spattn.cuda.driver import device

    call = call_of(shape, "bfloat16", None, "cuda:0")
    plan, gpu = whole_plan(pattern, call), device.get(0)
    sharding = named(name, shape, world_size, plan)
    own = plan, lambda: whole_plan(pattern, call, backward=True), gpu, families.of_call(call, gpu)
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, dout = (
        torch.randn(shape.batch, heads, shape.length, width, generator=generator, device="cuda").bfloat16()
        for heads, width in (
            (shape.heads_q, shape.head_dim),
            (shape.heads_kv, shape.head_dim),
            (shape.heads_kv, shape.head_dim_v),
            (shape.heads_q, shape.head_dim_v),
        )
    )
    one = AloneOnGpu(None, 0, named("contiguous", shape, 1, plan), shape, call, *own)
    out, lse, received = one.forward(q, k, v, call.scale)
    want = [out, *one.backward(dout, q, k, v, out, lse, received, call.scale)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = spattn.attention(*leaves, pattern)
    assert torch.equal(plain, out)
    for got, expected in zip(want[1:], torch.autograd.grad(plain, leaves, dout), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    torch.full((1 << 28,), math.nan, device="cuda")  # freed memory holds NaN
    lent = 0
    for rank in range(world_size):
        of = OnGpu(None, rank, sharding, shape, call, *own)
        wire = connected(of, one, q, k, v, dout, out, lse)
        at = torch.from_numpy(sharding.rows(rank)).cuda()
        local = [readable(x[:, :, at]) for x in (q, k, v)]
        mine, own_lse, received = of.forward(*local, call.scale)
        assert torch.equal(mine, out[:, :, at]) and torch.equal(own_lse, lse[:, :, at])
        found = of.backward(dout[:, :, at].contiguous(), *local, mine.contiguous(), own_lse, received, call.scale)
        for number, (got, expected) in enumerate(zip(found, want[1:], strict=True)):
            assert torch.equal(got, expected[:, :, at]), number
        share = of.backward_plan()[1]
        lent += sum(stage.role == LENT for stage in (*of._stages, *share.stages))
        assert wire.open == 0
    return lent


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("lend", [False, True])
def test_emulated_ranks_of_unlike_heads(name, world_size, lend):
    """Rows that come for some heads alone stay in memory for later stages."""
    pattern = p.PerHead(
        (p.SlidingWindow(40), p.Causal() & p.Stride(5), p.longformer(20, global_tokens=(3, 170)), p.Full())
    )
    shape = Shape(1, 4, 4, 331, 16, 16)
    with short_items(lend):
        for own, want, _ in emulated_case(pattern, shape, name, world_size, 1):
            check(own, want)
