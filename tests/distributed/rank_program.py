"""What the processes of tests/distributed/test_ranks.py run: ``rank_program.py RANK FOLDER``."""

import datetime
import functools
import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import spattn
import spattn.distributed as sd
from spattn import patterns as p
from spattn import score
from spattn.distributed._traffic import EXCHANGES
from spattn.torch import SparseAttention

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import hybrid_block  # noqa: E402
import long_context  # noqa: E402

WORLD_SIZE = 4
SLOPES = np.float32([0.5, 0.25, 0.125, 0.0625])


VALID = np.arange(300)[None, None] % 50 > 3


def by_position(s, b, h, q, k):
    """A score that tells positions, heads and batch entries apart."""
    return s + SLOPES[h] * (k - q) - 0.001 * q + 0.01 * b


#: Pattern, (batch, heads_q, heads_kv, length, head_dim, head_dim_v), dtype, options of the call.
CASES = {
    "window": (p.SlidingWindow(40, 20), (2, 4, 2, 500, 32, 32), "float32", {}),
    "causal": (p.Causal(), (1, 2, 1, 501, 16, 24), "float64", {}),
    "streaming": (p.Causal() & (p.Sinks(4) | p.SlidingWindow(60, 0)), (1, 4, 4, 733, 32, 32), "bfloat16", {}),
    "strided": (p.strided(16), (1, 2, 2, 640, 64, 64), "float16", {}),
    "longformer": (p.longformer(30, global_tokens=(0, 250, 251)), (1, 12, 4, 400, 32, 32), "float32", {}),
    "documents": (p.Causal() & p.Documents((90, 200, 3, 107)), (2, 2, 2, 400, 40, 40), "float32", {}),
    "grid": (p.Neighborhood((20, 21), (5, 7)) | p.GlobalTokens((0,)), (1, 2, 1, 420, 32, 32), "float32", {}),
    "heads": (
        p.PerHead((p.Causal(), p.SlidingWindow(9), p.strided(7), p.Full())),
        (1, 4, 2, 210, 16, 16),
        "float32",
        {},
    ),
    "dropout": (p.SlidingWindow(50), (2, 4, 2, 300, 32, 32), "float32", {"dropout_p": 0.3, "seed": 7, "scale": 0.3}),
    "score": (p.Causal(), (2, 4, 2, 300, 32, 32), "float32", {"score": by_position, "sinks": torch.ones(4)}),
    "library": (p.SlidingWindow(70, 0), (1, 4, 2, 300, 32, 32), "bfloat16", {"score": score.alibi(SLOPES)}),
    "split": (p.Causal(), (1, 1, 1, 2500, 16, 16), "float32", {}),
    "permuted": (p.Clusters(np.arange(2000) * 7919 % 9), (1, 1, 1, 2000, 16, 16), "float32", {}),
    "padding": (p.Causal() & p.KeyPadding(VALID), (1, 2, 1, 300, 16, 16), "float32", {}),
    "few": (p.Full(), (1, 2, 1, 3, 16, 16), "float32", {}),
}


def tensors(shape, dtype, seed=0):
    batch, heads_q, heads_kv, length, head_dim, head_dim_v = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads_q, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v), (heads_q, head_dim_v)
    return [torch.randn(batch, h, length, d, generator=generator).to(getattr(torch, dtype)) for h, d in sizes]


def gradients(compute, tensors, dout):
    own = [x.clone().requires_grad_() for x in tensors]
    out = compute(*own)
    return out.detach(), *torch.autograd.grad(out, own, dout)


def same_bits(got, want):
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(got, want, strict=True)
    )


