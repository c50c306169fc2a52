"""Attention with sinks and its gradients by a dense formula, exact or with the rounding errors of kernels."""

from __future__ import annotations

import numpy as np

__all__ = ["NAMES", "dense", "lossy"]

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def dense(q, k, v, mask, scale, sinks, dout, dlse, dtype=None, *, wide=np.float64, order=0, ulps=0):
    """Out, lse, dq, dk, dv and dsinks in `wide`. A sink is one more column of scores, without a value.

    With `dtype` every step is rounded to it. The backward then takes the weights from a result of which out and lse are
    wrong by `ulps` units in the last place. Other values of `order` permute the keys and features.
    """
    wide = np.dtype(wide) if dtype is None else np.promote_types(dtype, np.float32)
    scale = wide.type(scale)
    rng, group = np.random.default_rng(order), q.shape[1] // k.shape[1]
    sizes = k.shape[2], q.shape[3], v.shape[3]
    keys, features, columns = (rng.permutation(n) if order else np.arange(n) for n in sizes)
    q, k, v, dout, sinks = (x.astype(wide) for x in (q, k, v, dout, sinks))
    dlse = np.zeros(q.shape[:3], wide) if dlse is None else dlse.astype(wide)
    q, dout, mask = q[..., features], dout[..., columns], mask[..., keys]
    k, v = (np.repeat(x[:, :, keys][..., own], group, axis=1) for x, own in ((k, features), (v, columns)))

    def rounded(x):
        return x if dtype is None else x.astype(dtype).astype(wide)

    def wrong(x):
        return x if dtype is None else x + ulps * np.spacing(x.astype(dtype)).astype(wide)

    def over_group(x, own):
        x = rounded(x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2))
        found = np.empty_like(x)
        found[:, :, keys[:, None], own] = x
        return found

    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        s = np.where(mask, rounded(rounded(q @ k.swapaxes(2, 3)) * scale), -np.inf)
        sink = np.broadcast_to(sinks[:, None, None], (*q.shape[:3], 1))
        largest = np.maximum(s.max(axis=3, keepdims=True, initial=-np.inf), sink)
        p, own = (np.where(x == largest, 1, np.exp(x - largest)) for x in (s, sink))
        p, own = (np.where(x == -np.inf, 0, y) for x, y in ((s, p), (sink, own)))
        total = p.sum(axis=3, keepdims=True) + own
        lse = largest + np.log(total)
        p, own = (np.where(total == 0, 0, x / total) for x in (p, own))
        out = rounded(rounded(p) @ v)
        if dtype is not None:
            error = np.where(lse == -np.inf, 1, np.exp(lse - wrong(lse)))
            p, own = p * error, own * error
        p = rounded(p)
        delta = rounded((dout * wrong(out)).sum(axis=3) - dlse)
        ds = rounded(p * (rounded(dout @ v.swapaxes(2, 3)) - delta[..., None]))
        dsinks = -(own[..., 0] * delta).sum(axis=(0, 2))
        dq, result = np.empty_like(q), np.empty_like(out)
        dq[..., features], result[..., columns] = rounded(ds @ k * scale), out
    dk, dv = over_group(ds.swapaxes(2, 3) @ q * scale, features), over_group(p.swapaxes(2, 3) @ dout, columns)
    return result, lse[..., 0], dq, dk, dv, dsinks


def lossy(dtype, orders, *problem):
    """The formula with rounding errors, in several orders: the results in each of them."""
    return [dense(*problem, dtype, order=order, ulps=(0, -1, 1)[order % 3]) for order in range(orders)]
