#!/usr/bin/env python3
"""Count the bytes of sparse formats for a pattern.

    python benchmarks/planning/formats.py            # seconds; needs SciPy
    python benchmarks/planning/formats.py --quick    # 512 tokens only, writes nothing

The patterns and lengths of SPLAT (Gupta et al. 2024, arXiv:2407.16847). Each format stores which pairs are allowed,
without values: affine-compressed rows (``AffineRows``), compressed sparse rows with 32-bit indices, block CSR of
32 × 32 blocks with a bitmask per partial block, a bitmask of all pairs, and spattn's plan. Writes ``formats``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the shared modules

import numpy as np
import record

import spattn
from spattn import patterns as sp

LENGTHS = (512, 1024, 2048, 4096, 8192)
BLOCK = 32
CASES = {
    "Longformer": lambda n: sp.longformer(n // 8, global_tokens=16),
    "BigBird": lambda n: sp.BigBird(64).at(0, 0),
    "strided": lambda n: sp.strided(round(n**0.5)),
    "blocked": lambda n: sp.BlockLocal(n // 16),
}


def blocked_bytes(mask: np.ndarray) -> int:
    """Bytes of the mask in block CSR with bitmasks of partial blocks."""
    import scipy.sparse

    side = len(mask) // BLOCK
    pairs = mask.reshape(side, BLOCK, side, BLOCK).sum(axis=(1, 3))
    blocks = scipy.sparse.csr_array(pairs > 0)
    return blocks.indptr.nbytes + blocks.indices.nbytes + int(((pairs > 0) & (pairs < BLOCK**2)).sum()) * BLOCK**2 // 8


def measure(name: str, tokens: int) -> dict[str, object]:
    """One row of the results."""
    pattern = CASES[name](tokens)
    rows = pattern.index_set(tokens, tokens)
    mask = rows.to_dense()
    sizes = {
        "affine_rows": rows.nbytes,
        "csr": 4 * (tokens + 1 + rows.nnz),
        "blocked_csr": blocked_bytes(mask),
        "bitmask": tokens**2 // 8,
        "plan": spattn.plan(pattern, tokens).nbytes,
    }
    kib = {f"{format_}_kib": round(size / 1024, 1) for format_, size in sizes.items()}
    shares = {"density": round(rows.density, 4), "csr_over_affine": round(sizes["csr"] / sizes["affine_rows"], 1)}
    return {"name": name, "tokens": tokens, "nnz": rows.nnz} | shares | kib


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 tokens only, write nothing")
    options = parser.parse_args()
    rows = [measure(name, tokens) for name in CASES for tokens in (LENGTHS[:1] if options.quick else LENGTHS)]
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    if not options.quick:
        record.write("formats", rows, notes="Bytes, counted; pairs without values.", block=BLOCK)


if __name__ == "__main__":
    main()
