# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Rows of keys as bits: evaluate row programs, set the keys of runs, find equal rows.

Bit b of word w of a row is key ``64 * w + b``.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc
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
    if step == 1 and low < high:
        row[low] |= ALL << (start & 63)
        memset(row + low + 1, 0xFF, (high - low - 1) * sizeof(uint64_t))
        row[high] |= ALL >> (63 - (last & 63))
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


cdef int check_program(const Instruction* at, int64_t count, int64_t depth) except -1:
    """Raise ValueError unless a row program is valid and has at most `depth` operands at a time."""
    cdef int64_t n, level = 0
    cdef bint bad
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
    return 0


cdef void run_at(
    const Instruction* at, int64_t count, int64_t q, int64_t kv_len, int64_t words, uint64_t* result, uint64_t* rest
) noexcept nogil:
    """Write the bits of the row at position `q` to `result`; `rest` holds the other operands, each `words` long."""
    cdef int64_t n, word, level = 0
    cdef uint64_t* top
    cdef uint64_t* below
    for n in range(count):
        if at[n].operation == EMPTY:
            level += 1
        top = result if level == 1 else rest + (level - 2) * words
        if at[n].operation == EMPTY:
            memset(top, 0, words * sizeof(uint64_t))
        elif at[n].operation == RUN:
            add_run(top, &at[n], q, kv_len)
        elif at[n].operation == WHOLE:
            if at[n].start.by <= q < at[n].stop.by:
                memset(top, 0xFF, words * sizeof(uint64_t))
        elif at[n].operation == NOT:
            for word in range(words):
                top[word] = ~top[word]
        else:
            below = result if level == 2 else rest + (level - 3) * words
            if at[n].operation == OR:
                for word in range(words):
                    below[word] |= top[word]
            else:
                for word in range(words):
                    below[word] &= top[word]
            level -= 1


def run_programs(programs, const int64_t[:, :, ::1] q, int64_t kv_len):
    """Return the bits of rows, (batch, programs, rows, words): the results of the row programs of heads.

    `q` has their positions, (batch, 1 or programs, rows). Each program comes with its largest number of operands at a
    time.
    """
    cdef int64_t batch = q.shape[0], heads = len(programs), rows = q.shape[2], words = (kv_len + 63) // 64
    cdef int64_t head, entry, row, depth, count
    cdef const int64_t[:, ::1] program
    cdef const Instruction* at
    cdef uint64_t[:, :, :, ::1] result
    cdef uint64_t* rest
    if q.shape[1] not in (1, heads):
        raise ValueError(f"q: expected positions of 1 or {heads} heads, got {q.shape[1]}")
    found = np.empty((batch, heads, rows, words), np.uint64)
    result = found
    for head in range(heads):
        program, depth = programs[head]
        if program.shape[1] * sizeof(int64_t) != sizeof(Instruction):
            raise ValueError("program: expected instructions of 8 numbers")
        count = program.shape[0]
        at = <const Instruction*>&program[0, 0] if count else NULL
        check_program(at, count, depth)
        if found.size == 0:
            continue
        rest = NULL
        if depth > 1:
            rest = <uint64_t*>malloc((depth - 1) * words * sizeof(uint64_t))
            if rest is NULL:
                raise MemoryError(f"{depth - 1} rows of {words} words")
        with nogil:
            for entry in range(batch):
                for row in range(rows):
                    run_at(at, count, q[entry, head if q.shape[1] > 1 else 0, row], kv_len, words,
                           &result[entry, head, row, 0], rest)
        free(rest)
    return found


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


def clear_beyond(uint64_t[:, :, :, ::1] words, int64_t kv_len):
    """Clear the bits of rows that are beyond `kv_len` keys, in words of any number of batch entries, heads and rows."""
    cdef int64_t entry, head, row, last = words.shape[3] - 1
    if words.shape[3] != (kv_len + 63) // 64:
        raise ValueError(f"words: expected {(kv_len + 63) // 64} for {kv_len} keys, got {words.shape[3]}")
    for entry in range(words.shape[0] if kv_len % 64 else 0):
        for head in range(words.shape[1]):
            for row in range(words.shape[2]):
                words[entry, head, row, last] &= ALL >> (64 - kv_len % 64)


def distinct_rows(const uint64_t[:, ::1] rows):
    """Number the distinct rows in order of their first occurrence, (rows,) int32; return also their first rows."""
    cdef int64_t count = rows.shape[0], words = rows.shape[1], row, number, distinct = 0
    cdef const uint64_t* own
    cdef uint64_t value
    found, hashes, firsts = np.empty(count, np.int32), np.empty(count, np.uint64), np.empty(count, np.int64)
    cdef int32_t[::1] index = found
    cdef uint64_t[::1] hashed = hashes  # of the distinct rows
    cdef int64_t[::1] first = firsts
    if words == 0:
        return np.zeros(count, np.int32), np.zeros(min(count, 1), np.int64)
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
    return found, firsts[:distinct]


def hash_words(const uint64_t[::1] words):
    """Return a hash of an array of words; ``hash(words.tobytes())`` takes ten times as long."""
    return <int64_t>hash_of(&words[0], words.shape[0]) if words.shape[0] else 0
