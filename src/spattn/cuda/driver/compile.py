"""Compile kernel sources to cubins with nvcc, cached by source, flags and compiler."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..._util.records import assertions
from . import cache, jobs

SOURCES = Path(__file__).parents[1]  # root of the kernels' #include "..." paths
FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-cubin")
_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class CompileError(RuntimeError):
    """nvcc is missing or rejected a kernel; the message contains the command and its output."""


def cubin(
    source: str, arch: str, defines: Mapping[str, object], structs: Mapping[str, np.dtype], text: str = ""
) -> bytes:
    """Return the cubin of a kernel file such as ``"sm80/forward/merge.cu"``, from the cache or compiled now.

    `defines` are macros (``-DNAME=value``); static assertions check `structs`, the dtypes of the kernel's structs;
    `text` is generated C++ that precedes the file.
    Raises CompileError if nvcc is needed but missing, or fails; PermissionError if the cache folder is not safe.
    """
    return begin(Unit.of(source, arch, defines, structs, text)).result()


class Unit(NamedTuple):
    """A translation unit: its kernel file, its C++, nvcc's options, the beginning of its cache entry's name, nvcc."""

    source: str
    text: str
    flags: list[str]
    stem: str
    compiler: Path | None

    @classmethod
    def of(
        cls, source: str, arch: str, defines: Mapping[str, object], structs: Mapping[str, np.dtype], text: str = ""
    ) -> Unit:
        """Return the unit of a kernel; see :func:`cubin`."""
        flags = [*FLAGS, *target(arch), *(f"-D{name}={value}" for name, value in sorted(defines.items()))]
        unit = text + translation_unit(source, structs)
        stem = f"{source.removesuffix('.cu').replace('/', '-')}-{source_key(source, [*flags, unit])}"
        return cls(source, unit, flags, stem, find_nvcc())

    def name(self, compiler: Path) -> str:
        """Return the name of the cache entry."""
        return f"{self.stem}-{compiler_key(compiler)}.cubin"

    def compile(self, compiler: Path) -> bytes:
        """Return the cubin from the cache, where another thread or process may have stored it, or compiled now."""
        name = self.name(compiler)
        image = cache.read(name)
        if image is None:
            image = run_nvcc(compiler, self.text, self.flags)
            cache.write(name, image)
        return image


def begin(unit: Unit) -> Future[bytes]:
    """Return the cubin of a unit, which a thread compiles if neither the wheel nor the cache has it; callers with equal
    units share one compilation."""
    compiler, image = unit.compiler, cache.shipped(unit.stem)
    if image is not None:
        return _known(image)
    if compiler is None:
        return _known(_without_compiler(unit.stem, unit.source))
    name = unit.name(compiler)
    found = jobs.find(name)
    if found is None:
        image = cache.read(name)
        found = jobs.start(name, partial(unit.compile, compiler)) if image is None else _known(image)
    return found


def begin_early(unit: Unit) -> None:
    """Let a thread compile a unit that :func:`begin` will ask for, unless a cache has it; an error is raised there."""
    compiler = unit.compiler
    if compiler is not None and not cache.has(unit.name(compiler)) and cache.shipped(unit.stem) is None:
        jobs.start(unit.name(compiler), partial(unit.compile, compiler), wanted=False)


def _known(image: bytes) -> Future[bytes]:
    found: Future[bytes] = Future()
    found.set_result(image)
    return found


def target(arch: str) -> tuple[str, ...]:
    """Return nvcc's options for one architecture's machine code."""
    return ("-gencode", f"arch=compute_{arch.removeprefix('sm_')},code={arch}")


def translation_unit(source: str, structs: Mapping[str, np.dtype]) -> str:
    """Return source that includes a kernel file and asserts the layouts of structs in its namespace."""
    generation, *folders, _ = source.split("/")
    namespace = f"spattn::{generation}" + ("_backward" if "backward" in folders else "")
    checks = [assertions(f"{namespace}::{name}", dtype) for name, dtype in structs.items()]
    return "\n".join([f'#include "{source}"', "#include <cstddef>", *checks])


def source_key(source: str, flags: list[str]) -> str:
    """Hash the flags, the source and its headers."""
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in headers(source):
        content, _ = _read(path)
        digest.update(f"\0{path.relative_to(SOURCES)}\0".encode() + content)
    return digest.hexdigest()[:40]


def headers(source: str) -> list[Path]:
    """Return the file and our headers that it includes, transitively, in a fixed order."""
    found: dict[str, Path] = {}
    waiting = [source]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = SOURCES / name
            waiting += _read(found[name])[1]
    return [found[name] for name in sorted(found)]


def _read(path: Path) -> tuple[bytes, list[str]]:
    """Return a file's content and the files that it includes, cached by size and modification time."""
    status = path.stat()
    return _read_once(path, status.st_size, status.st_mtime_ns)


