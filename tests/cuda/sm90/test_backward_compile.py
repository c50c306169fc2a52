"""What nvcc makes of the Hopper backward, without a GPU: products side by side, and registers that are not spilled."""

from __future__ import annotations

import re
import subprocess

import pytest

from spattn.choose.specializations import ARCH
from spattn.cuda.driver import compile
from spattn.cuda.sm90.backward import params, specializations
from spattn.schedule.tensor_maps import MAPS

NVCC = compile.find_nvcc()
pytestmark = [pytest.mark.family("sm90"), pytest.mark.skipif(NVCC is None, reason="nvcc was not found")]
# Bytes, where 192 of the 240 registers of a thread that computes hold sums and products: the loading and storing warps
# keep 24, and three words of a step find no register either (docs/hopper.md).
SPILLS = 360


@pytest.mark.slow
@pytest.mark.parametrize("row", specializations.TABLE, ids=lambda row: f"{row.head_dim} {row.results}")
def test_registers(tmp_path, row):
    room = MAPS[0]
    defines = specializations.variant(row, "bfloat16", room)
    file, flags = tmp_path / "kernel.cu", [*compile.FLAGS, *compile.target(ARCH)]
    file.write_text(compile.translation_unit("sm90/backward/backward.cu", params.structs(room)))
    command = [NVCC, *flags, *(f"-D{name}={value}" for name, value in defines.items()), f"-I{compile.SOURCES}"]
    done = subprocess.run([*command, "-Xptxas", "-v", "-o", tmp_path / "cubin", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "serialized" not in done.stdout + done.stderr
    spilled = max(int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr))
    assert spilled <= (SPILLS if row.consumer_registers == 240 else 0)


def test_macros():
    """Those that the sources ask for are those that the table gives."""
    sources = [path.read_text() for path in compile.headers("sm90/backward/backward.cu")]
    asked = {name for text in sources for name in re.findall(r"\bSPATTN_\w+", text)}
    defined = {name for text in sources for name in re.findall(r"#define (SPATTN_\w+)", text)}
    assert asked - defined - {"SPATTN_"} == set(specializations.variant(specializations.TABLE[0], "float16", MAPS[0]))
