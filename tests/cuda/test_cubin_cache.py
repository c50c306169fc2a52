"""The cubin cache and its compiler: corruption, other users, many writers. A script stands in for nvcc."""

from __future__ import annotations

import itertools
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from spattn.cuda import prebuild
from spattn.cuda.driver import cache, compile
from spattn.cuda.host.score import generated
from spattn.cuda.sm80.params import structs_of

from .fake_nvcc import Compiler
from .score_trees import operands

pytestmark = pytest.mark.family("sm80")

SOURCE = "sm80/forward/merge.cu"
SLOPE = 0.1


def make(**defines) -> bytes:
    return compile.cubin(SOURCE, "sm_80", {"SPATTN_DTYPE": "float32", **defines}, structs_of(SOURCE))


def cubins(place: Path) -> list[Path]:
    return sorted(place.glob("*.cubin"))


def test_warm_start_runs_no_compiler(nvcc, place):
    assert make() == b"machine code by release 1"
    assert len(nvcc.runs) == 2  # --version and the compilation
    compile._compiler_key.cache_clear()  # as a new process would
    assert make() == b"machine code by release 1"
    assert len(nvcc.runs) == 2
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "longer"])
def test_fault_37_damaged_entry_is_rebuilt(nvcc, place, damage):
    make()
    (entry,) = cubins(place)
    whole = entry.read_bytes()
    damaged = {"cut": whole[:-1], "empty": b"", "changed": whole[:40] + b"X" + whole[41:], "longer": whole + b"X"}
    entry.write_bytes(damaged[damage])
    assert make() == b"machine code by release 1"
    assert len(nvcc.runs) == 3
    assert make() == b"machine code by release 1" and len(nvcc.runs) == 3


def test_every_ingredient_counts(nvcc, place, tmp_path, monkeypatch):
    make()
    make(SPATTN_DTYPE="float64")
    compile.cubin(SOURCE, "sm_90", {"SPATTN_DTYPE": "float32"}, structs_of(SOURCE))
    assert len(cubins(place)) == 3
    compile.cubin(SOURCE, "sm_80", {"SPATTN_DTYPE": "float32"}, {})
    assert len(cubins(place)) == 4
    other = Compiler(tmp_path / "newer", "release 2")
    monkeypatch.setenv("SPATTN_NVCC", str(other.path))
    assert make() == b"machine code by release 2"
    assert len(cubins(place)) == 5


def test_a_changed_header_is_compiled_again(nvcc, place, tmp_path, monkeypatch):
    names = [path.relative_to(compile.SOURCES) for path in compile.headers(SOURCE)]
    assert Path("common/element.cuh") in names
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((compile.SOURCES / name).read_bytes())
    monkeypatch.setattr(compile, "SOURCES", tmp_path)
    make()
    with (tmp_path / "common/element.cuh").open("a") as file:
        file.write("// changed\n")
    make()
    assert len(cubins(place)) == 2


@pytest.mark.parametrize("source", ["forward/attention_mma.cu", "backward/backward_ffma.cu"])
def test_score_functions_are_part_of_the_key(nvcc, place, source):
    """The generated text, and the header that it includes; no captured value."""
    source = f"sm80/{source}"
    assert compile.SOURCES / "common/score_functions.cuh" in compile.headers(source)
    texts = [""]
    for function in (lambda s, b, h, q, k: s * SLOPE, lambda s, b, h, q, k: s + SLOPE * k):
        score = operands(function)
        for value in (0.5, 0.75):
            other = score._replace(parameters=(value,))
            texts.append(generated(other.program, other.types)[0])
    for text in texts:
        compile.cubin(source, "sm_80", {"SPATTN_DTYPE": "float32"}, structs_of(source), text)
    assert len(cubins(place)) == 3


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user needs root")
def test_fault_38_folder_of_another_user_is_refused(nvcc, place):
    place.mkdir()
    os.chown(place, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345.*SPATTN_CACHE_DIR"):
        make()
    assert not any("-o" in run for run in nvcc.runs)


def test_fault_38_world_writable_folder_is_refused(nvcc, place):
    make()
    place.chmod(0o777)
    with pytest.raises(PermissionError, match="world-writable"):
        make()
    place.chmod(0o755)
    make()


def test_fault_37_unwritable_folder(nvcc, tmp_path, monkeypatch):
    """A folder that cannot be made costs the cache, not the result; the user is told."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="SPATTN_CACHE_DIR"):
        assert make() == b"machine code by release 1"


def test_fault_37_many_writers(nvcc, place):
    """Writers of one entry and readers of it: whole entries only, and nothing left behind."""
    results, errors = [], []

    def work():
        try:
            for _ in range(20):
                cache.write("entry", b"x" * 200_000)
                results.append(cache.read("entry"))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and set(results) == {b"x" * 200_000}
    assert [path.name for path in place.iterdir()] == ["entry"]


def test_without_nvcc(nvcc, place, monkeypatch):
    """Kernels compiled elsewhere run without a compiler; others name what is missing."""
    made = make()
    monkeypatch.setenv("SPATTN_NVCC", "")
    assert make() == made
    with pytest.raises(compile.CompileError, match="install the CUDA toolkit or set SPATTN_NVCC"):
        make(SPATTN_DTYPE="float16")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The folder of the kernels that a wheel brings."""
    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "kernels")
    return cache.SHIPPED