@lru_cache(256)
def _read_once(path: Path, size: int, modified: int) -> tuple[bytes, list[str]]:
    content = path.read_bytes()
    return content, [include.decode() for include in _INCLUDE.findall(content)]


def find_nvcc() -> Path | None:
    """Return nvcc's path: ``SPATTN_NVCC``, else from ``CUDA_HOME``, ``CUDA_PATH``, the PATH, ``/usr/local/cuda`` or the
    package nvidia-cuda-nvcc."""
    chosen = os.environ.get("SPATTN_NVCC")
    if chosen is not None:
        return Path(chosen) if chosen and Path(chosen).is_file() else None
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    on_path = shutil.which("nvcc")
    candidates = [Path(root) / "bin" / "nvcc" for root in roots if root]
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if path.is_file()), None) or _packaged_nvcc()


def _packaged_nvcc() -> Path | None:
    """Return the nvcc that ``pip install nvidia-cuda-nvcc`` has installed, if its headers are there, too."""
    namespace = importlib.util.find_spec("nvidia")
    for root in (namespace and namespace.submodule_search_locations) or ():
        for path in sorted(Path(root).glob("cu*/bin/nvcc"), reverse=True):
            if (path.parents[1] / "include" / "nv" / "target").is_file():
                return path
    return None


def compiler_key(compiler: Path) -> str:
    """Hash the compiler's version, cached by its path, size and modification time so that a warm start runs no nvcc."""
    status = compiler.resolve().stat()
    return _compiler_key(compiler.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache
def _compiler_key(compiler: Path, size: int, modified: int) -> str:
    identity = hashlib.sha256(f"{compiler}\0{size}\0{modified}".encode()).hexdigest()[:40]
    name = f"nvcc-{identity}.version"
    version = cache.read(name)
    if version is None:
        version = _run([str(compiler), "--version"]).stdout.encode()
        cache.write(name, version)
    return hashlib.sha256(version).hexdigest()[:16]


def run_nvcc(compiler: Path, unit: str, flags: list[str]) -> bytes:
    """Compile now, without a shell."""
    # No TemporaryDirectory: a child that is forked meanwhile would remove its folder on exit.
    folder = tempfile.mkdtemp(prefix="spattn-nvcc-")
    try:
        file, out = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        file.write_text(unit)
        _run([str(compiler), *flags, f"-I{SOURCES}", "-o", str(out), str(file)], folder)
        return out.read_bytes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        done = jobs.run(command, folder)
    except OSError as error:
        raise CompileError(f"{command[0]}: cannot be run: {error}") from error
    if done.returncode:
        raise CompileError(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def _without_compiler(stem: str, source: str) -> bytes:
    """Return a cached cubin of this source and these flags, from any compiler version."""
    for name in cache.names(stem + "-"):
        image = cache.read(name)
        if image is not None:
            return image
    raise CompileError(
        f"{source}: not compiled yet and nvcc was not found; pip install 'spattn[nvcc]' (for drivers of CUDA 13), "
        f"install the CUDA toolkit or set SPATTN_NVCC, or fill {cache.folder()} on a machine that has nvcc: "
        "python -m spattn.cuda.prebuild"
    )
