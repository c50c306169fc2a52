"""Structs that Python and C++/CUDA share: defined once as NumPy dtypes, and checked by static_asserts.

The build generates a header from dtypes::

    python _util/records.py records.h View=planning/contract/types.py:VIEW Work=planning/contract/types.py:WORK
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np

__all__ = ["assertions", "declaration"]

_TYPES = {"i4": "int32_t", "i8": "int64_t", "u4": "uint32_t", "u8": "uint64_t", "f4": "float", "f8": "double"}
_HEADER = """// Written by the build from {sources}: see spattn/_util/records.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace spattn {{

{structs}
}}  // namespace spattn
"""


def assertions(name: str, record: np.dtype) -> str:
    """Return static_asserts that a C++ struct has the size and field offsets of a dtype (they use ``offsetof``)."""
    lines = [f'static_assert(sizeof({name}) == {record.itemsize}, "size of {name}");']
    for field, (kind, offset, *_) in (record.fields or {}).items():
        right = f"offsetof({name}, {field}) == {offset} && sizeof({name}::{field}) == {kind.itemsize}"
        lines.append(f'static_assert({right}, "{name}::{field}");')
    return "\n".join([*lines, ""])


def declaration(name: str, record: np.dtype) -> str:
    """Return a dtype as a C++ struct with static_asserts; raise TypeError for unsupported fields."""
    members = []
    for field, (kind, *_) in (record.fields or {}).items():
        if not kind.isnative or kind.base.str[1:] not in _TYPES:
            raise TypeError(f"{field}: expected one of {', '.join(_TYPES)}, in native byte order; got {kind}")
        size = "".join(f"[{n}]" for n in kind.shape)
        members.append(f"  {_TYPES[kind.base.str[1:]]} {field}{size};")
    return "\n".join([f"struct {name} {{", *members, "};", assertions(name, record)])


def read(path: Path, name: str) -> np.dtype:
    """Parse ``name = np.dtype([...])`` from a module's source, resolving the module's constants.

    The module is not imported, since its package is still being built.
    """
    constants: dict[str, ast.Constant] = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign([ast.Name(known)], ast.Constant() as value):
                constants[known] = value
            case ast.Assign([ast.Name(known)], ast.Call(_, [listed], words)) if known == name:
                fields = ast.literal_eval(_Known(constants).visit(listed))
                return np.dtype(fields, **{str(word.arg): ast.literal_eval(word.value) for word in words})
    raise ValueError(f"{path}: expected {name} = np.dtype([...])")


class _Known(ast.NodeTransformer):
    """Replaces names by constants."""

    def __init__(self, constants: dict[str, ast.Constant]):
        self.constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.constants.get(node.id, node)


def main(output: str, *records: str) -> None:
    """Write a header with the structs of the dtypes ``STRUCT=FILE:NAME``."""
    structs, sources = [], []
    for record in records:
        struct, _, place = record.partition("=")
        path, _, name = place.rpartition(":")
        structs.append(declaration(struct, read(Path(path), name)))
        sources.append(f"{name} of {Path(path).name}")
    Path(output).write_text(_HEADER.format(sources=", ".join(sources), structs="\n".join(structs)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