@pytest.mark.parametrize("path", ["", "compiler"])
def test_kernels_of_the_wheel(nvcc, place, wheel, monkeypatch, path):
    """They run with and without nvcc, and nothing is compiled in advance; other macros are compiled or refused."""
    monkeypatch.setattr(compile, "run_nvcc", lambda *unit: b"of the wheel")
    monkeypatch.setattr(prebuild, "kernels", lambda *names: [(SOURCE, {"SPATTN_DTYPE": "float32"}, structs_of(SOURCE))])
    monkeypatch.setattr("sys.argv", ["prebuild", "sm_80", "--ship", str(wheel)])
    prebuild.main()
    monkeypatch.undo()
    monkeypatch.setattr(cache, "SHIPPED", wheel)
    monkeypatch.setenv("SPATTN_CACHE_DIR", str(place / "other"))
    monkeypatch.setenv("SPATTN_NVCC", str(nvcc.path) if path else "")
    unit = compile.Unit.of(SOURCE, "sm_80", {"SPATTN_DTYPE": "float32"}, structs_of(SOURCE))
    compile.begin_early(unit)
    assert make() == b"of the wheel" and not (place / "other").exists()
    if path:
        assert make(SPATTN_DTYPE="float16") != b"of the wheel"
    else:
        with pytest.raises(compile.CompileError, match="nvcc was not found"):
            make(SPATTN_DTYPE="float16")


def test_fault_37_damaged_kernel_of_the_wheel(nvcc, place, wheel):
    unit = compile.Unit.of(SOURCE, "sm_80", {"SPATTN_DTYPE": "float32"}, structs_of(SOURCE))
    wheel.mkdir()
    (wheel / unit.stem).write_bytes(cache.entry(b"of the wheel")[:-1])
    assert make() == b"machine code by release 1"


def test_hopper_kernels_have_own_names():
    """No kernel of a target is compiled twice, and each of head_dim 64 and 128 is among them."""
    found = list(prebuild.kernels("sm_90a", ("float16", "bfloat16", "float32"), (64, 128)))
    stems = [compile.Unit.of(source, "sm_90a", macros, own).stem for source, macros, own in found]
    assert len(set(stems)) == len(stems)
    names = "SPATTN_DTYPE", "SPATTN_HEAD_DIM", "SPATTN_BLOCK_Q"
    attention = {tuple(macros[name] for name in names) for source, macros, _ in found if "attention" in source}
    every = set(itertools.product(("float16", "bfloat16", "float32"), (64, 128), (64, 128)))
    assert attention == every | set(itertools.product(("float16", "bfloat16"), (64, 128), (192,)))


def test_nvcc_of_a_package(tmp_path, monkeypatch):
    """The last of all places; without its headers it compiles nothing."""
    for name in ("SPATTN_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compile.shutil, "which", lambda name: None)
    monkeypatch.setattr(compile.Path, "is_file", lambda path: path.exists() and tmp_path in path.parents)
    path = tmp_path / "nvidia/cu13/bin/nvcc"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert compile.find_nvcc() is None
    (path.parents[1] / "include/nv").mkdir(parents=True)
    (path.parents[1] / "include/nv/target").touch()
    assert compile.find_nvcc() == path


def test_compiler_that_fails(nvcc):
    nvcc.path.write_text('#!/bin/sh\necho "what went wrong"\nexit 3\n')
    with pytest.raises(compile.CompileError, match="(?s)exit status 3.*what went wrong"):
        make()


def test_compiler_that_cannot_run(tmp_path, place, monkeypatch):
    path = tmp_path / "nvcc"
    path.write_text("not a program")
    monkeypatch.setenv("SPATTN_NVCC", str(path))
    with pytest.raises(compile.CompileError, match="cannot be run"):
        make()


def test_fault_40_no_shell_reads_the_command(nvcc, place, tmp_path):
    """Characters that a shell would act on reach the compiler as they are."""
    make(NAME="$(touch hacked);`touch hacked`")
    assert any("$(touch hacked);`touch hacked`" in run for run in nvcc.runs)
    assert not list(tmp_path.rglob("hacked")) and not Path("hacked").exists()
