#!/usr/bin/env python3
"""Build a PyCUDA wheel without an NVIDIA driver, for offline GPU machines.

    tools/build_pycuda_wheel.py --python /usr/bin/python3.12 --dest .whl --needs

PyCUDA is published as source only and links ``libcuda.so.1``, which only a driver installs. This script links an empty
library of that name instead; on the GPU machine the wheel loads the real one. Writes ``pycuda-*.whl`` and, with
``--needs``, the wheels of its dependencies into ``--dest``. Copy the folder over and run
``python3 -m pip install --no-index --no-deps .whl/*.whl``.

Requires the given Python with pip and venv, a C++ compiler and the CUDA toolkit's headers, but no nvcc and no GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NEEDS = ("pytools", "platformdirs", "mako", "siphash24")
BUILD_NEEDS = ("setuptools", "wheel", "numpy>=2")


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Print and run a command; raise an error if it fails."""
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, env=env, check=True)


def empty_libcuda(folder: Path) -> Path:
    """Build an empty shared library with the driver's soname; return its folder."""
    folder.mkdir()
    source = folder / "empty.c"
    source.write_text("")
    run("gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so", source)
    return folder


def unpack_source(python: Path, version: str, folder: Path) -> Path:
    """Download and unpack PyCUDA's sdist; return its folder."""
    run(
        python,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=pycuda",
        f"pycuda{version}",
        "--dest",
        folder,
    )
    (archive,) = folder.glob("pycuda-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def build(args: argparse.Namespace, workspace: Path) -> None:
    """Build the wheel into ``args.dest``."""
    run(args.python, "-m", "venv", workspace / "venv")
    python = workspace / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *BUILD_NEEDS)
    source = unpack_source(python, args.version, workspace)
    library = empty_libcuda(workspace / "libcuda")
    run(
        python,
        "configure.py",
        f"--cuda-root={args.cuda_root}",
        f"--cuda-inc-dir={args.cuda_root / 'include'}",
        "--no-cuda-enable-curand",
        f"--cudadrv-lib-dir={library}",
        cwd=source,
    )
    # Some linkers drop libraries that resolve no symbol, such as the empty one.
    env = dict(os.environ, CPATH=str(args.cuda_root / "include"), LDFLAGS="-Wl,--no-as-needed")
    run(python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", args.dest, source, env=env)
    if args.needs:
        run(python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", args.dest, *NEEDS)


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="target interpreter of the wheel")
    parser.add_argument("--dest", type=Path, default=Path(".whl"), help="output folder")
    parser.add_argument("--cuda-root", type=Path, default=Path("/usr/local/cuda"), help="CUDA toolkit")
    parser.add_argument("--version", default="", help="version specifier of PyCUDA, such as '==2026.1'")
    parser.add_argument("--needs", action="store_true", help=f"also download {', '.join(NEEDS)}")
    args = parser.parse_args()
    args.dest.mkdir(parents=True, exist_ok=True)
    args.dest = args.dest.resolve()
    with tempfile.TemporaryDirectory(prefix="pycuda-wheel-") as folder:
        build(args, Path(folder))
    print(*sorted(str(path) for path in args.dest.glob("*.whl")), sep="\n")


if __name__ == "__main__":
    main()