class Wire:
    """Counts the bytes of rows that this rank sends, and refuses collectives that do arithmetic."""

    def __init__(self):
        counted = {
            "batch_isend_irecv": self.count,
            "all_to_all_single": self.count_all_to_all,
            "all_gather": self.count_all_gather,
        }
        refused = "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"
        self.sent, self.kinds = 0, []
        self.before = {name: getattr(dist, name) for name in (*counted, *refused)}
        for name in self.before:
            setattr(dist, name, counted.get(name, self.refuse))

    def remove(self):
        for name, function in self.before.items():
            setattr(dist, name, function)

    def count(self, operations):
        self.kinds.append("point_to_point")
        self.sent += sum(x.tensor.nbytes for x in operations if x.op is dist.isend)
        return self.before["batch_isend_irecv"](operations)

    def count_all_to_all(self, received, sent, *sizes, **options):
        if sent.dtype == torch.uint8:  # rows
            self.kinds.append("all_to_all")
            self.sent += sent.nbytes
        return self.before["all_to_all_single"](received, sent, *sizes, **options)

    def count_all_gather(self, received, sent, **options):
        if sent.dtype == torch.uint8 and sent.nbytes > 48:  # no digest of a call
            self.kinds.append("all_gather")
            self.sent += sent.nbytes * (len(received) - 1)
        return self.before["all_gather"](received, sent, **options)

    @staticmethod
    def refuse(*_, **__):
        raise AssertionError("a reducing collective")

    def taken(self):
        sent, kinds, self.sent, self.kinds = self.sent, self.kinds, 0, []
        return sent, kinds


def allowed(pattern, shape):
    """The pairs of each batch entry and query head, from the predicate: (batch, heads_q, length, length) bool."""
    own, index = pattern.variants(*shape[:2])
    at = np.arange(shape[3])
    pairs = np.stack([x.bind(shape[3], shape[3]).allows(at[:, None], at) for x in own])
    return pairs[np.broadcast_to(index, shape[:2])]


