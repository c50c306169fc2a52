"""Compile kernels on a machine without a GPU: ``python -m spattn.cuda.prebuild sm_80 sm_90 sm_90a``.

``sm_90a`` are the kernels for Hopper, of calls without a score function, sinks, dropout or gathered keys, and of plans
with few tensor maps; other targets are the portable kernels. For machines without nvcc: copy the printed folder there,
or point ``SPATTN_CACHE_DIR`` at it.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..choose import specializations as forwards
from ..schedule.tensor_maps import MAPS
from .driver import cache, compile
from .sm80.params import structs_of
from .sm80.variants import HEAD_DIMS, backward_variants, forward_variants, tile_within, variant
from .sm90.backward import params as backward_params
from .sm90.backward import specializations as backwards
from .sm90.forward import params as forward_params
from .sm90.forward.terms import SPLIT_STRUCTS, split_macros

Kernel = tuple[str, dict[str, object], Mapping[str, np.dtype]]  # source, macros, structs
DTYPES = ("float16", "bfloat16", "float32", "float64")
# Shared memory per CTA in bytes (CUDA C++ Programming Guide, table of technical specifications).
_SHARED_BYTES = {"sm_80": 163 << 10, "sm_87": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10}
_SHARED_BYTES_OTHERS = 99 << 10


def kernels(arch: str, dtypes: Iterable[str], head_dims: Iterable[int]) -> Iterator[Kernel]:
    """Yield all kernels of a target for plans in default tiles and 16-byte aligned arrays."""
    if arch == forwards.ARCH:
        padded = {row.head_dim: row.head_dim_v for row in forwards.TABLE}
        for dtype, head_dim in itertools.product(dtypes, head_dims):
            if dtype in forwards.DTYPES and head_dim in padded:
                yield from _of_hopper(dtype, (head_dim, padded[head_dim]))
            elif dtype == "float32":
                yield from _of_terms(head_dim)
        return
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


def _of_hopper(dtype: str, dims: tuple[int, int]) -> Iterator[Kernel]:
    room = MAPS[0]
    for row in forwards.TABLE:
        if (row.head_dim, row.head_dim_v) == dims:
            yield "sm90/forward/attention.cu", forwards.variant(row, dtype, room), forward_params.structs(room)
    merge = forwards.variant(forwards.build(forwards.TILE[0], dims), dtype, room)
    yield "sm90/forward/merge.cu", merge, forward_params.structs(room)
    found = []
    for one_pass in (False, True):
        table = backwards.builds(dims, one_pass)
        found += [("backward", row) for row in table]
        found += [(name, table[0]) for name in ("statistics", "sum", "convert")[: 3 if one_pass else 2]]
    for name, chosen in dict.fromkeys(found):
        yield f"sm90/backward/{name}.cu", backwards.variant(chosen, dtype, room), backward_params.structs(room)


def _of_terms(head_dim: int) -> Iterator[Kernel]:
    """Yield the forward's kernels for float32."""
    room = MAPS[0]
    others = {}
    for row in forwards.TABLE_OF_TERMS:
        if row.head_dim == head_dim:
            macros = forwards.variant(row, "float32", room)
            yield "sm90/forward/attention.cu", macros, forward_params.structs(room)
            others[row.terms] = row
    for row in others.values():
        yield "sm90/forward/merge.cu", forwards.variant(row, "float32", room), forward_params.structs(room)
        yield "sm90/forward/split.cu", split_macros(row), SPLIT_STRUCTS


def _ship(unit: compile.Unit, folder: Path) -> None:
    """Store a cubin in a wheel's folder, by the hash that :func:`.driver.compile.begin` looks up."""
    if unit.compiler is None:
        raise compile.CompileError("nvcc was not found; set SPATTN_NVCC")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / unit.stem).write_bytes(cache.entry(unit.compile(unit.compiler)))


def main() -> None:
    """Parse the command line and compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", nargs="+", help="targets such as sm_80 or sm_90")
    parser.add_argument("--dtype", nargs="*", default=DTYPES, choices=DTYPES)
    parser.add_argument("--head-dim", nargs="*", type=int, default=HEAD_DIMS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--ship", type=Path, metavar="FOLDER", help="store them as those of a wheel, in FOLDER")
    args = parser.parse_args()
    todo = [(arch, one) for arch in args.arch for one in kernels(arch, args.dtype, args.head_dim)]

    def make(job: tuple[str, Kernel]) -> None:
        arch, (source, macros, structs) = job
        if args.ship is None:
            compile.cubin(source, arch, macros, structs)
        else:
            _ship(compile.Unit.of(source, arch, macros, structs), args.ship)

    with ThreadPoolExecutor(args.jobs) as pool:
        for _ in pool.map(make, todo):
            pass
    different = len({(arch, source, *itertools.chain(*sorted(macros.items()))) for arch, (source, macros, _) in todo})
    print(f"{different} kernels in {args.ship or cache.folder()}")


if __name__ == "__main__":
    main()
