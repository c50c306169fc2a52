# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Compiled part of :mod:`spattn.schedule.few_queries`: the tables of a plan from the bits of its rows."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from libcpp.algorithm cimport stable_sort
from libcpp.vector cimport vector

import numpy as np

from ..planning.contract.types import VIEW, WORK

cnp.import_array()


cdef extern from "kernels/counts.h" namespace "spattn" nogil:
    cdef struct TileCounts:
        int64_t tiles, full, full_runs

    TileCounts count_tiles(const uint64_t* words, int64_t owners, int64_t rows, int64_t count, int64_t* keys)
    int64_t next_tile(
        const uint64_t* own, int64_t rows, int64_t count, int64_t word, uint64_t* some, uint64_t* every
    )


cdef extern from "records.h" namespace "spattn" nogil:
    cdef struct View:
        int64_t offset
        int64_t stride[3]
        int32_t extent[3]
        int32_t box[3]
        int32_t grid[3]
        int32_t tiles


cdef packed struct Work:
    int32_t component, query_tile
    int64_t begin, end, slot


cdef uint64_t ALL = ~<uint64_t>0
cdef enum:
    BITS = 64               # keys of a tile
    FEW_PAIRS = 16          # allowed pairs of a tile and row below which they are computed one by one
    SHORTEST_PIECE = 1024   # allowed pairs of a work item; shorter ones cost more than they share
    FEWEST_TILES = 4        # likewise, tiles of an item where kernels compute whole tiles


cdef int32_t* int32s(list to, int64_t count):
    """Append a new int32 array to `to`, and return its elements."""
    cdef cnp.npy_intp size = count
    found = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT32, 0)
    to.append(found)
    return <int32_t*>cnp.PyArray_DATA(<cnp.ndarray>found)


