# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Rows of keys as bits: set the keys of runs, and list the tiles of 64 keys with any allowed key.

Bit b of word w of a row is key ``64 * w + b``.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

import numpy as np


cdef uint64_t ALL = ~<uint64_t>0


cdef void set_run(uint64_t* row, int64_t start, int64_t step, int64_t count) noexcept nogil:
    """Set the bits ``start + step * t``, ``0 <= t < count``; `count` is positive."""
    cdef int64_t last = start + step * (count - 1), word, low = start >> 6, high = last >> 6
    cdef int64_t bit = 0, first, back, key
    cdef uint64_t every = 0, bits
    if step >= 64 or count == 1:
        for key in range(count):
            row[(start + step * key) >> 6] |= <uint64_t>1 << ((start + step * key) & 63)
        return
    while bit < 64:
        every |= <uint64_t>1 << bit
        bit += step
    first, back = (start & 63) % step, 64 % step  # `first` is the lowest bit of a word with the run's remainder
    for word in range(low, high + 1):
        bits = every << first
        if word == low:
            bits &= ALL << (start & 63)
        if word == high:
            bits &= ALL >> (63 - (last & 63))
        row[word] |= bits
        first += step - back if first < back else -back


def set_runs(
    uint64_t[:, ::1] words, const int64_t[:, :] start, const int64_t[:, :] step, const int64_t[:, :] count,
    int64_t kv_len,
):
    """Set the bits of the keys of :class:`~spattn.index_set.Runs`; raise ValueError for a key outside kv_len keys."""
    cdef int64_t rows = start.shape[0], runs = start.shape[1], row, run
    cdef bint sound = words.shape[0] == step.shape[0] == count.shape[0] == rows and words.shape[1] * 64 >= kv_len
    if not sound or not step.shape[1] == count.shape[1] == runs:
        raise ValueError("runs: start, step and count must have one shape, with one row for each row of words")
    with nogil:
        for row in range(rows):
            for run in range(runs):
                if count[row, run] <= 0:
                    continue
                sound = step[row, run] > 0 and 0 <= start[row, run] < kv_len
                if not sound or count[row, run] - 1 > (kv_len - 1 - start[row, run]) // step[row, run]:
                    sound = False
                    break
                set_run(&words[row, 0], start[row, run], step[row, run], count[row, run])
            if not sound:
                break
    if not sound:
        raise ValueError(f"runs: expected keys in [0, {kv_len}) and positive steps")


cdef uint64_t any_of(const uint64_t[:, :, ::1] words, int64_t owner, int64_t word) noexcept nogil:
    """Return the bits of a tile that any row of an owner has."""
    cdef uint64_t found = 0
    cdef int64_t row
    for row in range(words.shape[1]):
        found |= words[owner, row, word]
    return found


def list_tiles(const uint64_t[:, :, ::1] words, int64_t block_q):
    """List the tiles in which any row of an owner allows a key, as runs of full tiles and single partial tiles.

    Return the fields indptr, tile_indptr, indices, mask and masks of a :class:`~spattn.Plan`. The bitmasks have
    `block_q` rows, of which those after the last row repeat it.
    """
    cdef int64_t owners = words.shape[0], rows = words.shape[1], owner, row, word, tiles = 0
    cdef int64_t at = 0, run = 0, partial = 0, last
    cdef bint full
    if rows < 1 or block_q < rows:
        raise ValueError(f"block_q: expected at least {max(rows, 1)}, got {block_q}")
    with nogil:
        for owner in range(owners):
            for word in range(words.shape[2]):
                tiles += any_of(words, owner, word) != 0
    own_indptr, own_tiles = np.zeros(owners + 1, np.int32), np.empty(tiles + 1, np.int64)
    own_indices, own_mask = np.empty(tiles, np.int32), np.empty(tiles, np.int32)
    own_masks = np.empty((tiles, block_q, 1), np.uint64)
    cdef int32_t[::1] indptr = own_indptr, indices = own_indices, mask = own_mask
    cdef int64_t[::1] tile_indptr = own_tiles
    cdef uint64_t[:, :, ::1] masks = own_masks
    with nogil:
        for owner in range(owners):
            last = -2  # last tile of the run of full tiles, if the previous tile is full
            for word in range(words.shape[2]):
                if not any_of(words, owner, word):
                    continue
                full = True
                for row in range(rows):
                    full = full and words[owner, row, word] == ALL
                if not full or last != word - 1:
                    tile_indptr[run], indices[run] = at, <int32_t>word
                    mask[run] = -1 if full else <int32_t>partial
                    run += 1
                if not full:
                    for row in range(block_q):
                        masks[partial, row, 0] = words[owner, min(row, rows - 1), word]
                    partial += 1
                last = word if full else -2
                at += 1
            indptr[owner + 1] = <int32_t>run
    tile_indptr[run] = at
    return own_indptr, own_tiles[:run + 1], own_indices[:run], own_mask[:run], own_masks[:partial]
