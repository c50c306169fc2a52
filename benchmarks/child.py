"""Run the current script again in a child process, for another build or fresh memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def child(*arguments: str, package: Path | str | None = None, **settings: str) -> Any:
    """Run the current script with `arguments` and parse its last line of output as JSON.

    Parameters
    ----------
    *arguments : str
        Command line of the child.
    package : path, optional
        Folder that the child imports spattn from.
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


def resident(field: str) -> int:
    """Bytes of this process's ``VmRSS`` (resident now) or ``VmHWM`` (peak). Linux only."""
    with open("/proc/self/status") as status:
        return 1024 * int(next(line for line in status if line.startswith(field)).split()[1])