def needed_bytes(pattern, shape, dtype, sharding, rank, kinds):
    """Bytes that a rank must send forward and backward by exchanges of these kinds.

    They are the rows of others' pairs, once for each head of k and q, or in an all-gather those of the largest shard.
    """
    batch, heads_q, heads_kv, length, head_dim, head_dim_v = shape
    pairs, owners = allowed(pattern, shape), sharding.owners()
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    of_keys = of_rows = 0
    for peer in set(range(sharding.world_size)) - {rank}:
        keys = pairs[:, :, owners == peer][..., owners == rank].any(axis=2)
        of_keys += int(keys.reshape(batch, heads_kv, heads_q // heads_kv, -1).any(axis=2).sum())
        rows = pairs[:, :, owners == rank][..., owners == peer].any(axis=3)
        of_rows += int(rows.sum())
    widths = (head_dim + head_dim_v) * size, (head_dim + 2 * head_dim_v) * size + max(4, size)
    found = [of_keys * widths[0], of_rows * widths[1]]
    most = max(len(sharding.rows(of)) for of in range(sharding.world_size))
    for number, heads in enumerate((heads_kv, heads_q)):
        if kinds[number] == "all_gather":
            found[number] = (sharding.world_size - 1) * batch * heads * most * widths[number]
    return found


def bits(rank):
    """Forward and backward have the bits of one process, and no row travels in vain."""
    wire = Wire()
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    registered = {
        name: (of, (*of.sizes(), 1, length, 16, 16), "float32", {})
        for name in p.registry.names()
        for of, length, _ in [p.registry.example(name)]
    }
    names, count, chosen = ("contiguous", "balanced", "head_tail", "striped"), 0, set()
    for name, (pattern, shape, dtype, options) in (CASES | registered).items():
        shape = (*(max(1, x) for x in shape[:2]), *shape[2:])
        q, k, v, dout = tensors(shape, dtype)
        if name == "padding":  # where no query looks
            k[:, :, 101], v[:, :, 203] = math.nan, math.inf
        want = gradients(lambda *x, of=pattern, more=options: spattn.attention(*x, of, **more), (q, k, v), dout)
        for size, group in groups.items():
            for of in names if name in ("window", "streaming") else (names[count % 4], names[(count + 1) % 4]):
                count += 1
                if name in registered and count % 3:
                    continue
                if rank >= size:
                    continue
                sharding = sd.shard(pattern, shape[:5], size, of, dtype=dtype)
                rows = torch.from_numpy(sharding.rows(rank))
                own = [x[:, :, rows] for x in (q, k, v, dout)]
                exchange = ("auto", *EXCHANGES)[count % 4]
                given = {"length": shape[3], "sharding": sharding, "exchange": exchange, **options}
                sent = []

                def compute(*x, of=pattern, group=group, given=given, sent=sent):
                    out = sd.attention(*x, of, group, **given)
                    sent.append(wire.taken())
                    return out

                got = gradients(compute, own[:3], own[3])
                sent.append(wire.taken())
                assert same_bits(got, [x[:, :, rows] for x in want]), (name, size, of)
                kinds = [exchange] * 2
                if exchange == "auto":
                    kinds = [
                        sd.simulate(pattern, shape[:5], size, sharding=of, dtype=dtype, backward=backward).exchange
                        for backward in (False, True)
                    ]
                want_sent = needed_bytes(pattern, shape, dtype, sharding, rank, kinds)
                assert [x for x, _ in sent] == want_sent, (name, size, of, kinds, sent)
                for kind, (_, used) in zip(kinds, sent, strict=True):
                    assert used in ([kind], []) if kind == "point_to_point" else used == [kind], (name, kind, used)
                    chosen.add(kind if exchange == "auto" else None)
    assert count > 90 and (rank or chosen == {None, *EXCHANGES}), chosen
    wire.remove()


#: Pattern, (batch, heads_q, heads_kv, length, head_dim, head_dim_v), dtype.
LEARNED = {
    "streaming": (p.Causal() & (p.Sinks(4) | p.SlidingWindow(60, 0)), (2, 4, 2, 333, 32, 32), "float32"),
    "strided": (p.strided(16) | p.SlidingWindow(5), (1, 4, 2, 320, 16, 24), "bfloat16"),
    "clusters": (p.Clusters(np.arange(301) * 7919 % 9) | p.GlobalTokens((3,)), (1, 2, 2, 301, 16, 16), "float64"),
    "heads": (p.PerHead((p.Causal(), p.SlidingWindow(9), p.strided(7), p.Full())), (2, 4, 4, 111, 16, 16), "float32"),
    "few": (p.Full(), (1, 2, 1, 3, 16, 16), "float32"),
}


def learned(rank):
    """Each element of the gradients of sinks and captured arrays is on one rank, with the bits of one process."""
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    names = ("contiguous", "balanced", "head_tail", "striped")
    for number, (pattern, shape, dtype) in enumerate(LEARNED.values()):
        batch, heads, _, length, *_ = shape
        *own, dout = tensors(shape, dtype, number)
        generator = torch.Generator().manual_seed(number)
        sizes = (heads,), (heads, 2 * length), (length,), (batch, heads, length, length)
        slopes, diagonals, keys, pairs = leaves = [
            torch.rand(size, generator=generator).mul_(0.1).requires_grad_() for size in sizes
        ]
        leaves.append(sinks := torch.rand(heads, generator=generator).requires_grad_())
        fixed = np.float32([0.5])  # a captured array without a gradient

        def biased(s, b, h, q, k, of=(slopes, diagonals, keys, pairs), fixed=fixed):
            slopes, diagonals, keys, pairs = of
            return s + slopes[h] * (k - q) * 0.01 + diagonals[h, k - q] + keys[k] * fixed[0] + pairs[b, h, q, k]

        def found(compute, given, dout, leaves=leaves):
            given = [x.clone().requires_grad_() for x in given]
            out = compute(*given)
            return out.detach(), *torch.autograd.grad(out, given + leaves, dout)

        options = {"score": biased, "sinks": sinks}
        want = found(lambda *x, of=pattern, more=options: spattn.attention(*x, of, **more), own, dout)
        for size, group in groups.items():
            if rank >= size:
                continue
            sharding = sd.shard(pattern, shape[:5], size, names[(number + size) % 4], dtype=dtype)
            rows = torch.from_numpy(sharding.rows(rank))
            more = {"length": length, "sharding": sharding, **options}
            got = found(
                lambda *x, of=pattern, group=group, more=more: sd.attention(*x, of, group, **more),
                [x[:, :, rows] for x in own],
                dout[:, :, rows],
            )
            assert same_bits(got[:4], [x[:, :, rows] for x in want[:4]]), (number, size)
            for at, (part, whole) in enumerate(zip(got[4:], want[4:], strict=True)):
                parts = [torch.empty_like(part) for _ in range(size)]
                dist.all_gather(parts, part, group=group)
                parts = torch.stack(parts)
                assert ((parts != 0).sum(0) <= 1).all() and torch.equal(parts.sum(0), whole), (number, size, at)


def heads(rank):
    """If heads travel, the bits are those of one process, and a rank sends its rows of the others' heads alone."""
    wire = Wire()
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
    made = {name: p.registry.example(name)[:2] for name in p.registry.names()}
    made = {name: found for name, found in made.items() if found[0].sizes() == (1, 1)}
    made |= {
        "union": (p.Causal() & (p.Sinks(3) | p.strided(9)) | p.SlidingWindow(5, 2), 211),
        "intersection": (p.longformer(30, global_tokens=2) & (p.Causal() | p.DilatedWindow(4, 4, 3)), 130),
        "few": (p.Full(), 3),  # a rank has no row
    }
    names = "contiguous", "balanced", "head_tail", "striped"
    for number, (name, (pattern, length)) in enumerate(made.items()):
        shape = ((1, 8, 4), (2, 4, 4), (1, 12, 12), (9, 8, 4))[number % 4] + (length, 16, (16, 24)[number % 2])
        dtype = ("float32", "float64", "bfloat16", "float16")[number // 2 % 4]
        q, k, v, dout = tensors(shape, dtype, number)
        want = gradients(lambda *x, of=pattern: spattn.attention(*x, of), (q, k, v), dout)
        for size, group in groups.items():
            if rank >= size or (size == 1 and number % 4):
                continue
            sharding = sd.shard(pattern, shape[:5], size, names[(number + size) % 4], dtype=dtype)
            rows = torch.from_numpy(sharding.rows(rank))
            own = [x[:, :, rows] for x in (q, k, v, dout)]
            own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in own] if number % 3 else own
            given = {"length": length, "sharding": sharding, "exchange": "heads"}
            got = gradients(
                lambda *x, of=pattern, to=group, more=given: sd.attention(*x, of, to, **more), own[:3], own[3]
            )
            assert same_bits(got, [x[:, :, rows] for x in want]), (name, size)
            sent, kinds = wire.taken()
            assert set(kinds) <= {"point_to_point"}
            of_row = sum(x[:, :, :1].nbytes for x in (q, k, v, dout)) // size  # of the heads of a rank
            assert sent == of_row * (len(rows) * (size - 1) + length - len(rows)), (name, size, sent)
    wire.remove()
    q, k, v, _ = tensors((1, 4, 2, 30, 16, 16), "float32")

    def attend(of="full", q=q, k=k, v=v, **more):
        return sd.attention(q, k, v, of, exchange="heads", **more)

    each = p.PerHead([p.Causal(), p.Full(), p.Causal(), p.Causal()])
    wide = torch.cat([k, k], 1), torch.cat([v, v], 1)
    raises(ValueError, ["key-value heads that 4 ranks divide, got 2", "exchange='auto'"], attend)
    raises(ValueError, ["same pattern for all heads"], lambda: attend(each, k=wide[0], v=wide[1]))
    for more in ({"dropout_p": 0.5}, {"sinks": torch.zeros(4)}, {"score": score.softcap(2.0)}):
        raises(ValueError, ["does not support"], lambda more=more: attend(k=wide[0], v=wide[1], **more))
    one, other = (
        sd.attention(q.clone().requires_grad_(), *wide, exchange="heads", scale=scale).sum() for scale in (0.25, 0.5)
    )
    raises(ValueError, ["gradients of different calls"], (other if rank == 2 else one).backward)


def given(rank):
    """Masks that change after the forward pass, and shardings that leave rows to nobody."""
    q, k, v, dout = tensors((1, 4, 4, 40, 16, 16), "float32")
    rows = slice(10 * rank, 10 * rank + 10)
    own, mask = [x[:, :, rows] for x in (q, k, v, dout)], np.tri(40, dtype=bool)
    want = gradients(lambda *x: spattn.attention(*x, np.tri(40, dtype=bool)), (q, k, v), dout)
    for exchange in ("auto", *EXCHANGES, "heads"):
        mine, leaves = mask.copy(), [x.clone().requires_grad_() for x in own[:3]]
        out = sd.attention(*leaves, mine, exchange=exchange)
        mine[:] = True
        got = out.detach(), *torch.autograd.grad(out, leaves, own[3])
        assert same_bits(got, [x[:, :, rows] for x in want]), exchange
    wrong = [((0, 20, 40), (0, 4), "ranks"), ((0, 20, 40), (0, -1), "ranks"), ((5, 20, 40), (0, 1), "from 0")]
    wrong += [((0, 30, 20, 40), (0, 1, 2), "ascending"), ((0, 20, 40), (0, 1, 2), "one more than ranks")]
    for exchange in ("auto", "heads"):
        for bounds, ranks, word in wrong:
            sharding = sd.Sharding(bounds, ranks, 4)
            call = functools.partial(sd.attention, *own[:3], "full", length=40, sharding=sharding, exchange=exchange)
            raises(ValueError, ["sharding", word], call)
    raises(TypeError, ["q: expected a torch tensor"], lambda: sd.attention(*(x.numpy() for x in own[:3])))
    sd.attention(*own[:3], "full", sharding=sd.Sharding([0, 10, 20, 30, 40], [0, 1, 2, 3], 4))


def raises(kind, words, call):
    try:
        call()
    except kind as error:
        assert type(error) is kind and all(word in str(error) for word in words), repr(error)
        return
    raise AssertionError(f"no {kind.__name__}")


def mismatches(rank):
    """Every rank gets the error of one, and the next call works."""
    q, k, v, _ = tensors((1, 2, 2, 32, 16, 16), "float32", rank)
    odd = rank == 2

    def attend(q=q, k=k, v=v, of="full", **options):
        return sd.attention(q, k, v, of, **options)

    short = {"q": q[:, :, :31], "k": k[:, :, :31], "v": v[:, :, :31]}
    cases = [
        (ValueError, ["dtype", "float64 on ranks [2]"], {"q": q.double(), "k": k.double(), "v": v.double()}, {}),
        (ValueError, ["pattern"], {"of": p.SlidingWindow(3)}, {}),
        (ValueError, ["seed", "6 on ranks [2]"], {"seed": 6}, {"dropout_p": 0.5, "seed": 5}),
        (ValueError, ["shape", "(1, 1, 1, 128, 16, 16)"], {"q": q[:, :1], "k": k[:, :1], "v": v[:, :1]}, {}),
        (ValueError, ["scale", "0.5 on ranks [2]"], {"scale": 0.5}, {}),
        (ValueError, ["sinks"], {"sinks": torch.ones(2)}, {"sinks": torch.zeros(2)}),
        (ValueError, ["sinks: digest"], {"sinks": torch.ones(2)}, {}),
        (ValueError, ["score"], {"score": score.softcap(2.0)}, {"score": score.softcap(3.0)}),
        (ValueError, ["exchange", "all_gather on ranks [2]"], {"exchange": "all_gather"}, {}),
        (ValueError, ["sharding"], {"sharding": "striped"}, {"sharding": "head_tail"}),
        (ValueError, ["expected 32 of 128 rows on rank 2, got 31"], short, {"length": 128}),
    ]
    for number, (kind, words, changed, same) in enumerate(cases):
        same = {"scale": 0.1 + number} | same  # not compared before
        raises(kind, words, lambda changed=changed, same=same: attend(**(same | (changed if odd else {}))))
        attend(**same)
    wrong = (TypeError, ["q:"]) if odd else (ValueError, ["rank 2 raised TypeError: q:"])
    raises(*wrong, lambda: attend(q=q.int() if odd else q))
    raises(ValueError, ["q: expected 31 of 127 rows on rank 3" if rank == 3 else "rank"], lambda: attend(length=127))
    # Also if all ranks have compared either call before; messages would have other lengths.
    double = {"q": torch.cat([q, q]), "k": torch.cat([k, k]), "v": torch.cat([v, v])}
    short = {name: x[:, :, :16] for name, x in {"q": q, "k": k, "v": v}.items()}
    wide = {name: x.double() for name, x in {"q": q, "k": k, "v": v}.items()}
    calls = [
        (["shape", "(2, 2, 2, 128, 16, 16) on ranks [2]"], double),
        (["shape", "(1, 2, 2, 64, 16, 16) on ranks [2]"], short),
        (["dtype"], wide),
        (["pattern"], {"of": "causal"}),
        (["seed", "3 on ranks [2]"], {"dropout_p": 0.5, "seed": 3}),
        (["sinks: digest"], {"sinks": torch.ones(2)}),
    ]
    for number, (words, changed) in enumerate(calls):
        same = {"exchange": EXCHANGES[number % 3]}
        if "seed" in changed:
            same |= {"dropout_p": 0.5, "seed": 2}
        if "sinks" in changed:
            same["sinks"] = torch.zeros(2)
        for again in (same, same | changed, same):
            attend(**again)
        raises(ValueError, words, lambda same=same, changed=changed: attend(**(same | (changed if odd else {}))))
        attend(**same)
    for name, wrong in (("v", v[:, :, :31]), ("q", q[0])):
        changed = {name: wrong} if odd else {}
        words = [f"{name}: expected"] if odd else [f"rank 2 raised ValueError: {name}: expected"]
        raises(ValueError, words, lambda changed=changed: attend(**changed))
        attend()
    one, other = (attend(q=q.clone().requires_grad_(), scale=scale).sum() for scale in (0.25, 0.5))
    raises(ValueError, ["gradients of different calls"], (other if odd else one).backward)
    raises(ValueError, ["exchange: expected 'auto' or one of", "'ring'"], lambda: attend(exchange="ring"))
    os.environ["SPATTN_CHECK_RANKS"] = "1"
    raises(ValueError, ["seed"], lambda: attend(dropout_p=0.5, seed=rank))
    attend(dropout_p=0.5, seed=2)
    del os.environ["SPATTN_CHECK_RANKS"]
    sinks = torch.zeros(2, requires_grad=odd)
    raises(ValueError, ["which arrays need gradients", "(True,) on ranks [2]"], lambda: attend(sinks=sinks))
    needing = q.clone().requires_grad_(odd)
    raises(ValueError, ["whether one needs gradients", "True on ranks [2]"], lambda: attend(q=needing))
    far = (q * (1e6 if odd else 1)).requires_grad_()
    raises(ValueError, ["ranks [2]", "scale"], lambda: attend(q=far).sum().backward())
    attend()


def memberships(rank):
    """A rank calls with its own group."""
    q, k, v, _ = tensors((1, 2, 2, 10, 16, 16), "float32")
    group = dist.new_group([0, 1])
    if rank < 2:
        sd.attention(q, k, v, "full", group)
    else:
        raises(ValueError, ["group: this rank is not in the group"], lambda: sd.attention(q, k, v, "full", group))


def dtensors(rank):
    """DTensors in and out, on a mesh and on a dimension of one, with shards of different lengths."""
    shape = 1, 4, 2, 90, 16, 16
    q, k, v, dout = tensors(shape, "float32")
    want = gradients(lambda *x: spattn.attention(*x, p.SlidingWindow(9)), (q, k, v), dout)
    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
    own = [torch.distributed.tensor.distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v, dout)]
    assert rank != 3 or own[0].to_local().shape[2] == 21
    got = gradients(lambda *x: sd.attention(*x, p.SlidingWindow(9)), own[:3], own[3])
    assert all(isinstance(x, DTensor) and x.placements == (Shard(2),) for x in got)
    assert same_bits([x.full_tensor() for x in got], want)
    local = sd.attention(*(x.to_local() for x in own[:3]), p.SlidingWindow(9), mesh, length=90)
    assert same_bits([local], [got[0].to_local()])
    raises(TypeError, ["k: expected a DTensor"], lambda: sd.attention(own[0], k, v))
    raises(
        ValueError, ["q: expected Shard(2)"], lambda: sd.attention(*(x.redistribute(mesh, [Shard(3)]) for x in own[:3]))
    )
    # A mesh of heads and rows: bits of one process with these heads.
    mesh = dist.init_device_mesh("cpu", (2, 2))
    own = [torch.distributed.tensor.distribute_tensor(x, mesh, [Shard(1), Shard(2)]) for x in (q, k, v, dout)]
    got = gradients(lambda *x: sd.attention(*x, p.SlidingWindow(9)), own[:3], own[3])
    halves = [[x.chunk(2, 1)[half] for x in (q, k, v, dout)] for half in range(2)]
    want = [gradients(lambda *x: spattn.attention(*x, p.SlidingWindow(9)), x[:3], x[3]) for x in halves]
    assert same_bits([x.full_tensor() for x in got], [torch.cat(x, 1) for x in zip(*want, strict=True)])
    raises(ValueError, ["not supported with sharded"], lambda: sd.attention(*own[:3], dropout_p=0.1, seed=1))
    # Patterns and sinks of heads go where the heads are, on this mesh and if heads alone are sharded.
    each, sinks = [p.Causal(), p.SlidingWindow(9), p.strided(7), p.Full()], torch.arange(4.0, requires_grad=True)
    own = [x.detach() for x in own]
    halves = [[x.chunk(2, 1)[half] for x in (q, k, v)] for half in range(2)]
    parts = [
        spattn.attention(*x, p.PerHead(each[2 * half : 2 * half + 2]), sinks=sinks[2 * half : 2 * half + 2])
        for half, x in enumerate(halves)
    ]
    for placements in ([Shard(1), Shard(2)], [Shard(1), Replicate()]):
        got = sd.attention(*(x.redistribute(mesh, placements) for x in own[:3]), p.PerHead(each), sinks=sinks)
        assert same_bits([got.full_tensor()], [torch.cat(parts, 1)]) and got.placements == tuple(placements)
        # Gradients of sinks are summed over the dimensions that shard q.
        (of_sinks,) = torch.autograd.grad(got.to_local().sum(), sinks)
        for number, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dist.all_reduce(of_sinks, group=mesh.get_group(number))
        (want,) = torch.autograd.grad(torch.cat(parts, 1).sum(), sinks, retain_graph=True)
        assert torch.equal(of_sinks, want)

    # So do patterns of batch entries; a rank may have no entry.
    for batch in (3, 1):
        q, k, v, _ = tensors((batch, 4, 2, 90, 16, 16), "float32")
        pattern = p.PerBatch([p.PerHead(each[n:] + each[:n]) for n in range(batch)]) | p.Sinks(2) & p.Causal()
        placements = [Shard(0), Shard(2)]
        own = [torch.distributed.tensor.distribute_tensor(x, mesh, placements) for x in (q, k, v)]
        got = sd.attention(*own, pattern).full_tensor()
        torch.testing.assert_close(got, spattn.attention(q, k, v, pattern), atol=1e-5, rtol=1e-5)


def modules(rank):
    """``ContextParallel`` on a layer and on a module of q, k and v, with a pattern and sharding of its own."""
    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
    torch.manual_seed(5)
    layer = SparseAttention(32, 4, p.Causal() & p.SlidingWindow(30, 0), num_kv_heads=2, sinks=True)
    x = torch.randn(2, 90, 32)
    want = layer(x, x, x)[0]
    (of_sinks,) = torch.autograd.grad(want.sum(), [layer.sinks], retain_graph=True)
    sharding = sd.shard("causal", (2, 4, 2, 90, 8), WORLD_SIZE, "head_tail")
    rows = torch.from_numpy(sharding.rows(rank))
    sharded = parallelize_module(layer, mesh, sd.ContextParallel(length=90, sharding=sharding))
    own = x[:, rows].requires_grad_()
    torch.testing.assert_close(sharded(own, own, own)[0], want[:, rows])
    assert sharded(own, own, own)[0].sum().backward() is None and own.grad.abs().sum() > 0
    dist.all_reduce(layer.sinks.grad)  # as of any parameter of all ranks
    torch.testing.assert_close(layer.sinks.grad, of_sinks)
    mask = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    raises(ValueError, ["not supported over several ranks"], lambda: sharded(own, own, own, attn_mask=mask))

    class Inner(torch.nn.Module):
        def forward(self, q, k, v):
            return spattn.attention(q, k, v, "causal")

    model = torch.nn.ModuleDict({"attn": Inner()})
    q, k, v, _ = tensors((1, 4, 2, 80, 16, 16), "float32")
    want = model["attn"](q, k, v)
    parallelize_module(model, mesh, {"attn": sd.ContextParallel("causal")})
    own = [torch.distributed.tensor.distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    assert same_bits([model["attn"](*own).full_tensor()], [want])


def graphs(rank):
    """In a checkpoint and in a compiled function, which breaks its graph there."""
    q, k, v, dout = tensors((1, 2, 2, 80, 16, 16), "float32")
    rows = slice(20 * rank, 20 * rank + 20)
    own = [x[:, :, rows] for x in (q, k, v, dout)]
    want = gradients(lambda *x: 2 * spattn.attention(*x, p.SlidingWindow(9)), (q, k, v), dout)

    def twice(*x):
        return 2 * sd.attention(*x, p.SlidingWindow(9))

    def checkpointed(*x):
        return torch.utils.checkpoint.checkpoint(twice, *x, use_reentrant=False)

    for compute in (twice, checkpointed, torch.compile(twice, backend="eager")):
        assert same_bits(gradients(compute, own[:3], own[3]), [x[:, :, rows] for x in want])


def example(rank):
    """The examples compare several processes with one."""
    hybrid_block.compare(hybrid_block.arguments("--width 48 --heads 4 --length 70 --repeats 1".split()))
    long_context.compare(long_context.arguments("--length 200 --width 32 --steps 2".split()))


def faults(rank):
    """One rank dies and one stops while rows travel: the others get errors within the timeout; another group works."""
    timeout = datetime.timedelta(seconds=3)
    groups = [*(dist.new_group([0, 1, 2, 3], timeout=timeout) for _ in range(3)), dist.new_group([0, 1])]
    q, k, v, _ = tensors((1, 2, 2, 20, 16, 16), "float32", rank)
    pending = sd.attention(q.clone().requires_grad_(), k, v, "full", groups[2])
    for group in groups[: 4 if rank < 2 else 3]:
        sd.attention(q, k, v, "full", group)
    if rank >= 2:
        end = signal.SIGKILL if rank == 2 else signal.SIGSTOP
        sys.modules["spattn.distributed._attention"].exchange = lambda *_: os.kill(os.getpid(), end)
    words = ["died", "new process group"]
    begin = time.monotonic()
    raises(RuntimeError, [*words, "no exchange"], lambda: sd.attention(q, k, v, "full", groups[0]))
    for call in (lambda: sd.attention(q, k, v, "causal", groups[1]), pending.sum().backward):
        raises(RuntimeError, [*words, "compare"], call)
    assert time.monotonic() - begin < 30
    sd.attention(q, k, v, "full", groups[3])


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    for part in (bits, heads, given, learned, mismatches, memberships, dtensors, modules, graphs, example, faults):
        part(rank)
        print(part.__name__, flush=True)
    os._exit(0)  # the default group has lost ranks
