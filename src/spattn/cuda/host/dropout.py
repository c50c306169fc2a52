"""Random words of attention dropout in device memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...request.dropout import DeviceSeed
from ..driver.device import Device
from ..driver.launch import Request, kernel
from ..driver.structs import packer

__all__ = ["DROPOUT_WORDS", "launch_words", "words_request"]

DROPOUT_WORDS = np.dtype(
    [
        *((name, "u8") for name in ("rows", "words", "seed", "device_seed")),
        *((name, "i4") for name in ("batch", "heads_q", "q_len", "kv_len")),
    ]
)
_pack = packer(DROPOUT_WORDS).pack


def words_request(device: Device) -> Request:
    """Return the request for the kernel that computes the words."""
    structs = {"DropoutWords": DROPOUT_WORDS}
    return Request("common/dropout_words.cu", device.arch, {}, structs, "dropout_words")


def launch_words(
    device: Device,
    stream: int,
    seed: int | DeviceSeed,
    batch: int,
    heads_q: int,
    q_len: int,
    kv_len: int,
    allocate: Callable[[int], int],
) -> tuple[int, int]:
    """Enqueue the kernel that computes the words of all queries and keys; the device's context must be current.

    Returns
    -------
    tuple of int
        Addresses of (batch, heads_q, q_len, 2) words of the queries and (batch, heads_q, kv_len) words of the keys, in
        memory of `allocate`: :func:`spattn.request.dropout.words` on the device.
    """
    rows = allocate(4 * batch * heads_q * (2 * q_len + kv_len))
    words = rows + 8 * batch * heads_q * q_len
    own = kernel(device, words_request(device))
    blocks = -(-batch * heads_q * (q_len + kv_len) // own.threads)
    seeds = (0, seed.address) if isinstance(seed, DeviceSeed) else (seed, 0)
    own.launch(blocks, _pack(rows, words, *seeds, batch, heads_q, q_len, kv_len), stream)
    return rows, words
