"""Targets of peers_cpu.py."""

from __future__ import annotations

# (problem, pass, contender or "ceiling", target ratio or share for float32, for bfloat16)
TARGETS = [
    ("window", "forward", "FlexAttention", 3.6, 4.0),
    ("window_long", "forward", "SDPA dense", 17.0, 26.0),
    ("window", "forward", "ceiling", 55.0, 18.0),
    ("dense", "forward", "SDPA dense", 1.1, 2.0),
    ("longformer", "forward", "FlexAttention", 4.2, 4.0),
    ("neighborhood", "forward", "FlexAttention", 12.0, 20.0),
    ("dilated", "forward", "FlexAttention", 10.0, 12.0),
    ("strided", "forward", "FlexAttention", 10.0, 12.0),
    ("window", "forward + backward", "SDPA dense", 7.0, 12.0),
]


def rows(results: list[dict]) -> list[dict]:
    """One row per target and dtype whose problem was measured."""
    found = []
    for problem, which, against, *least in TARGETS:
        for dtype, target in zip(("float32", "bfloat16"), least, strict=True):
            own = [r for r in results if (r["name"], r["pass"], r["dtype"]) == (problem, which, dtype)]
            wanted = "spattn" if against == "ceiling" else against
            match = [r for r in own if r["contender"] == wanted]
            if not match or not any(r["contender"] == "spattn" for r in own):
                continue
            share = against == "ceiling"
            reached = match[0]["share_of_ceiling_pct" if share else "times_spattn"]
            unit = " %" if share else "×"
            comparison = "share of the arithmetic ceiling" if share else f"faster than {against}"
            found.append(
                {
                    "what": f"{match[0]['problem']}, {which}: {comparison}",
                    "dtype": dtype,
                    "target": f"≥ {target:g}{unit}",
                    "reached": f"{reached:.4g}{unit}",
                    "met": "yes" if reached >= target else "no",
                }
            )
    return found
