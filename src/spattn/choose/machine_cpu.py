"""Coefficients of the CPU cost model: nanoseconds for one of each feature.

Output of ``benchmarks/costs/price_cpu.py`` on a Xeon with AMX; bfloat16 with avx512bf16 on an EPYC (Zen 4), where that
is the best instruction set.
"""

from __future__ import annotations

from typing import NamedTuple

from .features_cpu import Counts, RowCounts

__all__ = ["Device", "device", "few_of", "shape_of"]

# In the order of Counts.
_NANOSECONDS: dict[tuple[str, str], tuple[float, ...]] = {
    ("baseline", "float32"): (0, 145, 1.39, 0.19, 3.64, 1.52, 0.306, 0),
    ("baseline", "float64"): (0, 0, 2.23, 0.156, 5.09, 1.89, 0.622, 0),
    ("baseline", "float16"): (0, 172, 1.79, 0.213, 3.78, 1.25, 1.33, 0),
    ("baseline", "bfloat16"): (0, 187, 1.15, 0.212, 3.45, 1.29, 0.474, 0.228),
    ("avx2", "float32"): (0, 0, 1.02, 0.108, 3.03, 0.976, 0.174, 0.122),
    ("avx2", "float64"): (0, 0, 1.49, 0.144, 3.89, 1.04, 0.449, 0),
    ("avx2", "float16"): (49.6, 0, 0.895, 0.144, 3.38, 0.706, 0.197, 0.341),
    ("avx2", "bfloat16"): (11.1, 0, 0.774, 0.143, 3.38, 0.719, 0.197, 0.438),
    ("avx512", "float32"): (173, 0, 0.625, 0.206, 5.09, 0.588, 0.24, 0.326),
    ("avx512", "float64"): (0, 0, 1.33, 0.212, 4.95, 0.787, 0.22, 0.182),
    ("avx512", "float16"): (295, 0, 0.601, 0.192, 5.06, 0.407, 0.148, 0.303),
    ("avx512", "bfloat16"): (273, 0, 0.528, 0.211, 5.29, 0.471, 0.143, 0.426),
    ("avx512bf16", "float32"): (118, 0, 0.587, 0.205, 4.33, 0.608, 0.216, 0.305),
    ("avx512bf16", "float64"): (0, 0, 1.35, 0.271, 5.49, 0.467, 0.222, 0.0628),
    ("avx512bf16", "float16"): (485, 0, 0.62, 0.209, 5.99, 0.579, 0.144, 0.383),
    ("avx512bf16", "bfloat16"): (319, 94.3, 0.237, 0.14, 5.11, 0.597, 0.144, 0.379),
    ("amx", "float32"): (145, 0, 0.582, 0.182, 4.35, 0.463, 0.231, 0.258),
    ("amx", "float64"): (0, 0, 1.38, 0.235, 4.75, 0.334, 0.205, 0),
    ("amx", "float16"): (596, 0, 0.739, 0.0446, 3.84, 0, 0.217, 0.343),
    ("amx", "bfloat16"): (536, 0, 0.539, 0.00412, 2.48, 4.71, 0.158, 0.347),
}

