"""What one of each count costs on a CPU, in nanoseconds: measured by ``benchmarks/price_cpu.py``, which prints these
lines."""

from __future__ import annotations

from typing import NamedTuple

from ..schedule.price import Counts, RowCounts

__all__ = ["Device", "device", "shape_of"]

# In the order of Counts.
_NANOSECONDS: dict[tuple[str, str], tuple[float, ...]] = {
    ("baseline", "float32"): (532, 190, 2.17, 0.547, 9.5, 2.84, 1.45, 0.822),
    ("baseline", "float64"): (1.4e03, 328, 5.01, 0.37, 15.1, 5.14, 1.12, 0),
    ("baseline", "float16"): (2.29e03, 709, 3.48, 0.471, 12.6, 3.22, 2.31, 0),
    ("baseline", "bfloat16"): (0, 855, 3.77, 0.297, 11.9, 3.86, 0.779, 0),
    ("avx2", "float32"): (0, 581, 2.71, 0.269, 10.5, 1.24, 0.624, 0.415),
    ("avx2", "float64"): (0, 0, 3.44, 0.316, 9.73, 1.92, 1.62, 1.62),
    ("avx2", "float16"): (251, 503, 2.39, 0.426, 9.92, 0.679, 0.629, 1.1),
    ("avx2", "bfloat16"): (0, 0, 1.55, 0.533, 5.56, 0, 0.802, 1.13),
    ("avx512", "float32"): (0, 220, 1.72, 0.492, 6.9, 0.19, 0.42, 0.22),
    ("avx512", "float64"): (476, 122, 2.38, 0.641, 12.2, 0.333, 0.525, 0.459),
    ("avx512", "float16"): (884, 104, 1.02, 0.439, 14.5, 0.479, 0.578, 0.704),
    ("avx512", "bfloat16"): (260, 233, 1.35, 0.49, 10.1, 0.505, 0.407, 1.28),
    ("avx512bf16", "float32"): (628, 0, 1.24, 0.478, 10.6, 0.25, 0.407, 1.76),
    ("avx512bf16", "float64"): (0, 0, 2.48, 0.569, 9.71, 1.08, 0.86, 1.23),
    ("avx512bf16", "float16"): (3.3, 594, 1.02, 0.284, 9.06, 1.76, 0.666, 1.45),
    ("avx512bf16", "bfloat16"): (1.72e03, 0, 0.511, 0.622, 16.9, 0.92, 0.349, 0.873),
    ("amx", "float32"): (0, 38.2, 0.995, 0.395, 5.63, 0.566, 0.429, 0.695),
    ("amx", "float64"): (0, 0, 2.85, 0.542, 6.47, 0, 0.616, 0.273),
    ("amx", "float16"): (1.05e03, 504, 1.27, 0.157, 3.41, 0, 0.505, 0.465),
    ("amx", "bfloat16"): (2.26e03, 0, 0.887, 0.0143, 4.22, 0, 0.232, 1.42),
}

# In the order of RowCounts: of tiles with one query, whose keys lie anywhere, and with a few, which share theirs. The
# former are of benchmarks/pairwise_cpu.py.
_ROW_NANOSECONDS: dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]] = {
    ("baseline", "float32"): ((500, 0, 0, 0.75), (62.2, 2.2, 4.08, 0.174)),
    ("baseline", "float64"): ((500, 0, 0, 1.45), (128, 4.68, 11.8, 0.444)),
    ("baseline", "float16"): ((500, 0, 0, 3.6), (133, 4.22, 6.33, 0.768)),
    ("baseline", "bfloat16"): ((500, 0, 0, 0.85), (206, 2.57, 7.44, 0.302)),
    ("avx2", "float32"): ((500, 0, 0, 0.45), (58.9, 1.65, 1.6, 0.081)),
    ("avx2", "float64"): ((500, 0, 0, 0.9), (0, 4.2, 1.74, 0.169)),
    ("avx2", "float16"): ((500, 0, 0, 0.36), (126, 1.34, 2.32, 0.0614)),
    ("avx2", "bfloat16"): ((500, 0, 0, 0.36), (106, 0.735, 2.52, 0.0555)),
    ("avx512", "float32"): ((500, 0, 0, 0.45), (50.1, 1.15, 1.57, 0.0341)),
    ("avx512", "float64"): ((500, 0, 0, 0.9), (0, 2.88, 1.17, 0.0895)),
    ("avx512", "float16"): ((500, 0, 0, 0.36), (80.3, 0.749, 2.17, 0.0358)),
    ("avx512", "bfloat16"): ((500, 0, 0, 0.36), (112, 0.263, 1.86, 0.035)),
    ("avx512bf16", "float32"): ((500, 0, 0, 0.45), (49.8, 1.15, 1.56, 0.0339)),
    ("avx512bf16", "float64"): ((500, 0, 0, 0.9), (0, 3.16, 1.28, 0.0983)),
    ("avx512bf16", "float16"): ((500, 0, 0, 0.36), (79.5, 0.742, 2.15, 0.0355)),
    ("avx512bf16", "bfloat16"): ((500, 0, 0, 0.36), (177, 0.415, 2.94, 0.0551)),
    ("amx", "float32"): ((500, 0, 0, 0.45), (38.8, 0.894, 1.22, 0.0264)),
    ("amx", "float64"): ((500, 0, 0, 0.9), (0, 2.5, 1.01, 0.0776)),
    ("amx", "float16"): ((500, 0, 0, 0.36), (80.3, 0.749, 2.17, 0.0358)),
    ("amx", "bfloat16"): ((500, 0, 0, 0.36), (112, 0.263, 1.86, 0.035)),
}


class Device(NamedTuple):
    """How the kernels of an instruction set compute with a dtype.

    Attributes
    ----------
    lanes : int
        Of a vector.
    copies : bool
        Whether keys and values are always copied: they are converted then.
    few : int
        Up to how many queries of a tile the forward computes row by row.
    nanoseconds : Counts
        For one of each.
    one, together : RowCounts
        The same of tiles with one query, and with a few.
    """

    lanes: int
    copies: bool
    few: int
    nanoseconds: Counts
    one: RowCounts
    together: RowCounts


def device(isa: str, dtype: str) -> Device:
    """That of an instruction set, as the kernels name it, and a dtype."""
    lanes, copies = shape_of(isa, dtype)
    few = lanes // 2 if isa == "amx" and copies else lanes  # as kernels/table.cpp has it
    one, together = (RowCounts(*each) for each in _ROW_NANOSECONDS[isa, dtype])
    return Device(lanes, copies, few, Counts(*_NANOSECONDS[isa, dtype]), one, together)


def shape_of(isa: str, dtype: str) -> tuple[int, bool]:
    """Lanes, and whether keys and values are copied."""
    vector_bytes = {"baseline": 16, "avx2": 32}.get(isa, 64)
    return vector_bytes // (8 if dtype == "float64" else 4), dtype not in ("float32", "float64")
