"""Records that Python and C++ share: a NumPy dtype written as a struct, and what the compiler has to lay out alike.

A build writes a header of them::

    python _records.py records.h View=_types.py:VIEW Work=_types.py:WORK
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["declaration"]

_TYPES = {"i4": "int32_t", "i8": "int64_t", "u4": "uint32_t", "u8": "uint64_t", "f4": "float", "f8": "double"}
_HEADER = """// Written by the build from {sources}: see spattn/plan/_records.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace spattn {{

{structs}
}}  // namespace spattn
"""


def declaration(name: str, record: np.dtype) -> str:
    """A record as a struct of C++ or CUDA, with assertions of its size and the places of its fields.

    Parameters
    ----------
    name : str
        Of the struct.
    record : dtype
        With fields of 32 or 64 bits in the machine's byte order, or arrays of these.

    Returns
    -------
    str
        Needs ``offsetof`` and the types of ``stdint.h``.

    Raises
    ------
    TypeError
        If a field is none of these.
    """
    members, checks = [], [f"static_assert(sizeof({name}) == {record.itemsize});"]
    for field, (kind, offset, *_) in (record.fields or {}).items():
        if not kind.isnative or kind.base.str[1:] not in _TYPES:
            raise TypeError(f"{field}: expected one of {', '.join(_TYPES)}, in native byte order; got {kind}")
        size = "".join(f"[{n}]" for n in kind.shape)
        members.append(f"  {_TYPES[kind.base.str[1:]]} {field}{size};")
        checks.append(f"static_assert(offsetof({name}, {field}) == {offset});")
    return "\n".join([f"struct {name} {{", *members, "};", *checks, ""])


def read(path: Path, name: str) -> np.dtype:
    """The dtype that a module's text gives to `name`. The module is not imported: its package is only being built."""
    scope: dict[str, Any] = {"np": np}
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign):
            names = [ast.unparse(target) for target in statement.targets]
            if name in names or isinstance(statement.value, ast.Constant):
                exec(compile(ast.Module([statement], []), str(path), "exec"), scope)
    return scope[name]


def main(output: str, *records: str) -> None:
    """Write the header of ``STRUCT=FILE:NAME``..."""
    structs, sources = [], []
    for record in records:
        struct, _, place = record.partition("=")
        path, _, name = place.rpartition(":")
        structs.append(declaration(struct, read(Path(path), name)))
        sources.append(f"{name} of {Path(path).name}")
    Path(output).write_text(_HEADER.format(sources=", ".join(sources), structs="\n".join(structs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