# Fields as in RowCounts: first for one-query tiles with scattered keys, then for few-query tiles that share keys.
_ROW_NANOSECONDS: dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, ...]]] = {
    ("baseline", "float32"): ((46.6, 1.34, 0, 0.215), (20.2, 0.365, 0.727, 0.0612)),
    ("baseline", "float64"): ((93.1, 1.42, 0, 0.486), (0, 0.927, 2.48, 0.18)),
    ("baseline", "float16"): ((158, 2.13, 3.8, 1.28), (37.1, 2.3, 0.782, 0.0566)),
    ("baseline", "bfloat16"): ((186, 0.58, 0, 0.272), (28.8, 0.555, 0.894, 0.0583)),
    ("avx2", "float32"): ((127, 0.681, 0, 0.164), (24.6, 0.248, 0.302, 0.03)),
    ("avx2", "float64"): ((52.4, 1.47, 0, 0.382), (0, 1.11, 0.501, 0.0619)),
    ("avx2", "float16"): ((146, 0.698, 0, 0.103), (32.5, 0.214, 0.399, 0.0305)),
    ("avx2", "bfloat16"): ((212, 0.1, 0, 0.118), (32.3, 0.105, 0.353, 0.0307)),
    ("avx512", "float32"): ((137, 0.714, 0, 0.144), (31.8, 0.239, 0.168, 0.0177)),
    ("avx512", "float64"): ((84.2, 1.09, 0, 0.324), (3, 0.995, 0.688, 0.0306)),
    ("avx512", "float16"): ((180, 0.608, 0, 0.08), (31.8, 0.332, 0.245, 0.0162)),
    ("avx512", "bfloat16"): ((192, 0.392, 0.52, 0.0777), (32.1, 0.162, 0.275, 0.0156)),
    ("avx512bf16", "float32"): ((186, 0.678, 0, 0.146), (21.2, 0.383, 0.187, 0.0169)),
    ("avx512bf16", "float64"): ((57.4, 1.28, 0, 0.317), (16.7, 0.85, 0.123, 0.0359)),
    ("avx512bf16", "float16"): ((182, 0.513, 0, 0.0793), (32.6, 0.342, 0.26, 0.016)),
    ("avx512bf16", "bfloat16"): ((126, 0.631, 7.72, 0.0531), (23.9, 0.28, 0.579, 0.0142)),
    ("amx", "float32"): ((122, 0.684, 0, 0.129), (23.2, 0.353, 0.235, 0.0165)),
    ("amx", "float64"): ((79.4, 1.16, 0, 0.319), (11.2, 0.823, 0.295, 0.0356)),
    ("amx", "float16"): ((203, 0.336, 0.12, 0.0812), (30.2, 0.368, 0.218, 0.0165)),
    ("amx", "bfloat16"): ((207, 0.262, 0.471, 0.0786), (29.8, 0.194, 0.245, 0.0162)),
}


class Device(NamedTuple):
    """Kernel parameters of an instruction set and dtype.

    Attributes
    ----------
    lanes : int
        Elements of a vector.
    copies : bool
        Whether keys and values are always copied, because they are converted.
    panel : int
        Queries of a panel (``kernels/amx/panel.h``); 0 without panels.
    few : int
        Largest number of queries of a tile that the forward computes row by row.
    nanoseconds : Counts
        Coefficients of query-vectorized tiles.
    one, together : RowCounts
        Coefficients of tiles of one query, and of a few.
    """

    lanes: int
    copies: bool
    panel: int
    few: int
    nanoseconds: Counts
    one: RowCounts
    together: RowCounts


def device(isa: str, dtype: str) -> Device:
    """Return the parameters of an instruction set, named as in the kernels, and a dtype."""
    lanes, copies, panel = shape_of(isa, dtype)
    one, together = (RowCounts(*each) for each in _ROW_NANOSECONDS[isa, dtype])
    return Device(lanes, copies, panel, few_of(isa, dtype), Counts(*_NANOSECONDS[isa, dtype]), one, together)


def few_of(isa: str, dtype: str) -> int:
    """Return the largest query tile that the forward computes row by row, as in ``kernels/table.cpp``."""
    lanes, _, panel = shape_of(isa, dtype)
    return lanes // 2 if panel else lanes


def shape_of(isa: str, dtype: str) -> tuple[int, bool, int]:
    """Return the lanes, whether keys and values are copied, and the queries of a panel (0: no panels)."""
    vector_bytes, copies = {"baseline": 16, "avx2": 32}.get(isa, 64), dtype not in ("float32", "float64")
    return vector_bytes // (8 if dtype == "float64" else 4), copies, 32 if isa == "amx" and copies else 0
