"""Check that the imported spattn is a given build.

python tools/check_build.py FOLDER openmp|serial
"""

import sys
from pathlib import Path

import spattn
from spattn import cpu

folder, threading = sys.argv[1:]
facts = cpu.info()
print(f"{Path(spattn.__file__).parent}: OpenMP {facts['OpenMP']}, instruction sets {facts['instruction sets']}")
if not Path(spattn.__file__).is_relative_to(folder):
    sys.exit(f"check_build: expected the build in {folder}, imported {spattn.__file__}")
if cpu._core.OPENMP != (threading == "openmp"):
    sys.exit(f"check_build: expected a build with threading {threading}, got the opposite")
