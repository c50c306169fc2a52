"""Mask functions of public models, papers and examples, written for FlexAttention, at any length.

``CORPUS[name](tokens)`` is ``(mask_mod, batch, heads, q_len, kv_len)``. Tests compare plans with the masks at an odd
length; benchmarks/planning/mask_mods.py measures planning at long lengths. Sizes such as windows grow up to those of
the models.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import noop_mask

from spattn.index_set import AffineRows

from . import flex_gallery as gallery

__all__ = ["CORPUS", "index_sets"]

MaskMod = Callable[[Any, Any, Any, Any], Any]
CORPUS: dict[str, Callable[[int], tuple[MaskMod, int, int, int, int]]] = {}

causal = gallery.causal


def case(name: str, *, q_len: int | None = None, batch: int = 1, heads: int = 1) -> Callable[[Any], Any]:
    """Register a function that makes a mask_mod for a number of tokens, which is kv_len, and q_len by default."""

    def add(make: Callable[[int], MaskMod]) -> Callable[[int], MaskMod]:
        CORPUS[name] = lambda tokens: (make(tokens), batch, heads, tokens if q_len is None else q_len, tokens)
        return make

    return add


def index_sets(plan: Any, mask: np.ndarray) -> list[AffineRows]:
    """The rows of each variant of a plan; batch entries and heads with one variant must have equal masks."""
    found: dict[int, np.ndarray] = {}
    for b, h in np.ndindex(mask.shape[:2]):
        variant = int(plan.variant[b % len(plan.variant), h % plan.variant.shape[1]])
        expected = found.setdefault(variant, mask[b, h])
        assert np.array_equal(expected, mask[b, h])
    return [AffineRows.from_dense(found[variant]) for variant in range(plan.variants)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def closed(function: Callable[..., Any], *values: Any) -> MaskMod:
    """Return the mask_mod that captures `values`, further arguments of `function`."""
    return lambda b, h, q, k: function(b, h, q, k, *values)


def span(tokens: int, most: int) -> int:
    """A window of `most` tokens, or of an eighth of a short sequence."""
    return max(2, min(most, tokens // 8))


def lengths(tokens: int, documents: int = 24, seed: int = 0) -> list[int]:
    """Random lengths of documents that fill the sequence."""
    cuts = np.sort(rng(seed).choice(np.arange(1, tokens), documents - 1, replace=False))
    return np.diff([0, *cuts, tokens]).tolist()


def owners(tokens: int, documents: int = 24, seed: int = 0) -> torch.Tensor:
    """The document of each token."""
    own = torch.tensor(lengths(tokens, documents, seed))
    return torch.arange(len(own)).repeat_interleave(own)


def blocks(tokens: int) -> int:
    """The tokens of a block: 64, or fewer in a short sequence."""
    return 64 if tokens >= 1024 else 16


def layout(tokens: int, share: float, *leading: int, seed: int = 0) -> torch.Tensor:
    """A random layout of blocks, with its diagonal."""
    count = -(-tokens // blocks(tokens))
    return torch.from_numpy((rng(seed).random((*leading, count, count)) < share) | np.eye(count, dtype=bool))


def image(tokens: int) -> tuple[int, int]:
    """Rows and columns of an image of these tokens; the last row may be incomplete."""
    width = 1 << (tokens.bit_length() // 2)
    return -(-tokens // width), width


def video(tokens: int) -> tuple[int, int, int]:
    """Frames, rows and columns of a video of these tokens; the last frame may be incomplete."""
    side = 4 if tokens < 1024 else 16 if tokens < 1 << 15 else 32
    return -(-tokens // side**2), side, side


def in_video(tokens: int) -> Callable[[Any], tuple[Any, Any, Any]]:
    _, rows, columns = video(tokens)
    return lambda t: (t // (rows * columns), t // columns % rows, t % columns)


# -- windows, sinks, prefixes ------------------------------------------------------------------------------------------

case("noop")(lambda n: noop_mask)
case("causal")(lambda n: causal)
case("sliding window")(lambda n: gallery.sliding_window(span(n, 1024)))
case("symmetric window")(lambda n: closed(lambda b, h, q, k, w: (q - k).abs() <= w, span(n, 512)))
case("prefix LM")(lambda n: gallery.prefix_lm(n // 5))
case("sinks and window")(lambda n: gallery.sinks_and_window(4, span(n, 1024)))
case("dilated window")(lambda n: gallery.dilated_window(span(n, 512), 4))
case("window by head", heads=4)(
    lambda n: gallery.window_by_head([span(n, 64), span(n, 512), span(n, 512), n])  # some layers of Gemma, by head
)
case("chunked causal")(lambda n: gallery.in_batches(span(n, 2048), causal))  # Llama 4
case("blocks in causal order")(
    lambda n: closed(lambda b, h, q, k, s: k // s <= q // s, span(n, 128))  # LLaDA, semi-autoregressive
)
case("own and previous block")(
    lambda n: closed(lambda b, h, q, k, s: (q // s - k // s >= 0) & (q // s - k // s <= 1), span(n, 256))
)
case("shifted groups by head", heads=4)(  # LongLoRA's S²
    lambda n: closed(
        lambda b, h, q, k, s: (q + torch.where(h < 2, 0, s // 2)) // s == (k + torch.where(h < 2, 0, s // 2)) // s,
        span(n, 2048),
    )
)
case("zigzag positions")(  # the causal mask of a rank of ring attention
    lambda n: closed(
        lambda b, h, q, k, at: at[q] >= at[k],
        torch.from_numpy(np.r_[: n // 2, n + n // 3 : n + n // 3 + n - n // 2]),
    )
)
case("cut-off of a linear bias", heads=4)(  # ALiBi: terms below a threshold
    lambda n: closed(lambda b, h, q, k, slope: (q >= k) & (slope[h] * (q - k) < 24), 2.0 ** -torch.arange(2, 10, 2))
)
case("decay above a threshold")(lambda n: lambda b, h, q, k: (q >= k) & (torch.exp(-(q - k) / 64.0) > 1e-3))  # RetNet


@case("two windows by parity")
def two_windows(n: int) -> MaskMod:
    near, far = span(n, 128), span(n, 1024)
    return lambda b, h, q, k: torch.where(q % 2 == 0, (q - k).abs() < near, (q - k).abs() < far)


# -- strided and hierarchical ------------------------------------------------------------------------------------------

case("strided")(lambda n: closed(lambda b, h, q, k, s: (q >= k) & ((q - k < s) | ((q - k) % s == 0)), span(n, 128)))
case("fixed")(
    lambda n: closed(lambda b, h, q, k, s: (q >= k) & ((q // s == k // s) | (k % s >= s - s // 16 - 1)), span(n, 128))
)
case("hours of the day")(lambda n: lambda b, h, q, k: (q % 24 == k % 24) | ((q - k).abs() < 12))


@case("dilated segments")  # LongNet
def dilated_segments(n: int) -> MaskMod:
    first = span(n, 256)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        allowed = q == k
        for level in range(4):
            segment, rate = first * 4**level, 2**level
            allowed = allowed | ((q // segment == k // segment) & (q % rate == 0) & (k % rate == 0))
        return allowed & (q >= k)

    return mask_mod


@case("powers of two")  # LogSparse
def powers_of_two(n: int) -> MaskMod:
    return lambda b, h, q, k: (q >= k) & (((q - k) & (q - k - 1)) == 0)


@case("powers of two by logarithm")
def logarithmic(n: int) -> MaskMod:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        steps = torch.log2((q - k).clamp(min=1).float())
        return (q >= k) & ((q - k < 8) | (steps == steps.floor()))

    return mask_mod


@case("butterfly")
def butterfly(n: int) -> MaskMod:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        apart = (q // blocks(n)) ^ (k // blocks(n))
        return (apart & (apart - 1)) == 0

    return mask_mod


@case("hierarchy of blocks")
def hierarchy(n: int) -> MaskMod:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        near = (q // 16 - k // 16).abs() <= 1
        for level in range(1, 4):
            side = 16 * 4**level
            near = near | (((q // side - k // side).abs() <= 1) & (k % side < 16))
        return near

    return mask_mod


# -- global tokens, columns, random blocks -----------------------------------------------------------------------------

case("Longformer")(lambda n: gallery.global_window(span(n, 256), [0, 1, n // 2, n - 1], n))
case("random blocks")(lambda n: closed(lambda b, h, q, k, t, s: t[q // s, k // s], layout(n, 0.05), blocks(n)))
case("random blocks by head", heads=4)(
    lambda n: closed(  # XAttention, MoBA
        lambda b, h, q, k, t, s: t[h, q // s, k // s] & (q >= k), layout(n, 0.05, 4), blocks(n)
    )
)


@case("BigBird")
def bigbird(n: int) -> MaskMod:
    size, chosen = blocks(n), layout(n, 0.02)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        row, column = q // size, k // size
        return ((row - column).abs() <= 1) | (row == 0) | (column == 0) | chosen[row, column]

    return mask_mod


@case("selected blocks")  # NSA: the key blocks of each query block, in any order
def selected_blocks(n: int) -> MaskMod:
    size, count = blocks(n), -(-n // blocks(n))
    chosen = torch.from_numpy(rng().integers(0, count, (count, 8)))
    return lambda b, h, q, k: (q >= k) & (chosen[q // size] == k // size).any()


@case("vertical and slash lines")  # MInference
def vertical_slash(n: int) -> MaskMod:
    vertical, slash = (torch.zeros(n, dtype=torch.bool) for _ in range(2))
    vertical[torch.from_numpy(rng().choice(n, min(100, n // 8), replace=False))] = True
    slash[torch.from_numpy(rng(1).choice(n, min(60, n // 16), replace=False))] = True
    return lambda b, h, q, k: (q >= k) & (vertical[k] | slash[(q - k).clamp(min=0)])


@case("heavy hitters and a window")  # H2O
def heavy_hitters(n: int) -> MaskMod:
    kept = torch.from_numpy(rng().random(n) < 0.02)
    return closed(lambda b, h, q, k, w: (q >= k) & (kept[k] | (q - k < w)), span(n, 512))


@case("separators")  # SepLLM
def separators(n: int) -> MaskMod:
    separator = torch.from_numpy(rng().random(n) < 1 / 15)
    return closed(lambda b, h, q, k, w: (q >= k) & ((k < 4) | separator[k] | (q - k < w)), span(n, 256))


@case("table of distances")
def table_of_distances(n: int) -> MaskMod:
    kept = torch.arange(2 * n) % 97 == 3
    kept[n - span(n, 64) : n + span(n, 64)] = True
    return lambda b, h, q, k: kept[q - k + n]


@case("buckets of distances")  # T5's buckets as a mask
def buckets(n: int) -> MaskMod:
    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        apart = (q - k).clamp(min=0)
        far = 16 + (torch.log(apart.clamp(min=1).float() / 16) / math.log(8) * 16).long()
        return (q >= k) & (torch.where(apart < 16, apart, far.clamp(max=31)) < 28)

    return mask_mod


@case("token types")
def token_types(n: int) -> MaskMod:
    kinds = owners(n, 40) % 3
    allowed = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])
    return lambda b, h, q, k: allowed[kinds[q], kinds[k]]


@case("token types added")
def token_types_added(n: int) -> MaskMod:
    kinds = owners(n, 40) % 5

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        terms = [(kinds[q] == a) & (kinds[k] == c) for a in range(5) for c in range(5) if (a + c) % 2]
        return sum(terms, torch.tensor(False)) * (q >= k)

    return mask_mod


@case("any of stacked terms")
def stacked(n: int) -> MaskMod:
    return closed(lambda b, h, q, k, w: torch.stack([q - k < w, k < 4, k % 128 == 127]).any() & (q >= k), span(n, 256))


# -- documents, packing, classes ---------------------------------------------------------------------------------------

case("documents")(lambda n: gallery.documents(lengths(n)))
case("causal documents")(lambda n: gallery.documents(lengths(n), causal))
case("documents with windows")(lambda n: gallery.documents(lengths(n), gallery.sliding_window(span(n, 256))))
case("prefixes in documents")(lambda n: gallery.documents(lengths(n), gallery.prefix_lm(7)))
case("documents by start")(lambda n: gallery.documents_by_start(lengths(n)))
case("shared prefix")(lambda n: gallery.shared_prefix(lengths(n), [i // 8 * 8 for i in range(24)]))  # rewards, RLHF
case("documents by entry", batch=2)(
    lambda n: gallery.documents_by_entry([owners(n).tolist(), owners(n, 5, seed=1).tolist()])
)
case("padding", batch=2)(lambda n: gallery.padding([n, n // 3]))
case("padding on the left", batch=2)(
    lambda n: closed(lambda b, h, q, k, p: (q >= k) & (k >= p[b]), torch.tensor([0, n // 3]))
)
case("packed images")(lambda n: gallery.documents(lengths(n, 60)))  # NaViT
case("jagged by search")(
    lambda n: closed(
        lambda b, h, q, k, ends: torch.bucketize(q, ends, right=True) == torch.bucketize(k, ends, right=True),
        torch.tensor(lengths(n)).cumsum(0),
    )
)
case("neighbouring sentences")(
    lambda n: closed(lambda b, h, q, k, s: (s[q] - s[k]).abs() <= 1, owners(n, max(24, n // 20)))
)
case("classes in any order")(
    lambda n: closed(
        lambda b, h, q, k, ids: ids[q] == ids[k], torch.from_numpy(rng().permutation(np.arange(n) * 16 // n))
    )
)
case("sessions in any order")(
    lambda n: closed(
        lambda b, h, q, k, ids: (ids[q] == ids[k]) & (q >= k), torch.from_numpy(rng().integers(0, n // 64 + 1, n))
    )
)


@case("cross documents", q_len=161)
def cross_documents(n: int) -> MaskMod:
    """Queries of one packing, keys of another."""
    of_query = owners(161, 12)
    of_key = owners(n, 12, seed=1)
    return lambda b, h, q, k: of_query[q] == of_key[k]


@case("rounds of hash buckets")  # Reformer
def hash_buckets(n: int) -> MaskMod:
    one, other = (torch.from_numpy(rng(seed).integers(0, max(4, n // 64), n)) for seed in range(2))
    return lambda b, h, q, k: ((one[q] == one[k]) | (other[q] == other[k])) & (q >= k)


@case("time stamps")
def time_stamps(n: int) -> MaskMod:
    stamp = torch.from_numpy(rng().exponential(1.0, n).cumsum())
    return lambda b, h, q, k: (stamp[q] - stamp[k] >= 0) & (stamp[q] - stamp[k] < 300.0)


@case("turns of a conversation")
def turns(n: int) -> MaskMod:
    turn = owners(n, 16)
    prompt = turn % 2 == 0
    return lambda b, h, q, k: (q >= k) & ((turn[q] == turn[k]) | prompt[k])


@case("parallel branches")  # agents, tree of thoughts: a table of which branch sees which
def branches(n: int) -> MaskMod:
    parent = [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 7]
    sees = torch.eye(len(parent), dtype=torch.bool)
    for branch in range(1, len(parent)):
        sees[branch] |= sees[parent[branch]]
    own = owners(n, len(parent))
    return lambda b, h, q, k: (q >= k) & sees[own[q], own[k]]


# -- speculative decoding ----------------------------------------------------------------------------------------------


@case("draft tree", q_len=63)  # Medusa, EAGLE
def draft_tree(n: int) -> MaskMod:
    return gallery.tree(n - 63, [-1, *((i - 1) // 2 for i in range(1, 63))])


case("drafts", q_len=60)(lambda n: gallery.drafts(n - 60, 12))


@case("cascade", q_len=64)  # a shared prefix, then a sequence for each query
def cascade(n: int) -> MaskMod:
    prefix = n // 2
    return lambda b, h, q, k: (k < prefix) | (q == (k - prefix) // max(1, (n - prefix) // 64))


# -- images and videos -------------------------------------------------------------------------------------------------

case("neighborhood 1-D")(lambda n: gallery.neighbours(lambda t: (t,), (n,), span(n, 256) | 1))
case("neighborhood 2-D")(lambda n: gallery.neighbours(gallery.row_major(image(n)[1]), image(n), 7))
case("neighborhood 3-D")(lambda n: gallery.neighbours(in_video(n), video(n), 3))
case("stand-alone 2-D")(lambda n: gallery.stand_alone(image(n)[1], 13))
case("sliding tiles with text")(
    lambda n: gallery.sliding_tiles((image(n)[0] // 4 // 2 * 4, image(n)[1]), 4, 3, 9)  # half of it text
)
case("video by frame")(lambda n: gallery.video_by_frame(7, span(n, 512)))
case("video by place")(lambda n: gallery.video_by_place(7, span(n, 1024), 3))
case("columns and rows")(
    lambda n: closed(lambda b, h, q, k, w: (q // w == k // w) | (q % w == k % w), image(n)[1])  # axial
)


@case("tiled neighborhood")
def tiled_neighborhood(n: int) -> MaskMod:
    rows, columns = image(n)
    return gallery.neighbours(gallery.in_tiles(columns, 8), (-(-rows // 8) * 8, columns), 7)


@case("Morton neighborhood")
def morton_neighborhood(n: int) -> MaskMod:
    side = 1 << -(-(n - 1).bit_length() // 2)
    return gallery.neighbours(gallery.morton, (side, side), 7)


@case("dilated neighborhood")
def dilated_neighborhood(n: int) -> MaskMod:
    place = gallery.row_major(image(n)[1])

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        (x, y), (u, v) = place(q), place(k)
        return ((x - u).abs() <= 6) & ((y - v).abs() <= 6) & ((x - u) % 2 == 0) & ((y - v) % 2 == 0)

    return mask_mod


@case("causal neighborhood in time")
def causal_neighborhood(n: int) -> MaskMod:
    place = in_video(n)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        (t, x, y), (s, u, v) = place(q), place(k)
        return (s <= t) & (t - s < 3) & ((x - u).abs() <= 2) & ((y - v).abs() <= 2)

    return mask_mod


@case("sliding tiles of a video")  # STA: tiles in token order
def sliding_tiles_of_video(n: int) -> MaskMod:
    frames, rows, columns = video(n)
    tile = (1, 4, 4)
    grid = tuple(-(-side // own) for side, own in zip((frames, rows, columns), tile, strict=True))

    def tile_of(token: Any) -> tuple[Any, Any, Any]:
        number = token // math.prod(tile)
        return number // (grid[1] * grid[2]), number // grid[2] % grid[1], number % grid[2]

    return gallery.neighbours(tile_of, grid, 3)


@case("table of video cubes")  # VSA: the cube of each token, and which cubes attend to which
def video_cubes(n: int) -> MaskMod:
    place, (_, rows, columns) = in_video(n), video(n)
    t, x, y = place(torch.arange(n))
    cube = (t // 4 * (rows // 4) + x // 4) * (columns // 4) + y // 4
    count = int(cube.max()) + 1
    chosen = torch.from_numpy((rng().random((count, count)) < 0.05) | np.eye(count, dtype=bool))
    return lambda b, h, q, k: chosen[cube[q], cube[k]]


@case("disc")
def disc(n: int) -> MaskMod:
    place = gallery.row_major(image(n)[1])

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        (x, y), (u, v) = place(q), place(k)
        return (x - u) * (x - u) + (y - v) ** 2 <= 25

    return mask_mod


@case("radius by root")
def radius(n: int) -> MaskMod:
    place = gallery.row_major(image(n)[1])

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        (x, y), (u, v) = place(q), place(k)
        return torch.sqrt(((x - u) ** 2 + (y - v) ** 2).float()) < 6.5

    return mask_mod


@case("points in space")
def points(n: int) -> MaskMod:
    at = torch.from_numpy(rng().random((n, 3)))
    at = at[torch.argsort((at * 8).long() @ torch.tensor([64, 8, 1]))]  # by cell of a grid
    return lambda b, h, q, k: ((at[q] - at[k]) ** 2).sum() < 0.01


@case("radial in time")  # Radial Attention: the window halves each time the distance of frames doubles
def radial(n: int) -> MaskMod:
    _, rows, columns = video(n)
    frame = rows * columns

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        apart = (q // frame - k // frame).abs()
        width = frame / 2 ** torch.floor(torch.log2(apart.clamp(min=1).float()))
        return ((q % frame - k % frame).abs() < width) & ((width >= 8) | (apart % 4 == 0))

    return mask_mod


@case("shifted windows of an image")  # Swin
def swin(n: int) -> MaskMod:
    rows, columns = image(n)

    def window(token: Any) -> Any:
        row, column = (token // columns + 3) // 7, (token % columns + 3) // 7
        return row * (columns // 7 + 2) + column

    return lambda b, h, q, k: window(q) == window(k)


# -- text with images, diffusion ---------------------------------------------------------------------------------------


@case("images in text", q_len=150)  # Flamingo: text attends to the images of its interval
def images_in_text(n: int) -> MaskMod:
    count = -(-n // 64)
    first = np.sort(rng().integers(0, 140, count))
    return gallery.images_in_text([(int(at), int(at) + 10) for at in first], 64)


@case("images both ways in causal text")  # Gemma 3, PaliGemma, Transfusion
def images_both_ways(n: int) -> MaskMod:
    own = owners(n, 30)
    picture = torch.where(own % 3 == 1, own, -1)
    return lambda b, h, q, k: (q >= k) | ((picture[q] == picture[k]) & (picture[q] >= 0))


case("block diffusion")(lambda n: gallery.block_diffusion(-(-n // 2), span(n, 32)))  # BD3-LM, SDAR


@case("hashed pairs in a window")
def hashed_pairs(n: int) -> MaskMod:
    """Pseudo-random pairs: no rule can decide a tile of them."""
    return closed(lambda b, h, q, k, w: (q >= k) & (q - k < w) & ((q * 7919 + k * 104729) % 1009 < 500), span(n, 256))


@case("hashed pairs")
def hashed_pairs_everywhere(n: int) -> MaskMod:
    return lambda b, h, q, k: ((q * k * 7919 + k * 104729 + q) ^ (q + k)) % 1009 < 4