cdef void set_view(View* view, int64_t length, int64_t block) noexcept nogil:
    """Describe a sequence of `length` tokens in tiles of `block`."""
    cdef int axis
    memset(view, 0, sizeof(View))
    for axis in range(2):
        view.extent[axis] = view.box[axis] = view.grid[axis] = 1
    view.stride[2] = 1
    view.extent[2], view.box[2] = <int32_t>length, <int32_t>block
    view.grid[2] = view.tiles = <int32_t>((length + block - 1) // block)


cdef bint few_pairs(int64_t pairs, int64_t q_len, int64_t tiles) noexcept nogil:
    return pairs <= FEW_PAIRS * q_len * tiles


def by_pairs(const uint64_t[:, :, ::1] words):
    """Return whether rows, (variants, queries, words), have so few keys that kernels compute them pair by pair."""
    cdef int64_t number, total = 0, rows = words.shape[0] * words.shape[1]
    cdef vector[int64_t] keys = vector[int64_t](rows)
    cdef TileCounts counts = count_tiles(&words[0, 0, 0], words.shape[0], words.shape[1], words.shape[2], keys.data())
    for number in range(rows):
        total += keys[number]
    return few_pairs(total, words.shape[1], counts.tiles)


def tables_of_rows(const uint64_t[:, :, ::1] words, int64_t kv_len, int64_t workers, sparse=None, int64_t tile=0):
    """Return the fields of a plan that allows the keys of rows, (variants, queries, words), in tiles of 64 keys.

    At most `workers` items share the keys of a query tile. `sparse` overrides :func:`by_pairs`: query tiles then have
    one query. If `tile` is not 0, kernels compute whole tiles of so many queries. Fields as in :class:`~spattn.Plan`,
    and `tiles`, but without the components, the pattern, `variant` and permutations.
    """
    cdef int64_t variants = words.shape[0], q_len = words.shape[1], count = words.shape[2]
    cdef int64_t n, owner, owners = variants, rows = q_len, block_q, runs, partials
    if variants < 1 or q_len < 1 or count < 1 or count != (kv_len + BITS - 1) // BITS or workers < 1:
        raise ValueError("words: expected rows of ceil(kv_len / 64) words, and at least one worker")
    if tile and tile < q_len:
        raise ValueError(f"tile: expected at least {q_len} queries, got {tile}")
    cdef vector[int64_t] keys = vector[int64_t](variants * q_len)
    cdef TileCounts counts
    cdef int64_t nnz = 0
    cdef const uint64_t* first = &words[0, 0, 0]
    with nogil:
        counts = count_tiles(first, variants, q_len, count, keys.data())
        for n in range(variants * q_len):
            nnz += keys[n]
    cdef bint own_sparse = not tile and (few_pairs(nnz, q_len, counts.tiles) if sparse is None else sparse)
    block_q = tile if tile else 1 if own_sparse else max(q_len, <int64_t>2)
    if q_len > 1 and own_sparse:
        owners, rows = variants * q_len, 1
        counts = count_tiles(first, owners, 1, count, vector[int64_t](owners).data())
    elif q_len > 1:
        for n in range(variants):
            for owner in range(1, q_len):
                keys[n * q_len] += keys[n * q_len + owner]
            keys[n] = keys[n * q_len]  # n <= n * q_len: read before
    partials, runs = counts.tiles - counts.full, counts.tiles - counts.full + counts.full_runs

    # The tile lists: runs of full tiles and single partial tiles.
    lists = []
    cdef int32_t* indptr = int32s(lists, owners + 1)
    cdef int32_t* indices = int32s(lists, runs)
    cdef int32_t* mask = int32s(lists, runs)
    memset(int32s(lists, runs), 0, runs * sizeof(int32_t))  # key_view
    cdef cnp.npy_intp[3] shape = [runs + 1, 0, 0]
    own_tiles = cnp.PyArray_EMPTY(1, shape, cnp.NPY_INT64, 0)
    cdef int64_t* tile_indptr = <int64_t*>cnp.PyArray_DATA(own_tiles)
    shape[0], shape[1], shape[2] = partials, block_q, 1
    own_masks = cnp.PyArray_EMPTY(3, shape, cnp.NPY_UINT64, 0)
    cdef uint64_t* masks = <uint64_t*>cnp.PyArray_DATA(own_masks)
    cdef vector[int64_t] begin = vector[int64_t](owners + 1)  # of the tiles of each list
    with nogil:
        fill_lists(first, owners, rows, count, block_q, indptr, tile_indptr, indices, mask, masks, begin.data())
    if indptr[owners] != runs or tile_indptr[runs] != counts.tiles:
        raise RuntimeError("plan: miscounted tiles; this is a bug in spattn, please report it")

    # The work items: lists of many pairs are shared; those without a tile, and shared ones, have combined rows.
    cdef int64_t query_tiles = (q_len + block_q - 1) // block_q, cells = 1 if query_tiles > 1 else q_len
    cdef int64_t items = 0, slots = 0, merges = 0, sources = 0, own_slots, piece, own, length, item, row, at = 0, cell
    cdef vector[int64_t] pieces = vector[int64_t](owners)
    for owner in range(owners):
        length = begin[owner + 1] - begin[owner]
        own = min(max(length // FEWEST_TILES if tile else keys[owner] // SHORTEST_PIECE, <int64_t>1), workers)
        own = pieces[owner] = min(own, length)
        items += own
        if own != 1:
            merges += cells
            sources += cells * own
    own_work, own_views = np.empty(items, WORK), np.empty(2, VIEW)
    cdef Work* work = <Work*>cnp.PyArray_DATA(<cnp.ndarray>own_work)
    cdef View* views = <View*>cnp.PyArray_DATA(<cnp.ndarray>own_views)
    set_view(views, q_len, block_q)
    set_view(views + 1, kv_len, BITS)
    shared = []
    cdef int32_t* work_indptr = int32s(shared, variants + 1)
    cdef int32_t* merge_rows = int32s(shared, merges)
    cdef int32_t* merge_indptr = int32s(shared, merges + 1)
    cdef int32_t* merge_sources = int32s(shared, sources)
    cdef int32_t* merge_variants = int32s(shared, variants + 1)
    item = merges = sources = 0
    work_indptr[0] = merge_variants[0] = merge_indptr[0] = 0
    for n in range(variants):
        own_slots, at = 0, item
        for owner in range(n * query_tiles, (n + 1) * query_tiles):
            own, length = pieces[owner], begin[owner + 1] - begin[owner]
            for piece in range(own):
                work[item].component, work[item].query_tile = <int32_t>n, <int32_t>(owner - n * query_tiles)
                work[item].begin = begin[owner] + length * piece // own
                work[item].end = begin[owner] + length * (piece + 1) // own
                work[item].slot = own_slots + piece if own > 1 else -1
                item += 1
            if own != 1:
                row = (owner - n * query_tiles) * block_q
                for cell in range(cells):
                    merge_rows[merges] = <int32_t>(row + cell)
                    for piece in range(own):
                        merge_sources[sources] = <int32_t>((own_slots + piece) * block_q + cell)
                        sources += 1
                    merges += 1
                    merge_indptr[merges] = <int32_t>sources
                own_slots += own
        if query_tiles > 1:
            longest_first(work + at, item - at)
        slots = max(slots, own_slots)
        work_indptr[n + 1], merge_variants[n + 1] = <int32_t>item, <int32_t>merges
    return {
        "block_q": block_q,
        "views": own_views,
        "indptr": lists[0],
        "tile_indptr": own_tiles,
        "indices": lists[1],
        "key_view": lists[3],
        "mask": lists[2],
        "masks": own_masks,
        "work": own_work,
        "work_indptr": shared[0],
        "slots": slots,
        "merge_rows": shared[1],
        "merge_indptr": shared[2],
        "merge_sources": shared[3],
        "merge_variants": shared[4],
        "nnz": nnz,
        "tiles": counts.tiles,
    }


cdef void fill_lists(
    const uint64_t* own, int64_t owners, int64_t rows, int64_t count, int64_t block_q, int32_t* indptr,
    int64_t* tile_indptr, int32_t* indices, int32_t* mask, uint64_t* masks, int64_t* begin,
) noexcept nogil:
    """List the tiles in which any row of an owner allows a key. Rows of bitmasks after the last row repeat it."""
    cdef int64_t owner, word, row, at = 0, run = 0, partial = 0, last
    cdef uint64_t some, every
    indptr[0] = 0
    begin[0] = 0
    for owner in range(owners):
        last = -2  # the previous tile if it is full
        word = -1
        while True:
            word = next_tile(own, rows, count, word, &some, &every)
            if word == count:
                break
            if every != ALL or last != word - 1:
                tile_indptr[run], indices[run] = at, <int32_t>word
                mask[run] = -1 if every == ALL else <int32_t>partial
                run += 1
            last = word if every == ALL else -2
            if every != ALL:
                for row in range(block_q):
                    masks[row] = own[min(row, rows - 1) * count + word]
                masks += block_q
                partial += 1
            at += 1
        indptr[owner + 1], begin[owner + 1] = <int32_t>run, at
        own += rows * count
    tile_indptr[run] = at


cdef void longest_first(Work* work, int64_t items) noexcept nogil:
    """Sort the few items of a component by descending length; equal ones keep their order."""
    cdef int64_t item, to
    cdef Work own
    for item in range(1, items):
        own, to = work[item], item
        while to > 0 and work[to - 1].end - work[to - 1].begin < own.end - own.begin:
            work[to] = work[to - 1]
            to -= 1
        work[to] = own


cdef packed struct DeviceWork:  # cuda/sm90/forward/tables.py
    int32_t query_view, x, y, z, begin, end, key_view, slot


cdef packed struct Entry:  # likewise
    int32_t x, y, z, view


cdef packed struct Task:  # tasks.py
    int32_t item, batch, head_q, head_kv


cdef enum:
    ROWS = 64           # of a bitmask on Hopper
    THREADS = 128       # words of a bitmask
    PADDING = 256       # alignment of tables, in bytes


cdef uint32_t lane_bits(uint64_t row, int lane) noexcept nogil:
    """Return the bits of columns 8 i + 2 lane + b at 4 i + b: fragment_masks() in cuda/sm90/forward/tables.py."""
    cdef uint64_t bits = row >> (2 * lane) & <uint64_t>0x0303030303030303
    bits = (bits | bits >> 4) & <uint64_t>0x00FF00FF00FF00FF
    bits = (bits | bits >> 8) & <uint64_t>0x0000FFFF0000FFFF
    return <uint32_t>(bits | bits >> 16)


cdef void fill_fragment(const uint64_t* queries, const int32_t* query_of, int64_t tile, uint32_t* to) noexcept nogil:
    """Write a bitmask in accumulator order; row r of the tile has the bits of query ``query_of[r]``, none if -1."""
    cdef int64_t warp, group
    cdef int lane, low, high
    memset(to, 0, THREADS * sizeof(uint32_t))
    for warp in range((tile + 15) // 16):
        for group in range(8):
            low, high = query_of[16 * warp + group], query_of[16 * warp + 8 + group]
            if low < 0 and high < 0:
                continue
            for lane in range(4):
                to[32 * warp + 4 * group + lane] = (
                    (lane_bits(queries[low], lane) if low >= 0 else 0)
                    | (lane_bits(queries[high], lane) if high >= 0 else 0) << 2
                )


cdef bint longer(const Length& one, const Length& other) noexcept nogil:
    return one.length > other.length


cdef struct Length:
    int64_t length, task


cdef enum:  # tables of a step, in the order of cuda/sm90/forward/steps.py
    TASKS, WORK_ITEMS, ENTRIES, ENTRY_MASKS, MASKS, QUERY_VIEWS, KEY_VIEWS, PRIORS, MERGE_ROWS, MERGE_INDPTR
    MERGE_SOURCES, MERGE_HEADS, COUNTERS, TABLES


cdef class StepTables:
    """Makes the tables of the Hopper kernels from rows of bits, for calls that differ in rows and kv_len alone.

    A query tile of `tile` rows holds `group` of the `heads` query heads, each `tile` // (a power of 2) rows apart;
    `heads_per_kv` groups share keys. `views` are the plan's, and `query_views` and `key_views` their device records,
    with kv_len as an int32 at `length_at`; `counters` is the number of task counters.
    """

    cdef int64_t batch, heads, q_len, group, heads_per_kv, tile, workers, apart, length_at, counters
    cdef bytes query_views, key_views
    cdef int32_t[ROWS] query_of  # of each row of a query tile, -1 for padding
    cdef int32_t[ROWS] row_of  # position of each row of a query tile, -1 for padding

    def __init__(
        self, int64_t batch, int64_t heads, int64_t q_len, int64_t group, int64_t heads_per_kv, int64_t tile,
        int64_t workers, bytes views, bytes query_views, bytes key_views, int64_t length_at, int64_t counters
    ):
        cdef int64_t most_heads = 1, row, head
        while most_heads < group:
            most_heads *= 2
        self.apart = tile // most_heads
        if not 1 <= q_len <= self.apart or not tile <= ROWS or tile % 16:
            raise ValueError(f"tile: expected a multiple of 16 of at most {ROWS} rows for {group} heads, got {tile}")
        if batch < 1 or group < 1 or heads < 1 or heads % group or heads_per_kv < 1 or workers < 1 or counters < 0:
            raise ValueError(f"heads: expected a multiple of {group}, and at least one entry and worker")
        if not 0 <= length_at <= len(key_views) - <int64_t>sizeof(int32_t):
            raise ValueError("key_views: expected kv_len within the records")
        self.batch, self.heads, self.q_len, self.group, self.heads_per_kv = batch, heads, q_len, group, heads_per_kv
        self.tile, self.workers, self.length_at, self.counters = tile, workers, length_at, counters
        self.query_views, self.key_views = query_views, key_views
        for row in range(ROWS):
            head = row // self.apart
            self.query_of[row] = -1 if row >= tile or head >= group else <int32_t>min(row % self.apart, q_len - 1)
        self.place_rows(views)

    cdef int place_rows(self, bytes views) except -1:
        """Find the position of each row of a query tile in the plan's first view, and check that each occurs once."""
        cdef const View* view = <const View*><char*>views
        cdef int64_t row, left, at, axis, position, length = self.q_len * self.group, seen = 0
        cdef vector[bint] known = vector[bint](length)
        cdef bint real, sound = <size_t>len(views) >= sizeof(View) and view.tiles == 1
        for row in range(ROWS):
            left, position, real = row, view.offset if sound else 0, sound and row < self.tile
            for axis in range(2, -1, -1):
                if not real:
                    break
                sound = sound and view.box[axis] > 0
                at = left % view.box[axis] if sound else 0
                left = left // view.box[axis] if sound else 0
                real = sound and at < view.extent[axis]
                position += at * view.stride[axis]
            real = real and left == 0
            if real and (not 0 <= position < length or known[position]):
                sound = False
            self.row_of[row] = <int32_t>position if real and sound else -1
            if real and sound:
                known[position] = True
                seen += 1
        if not sound or seen != length:
            raise ValueError(f"views: expected {length} rows in one tile of the view of queries, each once")
        return 0

    def of(self, const uint64_t[:, :, ::1] words, const int32_t[:, ::1] variant, int64_t kv_len):
        """Return the :class:`RowTables` of rows, or None if the rows of heads of a group differ.

        `words` are their bits, (variants, queries, words); `variant` is their index, (batch or 1, heads or 1).
        """
        cdef int64_t variants = words.shape[0], count = words.shape[2], n, head, other, each = variant.shape[1]
        if variants < 1 or words.shape[1] != self.q_len or count < 1 or count != (kv_len + BITS - 1) // BITS:
            raise ValueError("words: expected rows of ceil(kv_len / 64) words")
        if variant.shape[0] not in (1, self.batch) or each not in (1, self.heads):
            raise ValueError("variant: expected one row or one for each batch entry, and likewise heads")
        for n in range(variant.shape[0]):
            for head in range(each):
                if not 0 <= variant[n, head] < variants:
                    raise ValueError("variant: expected indices of the rows")
                if variant[n, head] != variant[n, head // self.group * self.group]:
                    return None
        cdef RowTables made = RowTables.__new__(RowTables)
        made.form, made.words, made.kv_len = self, words, kv_len
        made.variant.reserve(self.batch * self.heads // self.group)
        for n in range(self.batch):
            for head in range(0, self.heads, self.group):
                other = head if each > 1 else 0
                made.variant.push_back(variant[n if variant.shape[0] > 1 else 0, other])
        made.count()
        return made


cdef class RowTables:
    """Tables of a step, whose sizes are known and which are written to memory of the caller.

    Attributes
    ----------
    nbytes : int
    tasks, slots : int
        Number of tasks, and of partials of a head.
    longest : int
        Tiles of the longest work item.
    merges : int
        Combined rows of a head, at most.
    """

    cdef StepTables form
    cdef const uint64_t[:, :, ::1] words
    cdef int64_t kv_len, bitmasks, items, sources
    cdef vector[int32_t] variant  # of each batch entry and group of heads
    cdef vector[int64_t] begin, pieces, first_merge  # of the tiles, items and combines of each variant
    cdef int64_t[TABLES] at
    cdef readonly int64_t nbytes, tasks, longest, slots, merges

    def addresses(self, int64_t first):
        """Return the address of each table, of which the first is at address `first`."""
        return tuple([first + self.at[n] for n in range(TABLES)])

    cdef int count(self) except -1:
        """Set all sizes."""
        cdef int64_t variants = self.words.shape[0], q_len = self.words.shape[1], count = self.words.shape[2]
        cdef int64_t n, word, tiles = 0, own, length, total = 0, heads = <int64_t>self.variant.size()
        cdef const uint64_t* row
        cdef const uint64_t* before = NULL  # words of the last bitmask
        cdef uint64_t some = 0, every = 0
        cdef int64_t[TABLES] nbytes
        self.begin.resize(variants + 1)
        self.pieces.resize(variants)
        self.first_merge.resize(variants + 1)
        with nogil:
            for n in range(variants):
                row, word, self.begin[n] = &self.words[n, 0, 0], -1, tiles
                while True:
                    word = next_tile(row, q_len, count, word, &some, &every)
                    if word == count:
                        break
                    tiles += 1
                    if every != ALL and not same_words(row + word, before, q_len, count):
                        self.bitmasks += 1
                        before = row + word
            self.begin[variants] = tiles
            for n in range(variants):
                length = self.begin[n + 1] - self.begin[n]
                own = min(min(max(length // FEWEST_TILES, <int64_t>1), self.form.workers), length)
                self.pieces[n] = own
                self.items += own
                self.first_merge[n + 1] = self.first_merge[n]
                if own != 1:
                    self.first_merge[n + 1] += self.form.group * q_len
                    self.sources += self.form.group * q_len * own
                if own > 1:
                    self.slots = max(self.slots, own)
                if own:
                    self.longest = max(self.longest, (length + own - 1) // own)
            for n in range(heads):
                self.tasks += self.pieces[self.variant[n]]
                own = self.first_merge[self.variant[n] + 1] - self.first_merge[self.variant[n]]
                self.merges = max(self.merges, own)
        nbytes[TASKS], nbytes[WORK_ITEMS] = self.tasks * sizeof(Task), self.items * sizeof(DeviceWork)
        nbytes[ENTRIES], nbytes[ENTRY_MASKS] = tiles * sizeof(Entry), tiles * sizeof(int32_t)
        nbytes[MASKS], nbytes[PRIORS] = self.bitmasks * THREADS * sizeof(uint32_t), 0
        nbytes[QUERY_VIEWS], nbytes[KEY_VIEWS] = len(self.form.query_views), len(self.form.key_views)
        nbytes[MERGE_ROWS] = self.first_merge[variants] * sizeof(int32_t)
        nbytes[MERGE_INDPTR] = (self.first_merge[variants] + 1) * sizeof(int32_t)
        nbytes[MERGE_SOURCES], nbytes[MERGE_HEADS] = self.sources * sizeof(int32_t), heads * 4 * sizeof(int32_t)
        nbytes[COUNTERS] = self.form.counters * sizeof(int32_t)
        for n in range(TABLES):
            self.at[n] = total
            total += (nbytes[n] + PADDING - 1) // PADDING * PADDING
        self.nbytes = total
        return 0

    def write(self, size_t address):
        """Write the tables to host memory; raise RuntimeError unless each row is written once."""
        cdef char* to = <char*>address
        memcpy(to + self.at[QUERY_VIEWS], <char*>self.form.query_views, len(self.form.query_views))
        memcpy(to + self.at[KEY_VIEWS], <char*>self.form.key_views, len(self.form.key_views))
        (<int32_t*>(to + self.at[KEY_VIEWS] + self.form.length_at))[0] = <int32_t>self.kv_len
        memset(to + self.at[COUNTERS], 0, self.form.counters * sizeof(int32_t))
        with nogil:
            self.fill_lists(to)
            self.fill_work(to)
            self.fill_heads(to)
        self.check(address)

    cdef int fill_lists(self, const char* image) except -1 nogil:
        """Write the tiles of each variant, and their bitmasks; adjacent tiles of a periodic pattern share one."""
        cdef int64_t variants = self.words.shape[0], q_len = self.words.shape[1], count = self.words.shape[2]
        cdef int64_t n, q, word, bitmasks = -1
        cdef const uint64_t* row
        cdef const uint64_t* before = NULL
        cdef uint64_t some = 0, every = 0
        cdef vector[uint64_t] queries = vector[uint64_t](q_len)
        cdef Entry* entries = <Entry*>(image + self.at[ENTRIES])
        cdef int32_t* mask = <int32_t*>(image + self.at[ENTRY_MASKS])
        cdef uint32_t* fragments = <uint32_t*>(image + self.at[MASKS])
        for n in range(variants):
            row, word = &self.words[n, 0, 0], -1
            while True:
                word = next_tile(row, q_len, count, word, &some, &every)
                if word == count:
                    break
                entries[0] = Entry(<int32_t>(BITS * word), 0, 0, 0)
                if every != ALL and not same_words(row + word, before, q_len, count):
                    before = row + word
                    bitmasks += 1
                    for q in range(q_len):
                        queries[q] = before[q * count]
                    fill_fragment(queries.data(), self.form.query_of, self.form.tile, fragments + bitmasks * THREADS)
                mask[0] = -1 if every == ALL else <int32_t>bitmasks
                entries += 1
                mask += 1
        return 0

    cdef void fill_work(self, const char* image) noexcept nogil:
        """Write the items and combines of each variant, as in tables_of_rows()."""
        cdef int64_t n, piece, own, length, head, q, group = self.form.group, q_len = self.form.q_len
        cdef int64_t first, sources = 0, merges = 0
        cdef DeviceWork* work = <DeviceWork*>(image + self.at[WORK_ITEMS])
        cdef int32_t* merge_rows = <int32_t*>(image + self.at[MERGE_ROWS])
        cdef int32_t* merge_indptr = <int32_t*>(image + self.at[MERGE_INDPTR])
        cdef int32_t* merge_sources = <int32_t*>(image + self.at[MERGE_SOURCES])
        merge_indptr[0] = 0
        for n in range(<int64_t>self.pieces.size()):
            own, first, length = self.pieces[n], self.begin[n], self.begin[n + 1] - self.begin[n]
            for piece in range(own):
                work[0] = DeviceWork(
                    0, 0, 0, 0, <int32_t>(first + length * piece // own),
                    <int32_t>(first + length * (piece + 1) // own), 1, <int32_t>piece if own > 1 else -1
                )
                work += 1
            for head in range(group if own != 1 else 0):
                for q in range(q_len):
                    merge_rows[merges] = <int32_t>(head * q_len + q)
                    for piece in range(own):
                        merge_sources[sources] = <int32_t>(piece * self.form.tile + head * self.form.apart + q)
                        sources += 1
                    merges += 1
                    merge_indptr[merges] = <int32_t>sources

    cdef int fill_heads(self, const char* image) except -1 nogil:
        """Write the tasks of all heads, the longest items first, and the combines of each head."""
        cdef int64_t heads = self.form.heads // self.form.group, n, own
        cdef int32_t v, head
        cdef const DeviceWork* work = <const DeviceWork*>(image + self.at[WORK_ITEMS])
        cdef int32_t* of_heads = <int32_t*>(image + self.at[MERGE_HEADS])
        cdef Task* tasks = <Task*>(image + self.at[TASKS])
        cdef vector[int64_t] first_item = vector[int64_t](self.pieces.size())
        cdef vector[Task] unsorted
        cdef vector[Length] order
        cdef Length key
        unsorted.reserve(self.tasks)
        order.reserve(self.tasks)
        for n in range(1, <int64_t>self.pieces.size()):
            first_item[n] = first_item[n - 1] + self.pieces[n - 1]
        for n in range(<int64_t>self.variant.size()):
            v = self.variant[n]
            for own in range(first_item[v], first_item[v] + self.pieces[v]):
                key.length, key.task = work[own].end - work[own].begin, <int64_t>unsorted.size()
                order.push_back(key)
                head = <int32_t>(n % heads)
                unsorted.push_back(
                    Task(<int32_t>own, <int32_t>(n // heads), head, <int32_t>(head // self.form.heads_per_kv))
                )
            of_heads[4 * n], of_heads[4 * n + 1] = <int32_t>self.first_merge[v], <int32_t>self.first_merge[v + 1]
            of_heads[4 * n + 2], of_heads[4 * n + 3] = <int32_t>(n // heads), <int32_t>(n % heads)
        stable_sort(order.begin(), order.end(), longer)
        for n in range(<int64_t>order.size()):
            tasks[n] = unsorted[order[n].task]
        return 0

    def check(self, size_t address):
        """Raise RuntimeError unless, in tables at this address, items share all tiles of each variant, each row has one
        writer, and each row of a partial is read once, for its own row: see docs/decisions/031-plans-are-proven.md."""
        cdef const char* image = <const char*>address
        cdef const DeviceWork* work = <const DeviceWork*>(image + self.at[WORK_ITEMS])
        cdef const int32_t* rows = <const int32_t*>(image + self.at[MERGE_ROWS])
        cdef const int32_t* indptr = <const int32_t*>(image + self.at[MERGE_INDPTR])
        cdef const int32_t* sources = <const int32_t*>(image + self.at[MERGE_SOURCES])
        cdef int64_t n, piece, own, merge, source = 0, length = self.form.q_len * self.form.group
        cdef int32_t begin, cell
        cdef uint64_t written
        cdef bint sound = True
        for n in range(<int64_t>self.pieces.size()):
            own, begin, written = self.pieces[n], <int32_t>self.begin[n], 0
            for piece in range(own):
                sound = sound and work.query_view == work.x == work.y == work.z == 0
                sound = sound and work.slot == (piece if own > 1 else -1) and work.begin == begin < work.end
                begin = work.end
                work += 1
            sound = sound and begin == self.begin[n + 1]
            sound = sound and self.first_merge[n + 1] - self.first_merge[n] == (length if own != 1 else 0)
            for merge in range(self.first_merge[n], self.first_merge[n + 1]):
                sound = sound and 0 <= rows[merge] < length and not written >> rows[merge] & 1
                sound = sound and indptr[merge] == source and indptr[merge + 1] == source + own
                if not sound:
                    break
                written |= <uint64_t>1 << rows[merge]
                cell = sources[source] if own else 0
                sound = own == 0 or (0 <= cell < self.form.tile and self.form.row_of[cell] == rows[merge])
                for piece in range(own):
                    sound = sound and sources[source + piece] == cell + piece * self.form.tile
                source += own
            if not sound:
                raise RuntimeError(
                    f"plan: a row of variant {n} is not written once; this is a bug in spattn, please report the "
                    "pattern and the lengths"
                )


cdef bint same_words(const uint64_t* own, const uint64_t* other, int64_t rows, int64_t count) noexcept nogil:
    """Return whether words of `rows` rows, `count` words apart, are the same; not if `other` is NULL."""
    cdef int64_t row
    if other is NULL:
        return False
    for row in range(rows):
        if own[row * count] != other[row * count]:
            return False
    return True
