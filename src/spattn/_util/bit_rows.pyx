# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Rows of keys as bits: evaluate row programs, set the keys of runs, find equal rows, list non-empty tiles of 64 keys.

Bit b of word w of a row is key ``64 * w + b``.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcmp, memset

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


cdef enum:  # operations of a row program, in the order of patterns/hints/closed_forms.py
    EMPTY, RUN, WHOLE, OR, AND, NOT


cdef struct Place:  # patterns/hints/closed_forms.py
    int64_t by, block, offset


cdef struct Instruction:
    int64_t operation
    Place start, stop
    int64_t step


cdef inline int64_t place_of(Place place, int64_t q) noexcept nogil:
    cdef int64_t block
    if place.block == 0:
        return place.by
    if place.block == 1:
        return q + place.by
    block = (q - place.offset) // place.block
    block -= block * place.block > q - place.offset  # rounds towards -inf
    return block * place.block + place.offset + place.by


cdef void add_run(uint64_t* row, const Instruction* at, int64_t q, int64_t kv_len) noexcept nogil:
    """Set the bits of the keys of a run within the sequence."""
    cdef int64_t start = place_of(at.start, q), stop = min(place_of(at.stop, q), kv_len), step = at.step
    if start < 0:
        start = 0 if step == 1 else start + (step - 1 - start) // step * step
    if start < stop:
        set_run(row, start, step, stop - start if step == 1 else (stop - 1 - start) // step + 1)


def run_program(const int64_t[:, ::1] program, int64_t depth, const int64_t[::1] q, int64_t kv_len):
    """Return the bits of rows at positions `q`, (rows, words): the results of a row program.

    `depth` is the largest number of operands at a time.
    """
    cdef int64_t count = program.shape[0], rows = q.shape[0], words = (kv_len + 63) // 64, row, word, n, level = 0
    cdef bint bad
    cdef const Instruction* at = <const Instruction*>&program[0, 0] if count else NULL
    cdef uint64_t* top
    cdef uint64_t* below
    if program.shape[1] * sizeof(int64_t) != sizeof(Instruction):
        raise ValueError("program: expected instructions of 8 numbers")
    for n in range(count):
        if at[n].operation == EMPTY:
            level += 1
        elif at[n].operation in (OR, AND):
            level -= 1
        bad = not EMPTY <= at[n].operation <= NOT or not 1 <= level <= depth
        if bad or at[n].start.block < 0 or at[n].stop.block < 0 or at[n].operation == RUN and at[n].step < 1:
            raise ValueError(f"program: instruction {n} is invalid")
    if level != 1:
        raise ValueError(f"program: expected one result, got {level}")
    own_result, own_rest = np.empty((rows, words), np.uint64), np.empty((depth, words), np.uint64)
    if rows == 0 or words == 0:
        return own_result
    cdef uint64_t[:, ::1] result = own_result, rest = own_rest
    with nogil:
        for row in range(rows):
            level = 0
            for n in range(count):
                if at[n].operation == EMPTY:
                    level += 1
                top = &result[row, 0] if level == 1 else &rest[level - 1, 0]
                if at[n].operation == EMPTY:
                    memset(top, 0, words * sizeof(uint64_t))
                elif at[n].operation == RUN:
                    add_run(top, &at[n], q[row], kv_len)
                elif at[n].operation == WHOLE:
                    if at[n].start.by <= q[row] < at[n].stop.by:
                        memset(top, 0xFF, words * sizeof(uint64_t))
                elif at[n].operation == NOT:
                    for word in range(words):
                        top[word] = ~top[word]
                else:
                    below = &result[row, 0] if level == 2 else &rest[level - 2, 0]
                    if at[n].operation == OR:
                        for word in range(words):
                            below[word] |= top[word]
                    else:
                        for word in range(words):
                            below[word] &= top[word]
                    level -= 1
    return own_result


cdef inline uint64_t mixed(uint64_t value, uint64_t word) noexcept nogil:
    value = (value ^ word) * <uint64_t>0x9E3779B97F4A7C15
    return value ^ (value >> 32)


cdef uint64_t hash_of(const uint64_t* own, int64_t words) noexcept nogil:
    """Return a hash of a row, from four chains of multiplications that the processor overlaps."""
    cdef uint64_t a = 0, b = 1, c = 2, d = 3
    cdef int64_t word = 0
    while word + 4 <= words:
        a, b = mixed(a, own[word]), mixed(b, own[word + 1])
        c, d = mixed(c, own[word + 2]), mixed(d, own[word + 3])
        word += 4
    while word < words:
        a = mixed(a, own[word])
        word += 1
    return mixed(mixed(a, b), mixed(c, d))


def distinct_rows(const uint64_t[:, ::1] rows):
    """Number the distinct rows in order of their first occurrence: (rows,) int32."""
    cdef int64_t count = rows.shape[0], words = rows.shape[1], row, number, distinct = 0
    cdef const uint64_t* own
    cdef uint64_t value
    found, hashes, firsts = np.empty(count, np.int32), np.empty(count, np.uint64), np.empty(count, np.int64)
    cdef int32_t[::1] index = found
    cdef uint64_t[::1] hashed = hashes  # of the distinct rows
    cdef int64_t[::1] first = firsts
    if words == 0:
        return np.zeros(count, np.int32)
    with nogil:
        for row in range(count):
            own, number = &rows[row, 0], 0
            value = hash_of(own, words)
            while number < distinct and not (
                hashed[number] == value and memcmp(own, &rows[first[number], 0], words * sizeof(uint64_t)) == 0
            ):
                number += 1
            if number == distinct:
                hashed[number], first[number] = value, row
                distinct += 1
            index[row] = <int32_t>number
    return found


cdef inline uint64_t any_of(const uint64_t* own, int64_t rows, int64_t words) noexcept nogil:
    """Return the bits of a tile that any of `rows` rows has; `own` is the tile's word in the first."""
    cdef uint64_t found = own[0]
    cdef int64_t row
    for row in range(1, rows):
        found |= own[row * words]
    return found


def list_tiles(const uint64_t[:, :, ::1] words, int64_t block_q):
    """List the tiles in which any row of an owner allows a key, as runs of full tiles and single partial tiles.

    Return the fields indptr, tile_indptr, indices, mask and masks of a :class:`~spattn.Plan`. The bitmasks have
    `block_q` rows, of which those after the last row repeat it.
    """
    cdef int64_t owners = words.shape[0], rows = words.shape[1], count = words.shape[2], owner, row, word
    cdef int64_t tiles, at = 0, run = 0, partial = 0, last
    cdef const uint64_t* own
    cdef uint64_t every
    if rows < 1 or block_q < rows:
        raise ValueError(f"block_q: expected at least {max(rows, 1)}, got {block_q}")
    tiles = owners * count  # at most; pages that nothing is written to take no memory
    own_indptr, own_tiles = np.zeros(owners + 1, np.int32), np.empty(tiles + 1, np.int64)
    own_indices, own_mask = np.empty(tiles, np.int32), np.empty(tiles, np.int32)
    own_masks = np.empty((tiles, block_q, 1), np.uint64)
    cdef int32_t[::1] indptr = own_indptr, indices = own_indices, mask = own_mask
    cdef int64_t[::1] tile_indptr = own_tiles
    cdef uint64_t[:, :, ::1] masks = own_masks
    with nogil:
        for owner in range(owners if count else 0):
            own = &words[owner, 0, 0]
            last = -2  # the previous tile if it is full
            for word in range(count):
                if not any_of(own + word, rows, count):
                    continue
                every = ALL
                for row in range(rows):
                    every &= own[row * count + word]
                if every != ALL or last != word - 1:
                    tile_indptr[run], indices[run] = at, <int32_t>word
                    mask[run] = -1 if every == ALL else <int32_t>partial
                    run += 1
                last = word if every == ALL else -2
                if every != ALL:
                    for row in range(block_q):
                        masks[partial, row, 0] = own[min(row, rows - 1) * count + word]
                    partial += 1
                at += 1
            indptr[owner + 1] = <int32_t>run
    tile_indptr[run] = at
    return own_indptr, own_tiles[:run + 1], own_indices[:run], own_mask[:run], own_masks[:partial]
