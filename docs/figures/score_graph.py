"""The recorded operations of a score function, in columns by how often a kernel computes them."""

import matplotlib.pyplot as plt
import numpy as np
from common import INK, PAPER, TILE

from spattn import score
from spattn.score.program import CALL, DIAGONAL, HEAD, KEY, PAIR, QUERY, program_of, scopes
from spattn.score.tracing import trace

COLUMNS = {CALL: "once per call", HEAD: "per head", QUERY: "per query", KEY: "per key", DIAGONAL: "per diagonal"}
COLUMNS |= {PAIR: "for each pair"}
SIGNS = {"add": "+", "sub": "−", "mul": "×", "div": "÷"}
INPUTS = {"score": "score", "h": "h", "q": "q", "k": "k", "parameter": "cap", "look_up": "slopes[h]"}

slopes = np.float32([0.5, 0.25])
graph = program_of(trace(score.softcap(30.0) | score.alibi(slopes)).graph).forward
own = scopes(graph)
rows = dict.fromkeys(COLUMNS, 0)
places = []
for operation, scope in zip(graph.operations, own, strict=True):
    reached = [places[x][1] for x in operation.operands]
    rows[scope] = max([rows[scope], *(row + 1 for row in reached)]) if reached else rows[scope]
    places.append((list(COLUMNS).index(scope), rows[scope]))
    rows[scope] += 1
made, axis = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
for at, operation in enumerate(graph.operations):
    column, row = places[at]
    for operand in operation.operands:
        axis.annotate(
            "",
            (column, row),
            places[operand],
            arrowprops={"arrowstyle": "->", "color": "#8899aa", "shrinkA": 11, "shrinkB": 11},
        )
    name = SIGNS.get(operation.name) or INPUTS.get(operation.name, operation.name)
    last = at in graph.results
    axis.text(
        column,
        row,
        name,
        ha="center",
        va="center",
        fontsize=8,
        color=PAPER if last else INK,
        bbox={"boxstyle": "round", "facecolor": INK if last else TILE, "edgecolor": INK},
    )
axis.set_xlim(-0.5, len(COLUMNS) - 0.5)
axis.set_ylim(max(row for _, row in places) + 0.6, -0.6)
axis.set_xticks(range(len(COLUMNS)), COLUMNS.values(), fontsize=8)
axis.xaxis.tick_top()
axis.set_yticks([])
for side in axis.spines.values():
    side.set_visible(False)
axis.tick_params(length=0)
