"""Records as structs of C++: what is written compiles, and only where the compiler lays it out as NumPy does."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from spattn._util.records import declaration, main
from spattn.planning.contract import types as _types

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compiles(text):
    command = [COMPILER, "-std=c++17", "-x", "c++", "-fsyntax-only", "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=False).returncode == 0


def with_includes(text):
    return f"#include <stddef.h>\n#include <stdint.h>\n{text}"


@needs_compiler
@pytest.mark.parametrize("name", ["VIEW", "COMPONENT", "WORK"])
def test_records_of_plans_are_laid_out_alike(name):
    assert compiles(with_includes(declaration("Record", getattr(_types, name))))


@needs_compiler
@pytest.mark.parametrize("fields", [[("a", "i4"), ("b", "i8")], [("a", "i8"), ("b", "i4")]])
def test_other_layouts_do_not_compile(fields):
    assert compiles(with_includes(declaration("Record", np.dtype(fields, align=True))))
    assert not compiles(with_includes(declaration("Record", np.dtype(fields))))


@pytest.mark.parametrize("kind", ["f2", "S4", ">i4" if np.little_endian else "<i4"])
def test_fields_that_have_no_type(kind):
    with pytest.raises(TypeError, match="^a: expected one of i4, .*; got "):
        declaration("Record", np.dtype([("a", kind)]))


def test_the_header_of_a_build_reads_modules_without_importing_them(tmp_path):
    module, header = tmp_path / "module.py", tmp_path / "records.h"
    module.write_text("import nothing_of_that_name\nN = 3\nPOINT = np.dtype([('x', 'f8', N), ('id', 'i8')])\n")
    main(str(header), f"Point={module}:POINT")
    text = header.read_text()
    assert "  double x[3];" in text and "static_assert(offsetof(Point, id) == 24 && sizeof(Point::id) == 8," in text
    assert COMPILER is None or compiles(text)
