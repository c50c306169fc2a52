"""Compile the portable kernels on a machine without a GPU: ``python -m spattn.cuda.prebuild sm_80 sm_90``.

For machines without nvcc: copy the printed folder there, or point ``SPATTN_CACHE_DIR`` at it.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .driver import cache, compile
from .sm80.params import structs_of
from .sm80.variants import HEAD_DIMS, backward_variants, forward_variants, tile_within, variant

DTYPES = ("float16", "bfloat16", "float32", "float64")
# Shared memory per CTA in bytes (CUDA C++ Programming Guide, table of technical specifications).
_SHARED_BYTES = {"sm_80": 163 << 10, "sm_87": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10}
_SHARED_BYTES_OTHERS = 99 << 10


def kernels(
    arch: str, dtypes: Iterable[str], head_dims: Iterable[int]
) -> Iterator[tuple[str, dict[str, object], Mapping[str, np.dtype]]]:
    """Yield (source, macros, structs) of all kernels for plans in default tiles and 16-byte aligned arrays."""
    shared_bytes = _SHARED_BYTES.get(arch, _SHARED_BYTES_OTHERS)
    for dtype in dtypes:
        found = [variant(source, dtype) for source in ("forward/merge", "backward/statistics", "backward/sum")]
        for head_dim in head_dims:
            dims, tile = (head_dim, head_dim), tile_within(shared_bytes, dtype, head_dim)
            for precision in (None, "tf32") if dtype == "float32" else (None,):
                found += forward_variants(dtype, precision, *dims, tile, True, shared_bytes)
                for by_keys in (False, True):
                    found += backward_variants(dtype, precision, *dims, by_keys, True, shared_bytes)
        for source, macros, _ in found:
            yield source, macros, structs_of(source)


def main() -> None:
    """Parse the command line and compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", nargs="+", help="targets such as sm_80 or sm_90")
    parser.add_argument("--dtype", nargs="*", default=DTYPES, choices=DTYPES)
    parser.add_argument("--head-dim", nargs="*", type=int, default=HEAD_DIMS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    todo = [(arch, *one) for arch in args.arch for one in kernels(arch, args.dtype, args.head_dim)]
    with ThreadPoolExecutor(args.jobs) as pool:
        for _ in pool.map(lambda one: compile.cubin(one[1], one[0], *one[2:]), todo):
            pass
    different = len({(arch, source, *itertools.chain(*sorted(macros.items()))) for arch, source, macros, _ in todo})
    print(f"{different} kernels in {cache.folder()}")


if __name__ == "__main__":
    main()
