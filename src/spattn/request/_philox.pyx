# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Philox4x32-10, a counter-based random number generator.

Salmon, Moraes, Dror, Shaw. Parallel random numbers: as easy as 1, 2, 3. SC 2011.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef enum:
    BLOCK = 64   # counters at once, in loops that compilers vectorize
    ROUNDS = 10


def philox(uint64_t seed, int64_t first, uint32_t stream, uint32_t[:, :, :, ::1] out):
    """Write words 0 and following of each counter (first + i, head, batch, stream) to ``out[word, batch, head, i]``."""
    cdef int64_t batch, head, block, start, count = out.shape[3]
    if not 1 <= out.shape[0] <= 2:
        raise ValueError(f"out: expected one or two words of each counter, got {out.shape[0]}")
    with nogil:
        for batch in range(out.shape[1]):
            for head in range(out.shape[2]):
                for block in range((count + BLOCK - 1) // BLOCK):
                    start = block * BLOCK
                    write_block(seed, <uint32_t>(first + start), <uint32_t>head, <uint32_t>batch, stream,
                                min(count - start, <int64_t>BLOCK), &out[0, batch, head, start],
                                &out[1, batch, head, start] if out.shape[0] == 2 else NULL)


cdef void write_block(uint64_t seed, uint32_t first, uint32_t head, uint32_t batch, uint32_t stream, int64_t count,
                      uint32_t* word0, uint32_t* word1) noexcept nogil:
    cdef uint32_t x0[BLOCK]
    cdef uint32_t x1[BLOCK]
    cdef uint32_t x2[BLOCK]
    cdef uint32_t x3[BLOCK]
    cdef uint32_t key0 = <uint32_t>seed, key1 = <uint32_t>(seed >> 32)
    cdef uint64_t a, b
    cdef int i, _step
    for i in range(BLOCK):
        x0[i] = first + <uint32_t>i
        x1[i] = head
        x2[i] = batch
        x3[i] = stream
    for _step in range(ROUNDS):
        for i in range(BLOCK):
            a = <uint64_t>x0[i] * <uint32_t>0xD2511F53
            b = <uint64_t>x2[i] * <uint32_t>0xCD9E8D57
            x0[i] = <uint32_t>(b >> 32) ^ x1[i] ^ key0
            x1[i] = <uint32_t>b
            x2[i] = <uint32_t>(a >> 32) ^ x3[i] ^ key1
            x3[i] = <uint32_t>a
        key0 += <uint32_t>0x9E3779B9
        key1 += <uint32_t>0xBB67AE85
    for i in range(count):
        word0[i] = x0[i]
    if word1 is not NULL:
        for i in range(count):
            word1[i] = x1[i]
