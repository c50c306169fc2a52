# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, freethreading_compatible=True
"""Compiled part of :mod:`spattn.schedule.few_queries`: the tables of a plan from the bits of its rows."""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
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


def device_tables(
    const uint64_t[:, :, ::1] words, const int32_t[:, ::1] variant, int64_t kv_len, int64_t group, int64_t heads_per_kv,
    int64_t tile, int64_t workers, const uint8_t[::1] query_views, const uint8_t[::1] key_views, int64_t counters,
):
    """Return (image, offsets, proof, sizes) of the tables of the Hopper kernels for rows of bits.

    A query tile of `tile` rows holds `group` heads, each `tile` // (a power of 2) rows apart; `variant` has the rows of
    each batch entry and such a head. `heads_per_kv` of these share keys. The proof has the fields of
    :class:`.proof.Writers` from `owner` to `merge_variants`.
    """
    cdef int64_t variants = words.shape[0], q_len = words.shape[1], count = words.shape[2], most_heads = 1
    cdef int64_t batch = variant.shape[0], heads = variant.shape[1], n, word, q, head, piece, own, at, length
    while most_heads < group:
        most_heads *= 2
    cdef int64_t apart = tile // most_heads
    if variants < 1 or q_len < 1 or count < 1 or count != (kv_len + BITS - 1) // BITS or workers < 1:
        raise ValueError("words: expected rows of ceil(kv_len / 64) words, and at least one worker")
    if not q_len <= apart or not tile <= ROWS or tile % 16:
        raise ValueError(f"tile: expected a multiple of 16 of at most {ROWS} rows for {group} heads, got {tile}")
    for n in range(batch):
        for head in range(heads):
            if not 0 <= variant[n, head] < variants:
                raise ValueError("variant: expected indices of the rows")
    cdef const uint64_t* first = &words[0, 0, 0]
    cdef const uint64_t* row
    cdef uint64_t some, every
    cdef vector[Entry] entries
    cdef vector[int32_t] entry_masks
    cdef vector[uint64_t] masks  # q_len words each
    cdef vector[int64_t] begin = vector[int64_t](variants + 1)
    cdef Entry entry = Entry(0, 0, 0, 0)
    cdef int32_t mask
    cdef bint same
    with nogil:
        for n in range(variants):
            row, word, begin[n] = first + n * q_len * count, -1, <int64_t>entries.size()
            while True:
                word = next_tile(row, q_len, count, word, &some, &every)
                if word == count:
                    break
                mask = -1
                if every != ALL:  # adjacent tiles of a periodic pattern share a bitmask
                    same = masks.size() > 0
                    for q in range(q_len if same else 0):
                        same = same and masks[masks.size() - q_len + q] == row[q * count + word]
                    for q in range(0 if same else q_len):
                        masks.push_back(row[q * count + word])
                    mask = <int32_t>(masks.size() // q_len) - 1
                entry.x = <int32_t>(BITS * word)
                entries.push_back(entry)
                entry_masks.push_back(mask)
        begin[variants] = <int64_t>entries.size()

    # Items and combines of each variant, as in tables_of_rows().
    cdef int64_t items = 0, merges = 0, sources = 0, slots = 0, longest = 0
    cdef vector[int64_t] pieces = vector[int64_t](variants)
    for n in range(variants):
        length = begin[n + 1] - begin[n]
        pieces[n] = own = min(min(max(length // FEWEST_TILES, <int64_t>1), workers), length)
        items += own
        if own != 1:
            merges += group * q_len
            sources += group * q_len * own
        if own > 1:
            slots = max(slots, own)
    lists = []
    cdef int32_t* owner = int32s(lists, items)
    memset(int32s(lists, items), 0, items * sizeof(int32_t))  # query tiles
    cdef cnp.npy_intp size = items
    own_slot = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT64, 0)
    cdef int64_t* slot = <int64_t*>cnp.PyArray_DATA(<cnp.ndarray>own_slot)
    cdef int32_t* work_indptr = int32s(lists, variants + 1)
    cdef int32_t* merge_rows = int32s(lists, merges)
    cdef int32_t* merge_indptr = int32s(lists, merges + 1)
    cdef int32_t* merge_sources = int32s(lists, sources)
    cdef int32_t* merge_variants = int32s(lists, variants + 1)
    cdef vector[DeviceWork] work = vector[DeviceWork](items)
    items = merges = sources = 0
    work_indptr[0] = merge_variants[0] = merge_indptr[0] = 0
    for n in range(variants):
        own, length = pieces[n], begin[n + 1] - begin[n]
        for piece in range(own):
            owner[items], slot[items] = <int32_t>n, piece if own > 1 else -1
            work[items] = DeviceWork(
                0, 0, 0, 0, <int32_t>(begin[n] + length * piece // own),
                <int32_t>(begin[n] + length * (piece + 1) // own), 1, <int32_t>slot[items]
            )
            longest = max(longest, <int64_t>(work[items].end - work[items].begin))
            items += 1
        for head in range(group if own != 1 else 0):
            for q in range(q_len):
                merge_rows[merges] = <int32_t>(head * q_len + q)
                for piece in range(own):
                    merge_sources[sources] = <int32_t>(piece * tile + head * apart + q)
                    sources += 1
                merges += 1
                merge_indptr[merges] = <int32_t>sources
        work_indptr[n + 1], merge_variants[n + 1] = <int32_t>items, <int32_t>merges

    # Tasks of all heads, the longest items first, and the combines of each head.
    cdef vector[Task] tasks, sorted_tasks
    cdef vector[Length] order
    cdef vector[int32_t] merge_heads
    cdef int64_t most_merges = 0, total = 0
    cdef int32_t v
    cdef Length key
    for n in range(batch):
        for head in range(heads):
            v = variant[n, head]
            for own in range(work_indptr[v], work_indptr[v + 1]):
                key.length, key.task = work[own].end - work[own].begin, <int64_t>tasks.size()
                order.push_back(key)
                tasks.push_back(Task(<int32_t>own, <int32_t>n, <int32_t>head, <int32_t>(head // heads_per_kv)))
            merge_heads.push_back(merge_variants[v])
            merge_heads.push_back(merge_variants[v + 1])
            merge_heads.push_back(<int32_t>n)
            merge_heads.push_back(<int32_t>head)
            most_merges = max(most_merges, <int64_t>(merge_variants[v + 1] - merge_variants[v]))
    stable_sort(order.begin(), order.end(), longer)
    sorted_tasks.resize(tasks.size())
    for at in range(<int64_t>order.size()):
        sorted_tasks[at] = tasks[order[at].task]

    cdef int64_t bitmasks = <int64_t>masks.size() // q_len
    parts = (
        ("tasks", sorted_tasks.size() * sizeof(Task)), ("work", items * sizeof(DeviceWork)),
        ("entries", entries.size() * sizeof(Entry)), ("entry_masks", entries.size() * sizeof(int32_t)),
        ("masks", bitmasks * THREADS * sizeof(uint32_t)), ("query_views", query_views.shape[0]),
        ("key_views", key_views.shape[0]), ("priors", 0), ("merge_rows", merges * sizeof(int32_t)),
        ("merge_indptr", (merges + 1) * sizeof(int32_t)), ("merge_sources", sources * sizeof(int32_t)),
        ("merge_heads", merge_heads.size() * sizeof(int32_t)), ("counters", counters * sizeof(int32_t)),
    )
    offsets = {}
    for name, nbytes in parts:
        offsets[name] = total
        total += (<int64_t>nbytes + PADDING - 1) // PADDING * PADDING
    image = np.empty(total, np.uint8)
    cdef char* to = <char*>cnp.PyArray_DATA(<cnp.ndarray>image)
    copy(to, offsets["tasks"], sorted_tasks.data(), sorted_tasks.size() * sizeof(Task))
    copy(to, offsets["work"], work.data(), items * sizeof(DeviceWork))
    copy(to, offsets["entries"], entries.data(), entries.size() * sizeof(Entry))
    copy(to, offsets["entry_masks"], entry_masks.data(), entries.size() * sizeof(int32_t))
    copy(to, offsets["query_views"], &query_views[0], query_views.shape[0])
    copy(to, offsets["key_views"], &key_views[0], key_views.shape[0])
    copy(to, offsets["merge_rows"], merge_rows, merges * sizeof(int32_t))
    copy(to, offsets["merge_indptr"], merge_indptr, (merges + 1) * sizeof(int32_t))
    copy(to, offsets["merge_sources"], merge_sources, sources * sizeof(int32_t))
    copy(to, offsets["merge_heads"], merge_heads.data(), merge_heads.size() * sizeof(int32_t))
    memset(to + <int64_t>offsets["counters"], 0, counters * sizeof(int32_t))
    cdef int32_t[ROWS] query_of
    for n in range(ROWS):
        head, q = n // apart, n % apart
        query_of[n] = -1 if n >= tile or head >= group else <int32_t>min(q, q_len - 1)
    cdef uint32_t* fragments = <uint32_t*>(to + <int64_t>offsets["masks"])
    with nogil:
        for n in range(bitmasks):
            fill_fragment(masks.data() + n * q_len, query_of, tile, fragments + n * THREADS)
    proof = lists[0], lists[1], own_slot, lists[2], slots, lists[3], lists[4], lists[5], lists[6]
    return image, offsets, proof, (sorted_tasks.size(), longest, slots, most_merges)


cdef void copy(char* image, int64_t offset, const void* source, size_t nbytes) noexcept nogil:
    if nbytes:
        memcpy(image + offset, source, nbytes)
