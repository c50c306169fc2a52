"""A script that stands in for nvcc."""

from __future__ import annotations

from pathlib import Path

# It prints the arguments to the log, then runs `then`, e.g. to wait.
SCRIPT = """#!/bin/sh
echo "$@" >> "{log}"
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
{then}
while [ "$1" != -o ]; do shift; done
printf 'machine code by {version}' > "$2"
"""


class Compiler:
    """A stand-in for nvcc that counts its runs."""

    def __init__(self, folder: Path, version: str = "release 1"):
        folder.mkdir()
        self.path, self.log, self.version = folder / "nvcc", folder / "log", version
        self.write()

    def write(self, then: str = "") -> None:
        """Write the script; compilations run the shell commands `then`."""
        self.path.write_text(SCRIPT.format(log=self.log, version=self.version, then=then))
        self.path.chmod(0o755)

    def wait_for(self, file: Path) -> None:
        """Let compilations wait for a file, at most ten seconds."""
        self.write(f'n=0; while [ ! -e "{file}" ]; do sleep 0.02; n=$((n+1)); [ $n -lt 500 ] || exit 9; done')

    @property
    def runs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def compiled(self) -> list[str]:
        """The arguments of each compilation."""
        return [run for run in self.runs if run != "--version"]
