"""Attention with sinks and its gradients by a dense formula, exact or with the rounding errors of kernels."""

from __future__ import annotations

import numpy as np

__all__ = ["NAMES", "dense", "lossy"]

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def dense(q, k, v, mask, scale, sinks, dout, dlse, dtype=None, *, wide=np.float64, order=0, ulps=0):
    """Out, lse, dq, dk, dv and dsinks in `wide`. A sink is one more column of scores, without a value.

    With `dtype` every step is rounded to it, and results on which others depend are wrong by `ulps` units in the last
    place: lse where it scales out, and both in the backward. Other values of `order` permute the keys and features, sum
    the features of scores in sequence, or use powers of 2, as kernels do.
    """
    wide = np.dtype(wide) if dtype is None else np.promote_types(dtype, np.float32)
    scale, group = wide.type(scale), q.shape[1] // k.shape[1]
    sizes, rng = (k.shape[2], q.shape[3], v.shape[3]), np.random.default_rng(order)
    keys, features, columns = (rng.permutation(n) if order else np.arange(n) for n in sizes)

    def rounded(x):
        return x.astype(wide) if dtype is None else x.astype(dtype).astype(wide)

    def scores():
        if not order & 1:
            return q @ k.swapaxes(2, 3)
        total = np.zeros((*q.shape[:3], k.shape[2]), wide)
        for d in range(q.shape[3]):
            total += q[..., d, None] * k[..., None, :, d]
        return total

    def exponential(x):
        return np.exp2(x * wide.type(np.log2(np.e))) if order & 2 else np.exp(x)

    def over_group(x, own):
        x = rounded(x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2))
        found = np.empty_like(x)
        found[:, :, keys[:, None], own] = x
        return found

    q, dout, mask = rounded(q)[..., features], rounded(dout)[..., columns], mask[..., keys]
    k, v = (np.repeat(rounded(x)[:, :, keys][..., own], group, axis=1) for x, own in ((k, features), (v, columns)))
    sink = np.broadcast_to(sinks.astype(wide)[:, None, None], (*q.shape[:3], 1))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        s = np.where(mask, rounded(rounded(scores()) * scale), -np.inf)
        largest = np.maximum(s.max(axis=3, keepdims=True, initial=-np.inf), sink)
        p, own = (np.where(x == -np.inf, 0, exponential(x - largest)) for x in (s, sink))
        total = p.sum(axis=3, keepdims=True) + own
        p, own, lse = p / np.where(total == 0, 1, total), own / np.where(total == 0, 1, total), largest + np.log(total)
        error = 0 if dtype is None else ulps * np.where(total == 0, 0, np.spacing(np.where(total == 0, 1, lse)))
        out = rounded(rounded(p) @ v) * (1 + own * error)
        out_read = out if dtype is None else out + ulps * np.spacing(out.astype(dtype)).astype(wide)
        p, own = rounded(p * np.exp(-error)), own * np.exp(-error)
        delta = rounded((dout * out_read).sum(axis=3) - (0 if dlse is None else dlse.astype(wide)))
        ds = rounded(p * (rounded(dout @ v.swapaxes(2, 3)) - delta[..., None]))
        dq, result = np.empty_like(q), np.empty_like(out)
        dq[..., features], result[..., columns] = rounded(ds @ k * scale), rounded(out)
    dk, dv = over_group(ds.swapaxes(2, 3) @ q * scale, features), over_group(p.swapaxes(2, 3) @ dout, columns)
    return result, lse[..., 0], dq, dk, dv, -(own[..., 0] * delta).sum(axis=(0, 2))


def lossy(dtype, orders, *problem, ulps=1):
    """The formula with rounding errors, in several orders: the results in each of them."""
    return [dense(*problem, dtype, order=order, ulps=(0, -ulps, ulps)[order % 3]) for order in range(orders)]
