"""The running benchmark in a process of its own: with another build of the package, or with memory and caches of its
own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["child"]


def child(*arguments: str, package: Path | str | None = None, **settings: str) -> Any:
    """What this script prints last, as JSON, when it is called with `arguments`.

    Parameters
    ----------
    *arguments : str
        Of its command line.
    package : path, optional
        Folder from which it imports spattn.
    **settings
        Environment variables. OMP_NUM_THREADS and OPENBLAS_NUM_THREADS are 1 unless given.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | settings
    if package is not None:
        path = os.pathsep.join([str(Path(package).resolve()), environment.get("PYTHONPATH", "")])
        environment |= {"PYTHONPATH": path}
    command = [sys.executable, sys.argv[0], *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
