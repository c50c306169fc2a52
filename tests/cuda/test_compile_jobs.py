"""Compilations in parallel and in advance: shared, bounded, announced, ended with the process. A script is nvcc."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest

from spattn._util.meanwhile import meanwhile
from spattn.cuda.driver import compile, jobs, launch
from spattn.cuda.driver.launch import Request
from spattn.cuda.sm80.params import structs_of

pytestmark = pytest.mark.family("sm80")

SOURCE = "sm80/forward/merge.cu"
MACHINE_CODE = b"machine code by release 1"
FAILS = 'echo "what went wrong"; exit 3'
DEVICE = SimpleNamespace(ordinal=0, load=lambda image: image)


def request(number=0, text=""):
    """One of several kernels."""
    defines = {"SPATTN_DTYPE": "bfloat16", "SPATTN_HEAD_DIM": 128, "NUMBER": number}
    return Request(SOURCE, "sm_80", defines, structs_of(SOURCE), "merge", text)


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_threads(*functions):
    """Start threads; return a function that joins them and returns their results, exceptions included."""
    found = [None] * len(functions)

    def run(n):
        try:
            found[n] = functions[n]()
        except Exception as error:
            found[n] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()

    def join():
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return found

    return join


@pytest.fixture
def loading(monkeypatch):
    """Kernels are their images."""
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setattr(launch, "Kernel", lambda device, request, image: (request.defines["NUMBER"], image))


@pytest.fixture
def most(monkeypatch):
    """Set the number of processors."""
    set_to = lambda count: monkeypatch.setattr(jobs, "processors", lambda: count)  # noqa: E731
    set_to(4)
    return set_to


def test_kernels_of_a_call_are_compiled_at_once(nvcc, loading, most):
    """Each run of the compiler waits until there are three."""
    three = f'[ $(grep -c -- -o "{nvcc.log}") -ge 3 ]'
    nvcc.write(f"n=0; until {three}; do sleep 0.02; n=$((n+1)); [ $n -lt 500 ] || exit 9; done")
    wanted = [request(number) for number in range(3)]
    assert launch.load_kernels(DEVICE, wanted) == [(number, MACHINE_CODE) for number in range(3)]
    assert launch.load_kernels(DEVICE, [*wanted[1:], wanted[1]])[-1] == (1, MACHINE_CODE)
    assert len(nvcc.compiled) == 3


def test_threads_share_a_compilation(nvcc, loading, most, tmp_path):
    """Also with one that began in advance."""
    nvcc.wait_for(tmp_path / "go")
    launch.compile_early(DEVICE, [request()])
    wait_until(lambda: nvcc.compiled)
    join = in_threads(*[lambda: launch.load_kernels(DEVICE, [request()])] * 3)
    time.sleep(0.1)
    (tmp_path / "go").write_text("")
    assert join() == [[(0, MACHINE_CODE)]] * 3
    assert len(nvcc.compiled) == 1 and not jobs._jobs.kept and not jobs._jobs.wanted


def test_errors_are_raised_where_the_kernel_is_needed(nvcc, loading, most):
    """Once; the next call compiles again."""
    nvcc.write(f'case "$*" in *NUMBER=1*) {FAILS};; esac')
    launch.compile_early(DEVICE, [request(1)])
    wait_until(lambda: jobs._jobs.kept and all(job.image.done() for job in jobs._jobs.kept.values()))
    assert launch.load_kernels(DEVICE, [request(0)]) == [(0, MACHINE_CODE)]
    with pytest.raises(compile.CompileError, match="(?s)exit status 3.*what went wrong"):
        launch.load_kernels(DEVICE, [request(1)])
    assert len(nvcc.compiled) == 2  # no second run for the error
    nvcc.write()
    assert launch.load_kernels(DEVICE, [request(1)]) == [(1, MACHINE_CODE)]


def test_one_error_among_several_kernels(nvcc, loading, most):
    nvcc.write(f'case "$*" in *NUMBER=1*) {FAILS};; esac')
    with pytest.raises(compile.CompileError, match="what went wrong"):
        launch.load_kernels(DEVICE, [request(number) for number in range(3)])
    assert launch.load_kernels(DEVICE, [request(0), request(2)]) == [(0, MACHINE_CODE), (2, MACHINE_CODE)]
    assert len(nvcc.compiled) == 3


def test_nothing_starts_if_cached(nvcc, loading, most, monkeypatch):
    launch.load_kernels(DEVICE, [request()])
    launch.compile_early(DEVICE, [request()])  # loaded
    monkeypatch.setattr(launch, "_kernels", {})
    launch.compile_early(DEVICE, [request()])  # on disk
    with meanwhile(lambda: pytest.fail("nothing to wait for")):
        launch.load_kernels(DEVICE, [request()])
    assert len(nvcc.compiled) == 1 and not jobs._jobs.kept


def test_a_kernel_in_advance_needs_no_folder(nvcc, loading, most, tmp_path, monkeypatch):
    """Its image stays in memory if the cache cannot be written."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="SPATTN_CACHE_DIR"):
        launch.compile_early(DEVICE, [request()])
        assert launch.load_kernels(DEVICE, [request()]) == [(0, MACHINE_CODE)]
    assert len(nvcc.compiled) == 1


def test_without_nvcc_nothing_starts(place, monkeypatch):
    monkeypatch.setenv("SPATTN_NVCC", "")
    launch.compile_early(DEVICE, [request()])
    assert not jobs._jobs.kept


def test_as_many_compilers_as_processors(nvcc, loading, most, tmp_path):
    most(2)
    nvcc.wait_for(tmp_path / "go")
    launch.compile_early(DEVICE, [request(number) for number in range(4)])
    wait_until(lambda: len(nvcc.compiled) == 2)
    time.sleep(0.1)
    assert len(nvcc.compiled) == 2
    (tmp_path / "go").write_text("")
    wait_until(lambda: len(nvcc.compiled) == 4 and not jobs._jobs.threads)


def test_what_a_call_waits_for_goes_first(nvcc, loading, most, tmp_path):
    most(1)
    nvcc.wait_for(tmp_path / "go")
    launch.compile_early(DEVICE, [request(number) for number in range(4)])
    wait_until(lambda: len(nvcc.compiled) == 1)
    join = in_threads(lambda: launch.load_kernels(DEVICE, [request(4), request(3)]))
    wait_until(lambda: len(jobs._jobs.wanted) == 2)
    (tmp_path / "go").write_text("")
    assert join() == [[(4, MACHINE_CODE), (3, MACHINE_CODE)]]
    wait_until(lambda: not jobs._jobs.threads)
    assert [int(one.split("NUMBER=")[1].split()[0]) for one in nvcc.compiled] == [0, 3, 4, 1, 2]


def test_work_is_done_while_a_call_waits(nvcc, loading, most, tmp_path, caplog):
    """Once, in the call's thread, while its kernels are compiled; its errors do not reach the call."""
    nvcc.wait_for(tmp_path / "go")
    done = []

    def work():
        wait_until(lambda: nvcc.compiled)
        launch.compile_early(DEVICE, [request(7)])
        done.append(threading.current_thread())
        (tmp_path / "go").write_text("")
        raise ValueError("no plan for the backward")

    with caplog.at_level(logging.DEBUG, "spattn.cuda"), meanwhile(work):
        launch.load_kernels(DEVICE, [request()])
        launch.load_kernels(DEVICE, [request(1)])
    assert done == [threading.current_thread()] and "no plan for the backward" in caplog.text
    assert launch.load_kernels(DEVICE, [request(7)]) == [(7, MACHINE_CODE)]
    launch.load_kernels(DEVICE, [request(2)])  # outside of the block nothing is offered
    assert len(done) == 1 and len(nvcc.compiled) == 4


def test_one_line_after_two_seconds(nvcc, loading, most, tmp_path, monkeypatch, caplog):
    """It names what is left. A call that waits less, and one whose kernels are cached, say nothing."""
    launch.load_kernels(DEVICE, [request(5)])
    assert launch._PATIENCE == 2 and not caplog.records
    monkeypatch.setattr(launch, "_PATIENCE", 0.0)
    monkeypatch.setattr(launch, "_kernels", {})
    launch.load_kernels(DEVICE, [request(5)])
    assert not caplog.records
    nvcc.wait_for(tmp_path / "go")
    threading.Timer(0.3, (tmp_path / "go").write_text, [""]).start()
    launch.load_kernels(DEVICE, [request(5), request(), request(1, "// a function\n")])
    (line,) = caplog.records
    what = "2 CUDA kernels for bfloat16, head_dim 128, a score function"
    assert line.getMessage() == f"spattn: compiling {what} (kept in {tmp_path / 'cache'})"
    assert (line.name, line.levelname) == ("spattn.cuda", "WARNING")


def test_the_line_is_seen_by_default(tmp_path):
    """On stderr, without set-up of logging; a level silences it."""
    script = """
        import logging, sys
        from spattn.cuda.driver import launch
        if sys.argv[1:]:
            logging.getLogger("spattn.cuda").setLevel(logging.ERROR)
        class Never:
            def done(self): return False
        launch._PATIENCE, launch.wait = 0.0, lambda *arguments: None
        launch._wait([launch.Request("a.cu", "sm_80", {}, {}, "a")], [Never()])
    """
    for more, lines in (([], 1), (["silent"], 0)):
        done = run_script(script, tmp_path, *more)
        assert done.returncode == 0 and done.stderr.count("spattn: compiling 1 CUDA kernel (kept in") == lines


COMPILES = """
    import os, sys, time
    from pathlib import Path
    from spattn.cuda.driver import compile, jobs, launch
    from spattn.cuda.sm80.params import structs_of
    jobs.processors = lambda: 4
    source = "sm80/forward/merge.cu"
    def unit(number):
        return compile.Unit.of(source, "sm_80", {"SPATTN_DTYPE": "float32", "NUMBER": number}, structs_of(source))
    for number in range(3):
        compile.begin_early(unit(number))
    log = Path(os.environ["LOG"])
    while not log.exists() or log.read_text().count(" -o ") < 3:
        time.sleep(0.01)
"""


def run_script(text, folder, *more, **environment):
    """A fresh interpreter whose temporary files and cache are in a folder."""
    own = {"TMPDIR": str(folder), "SPATTN_CACHE_DIR": str(folder / "cache"), **environment}
    command = [sys.executable, "-c", textwrap.dedent(text), *more]
    return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=60, check=False)


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_exit_ends_compilers(nvcc, tmp_path):
    """At once, with the processes that they started; it leaves no file behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    nvcc.write(f'touch "$TMPDIR/beside"; sleep 300 & echo "$$ $! -o " >> "{tmp_path}/processes"; wait')
    begun = time.monotonic()
    done = run_script(COMPILES, folder, LOG=str(tmp_path / "processes"))
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert time.monotonic() - begun < 30
    processes = [int(x) for x in (tmp_path / "processes").read_text().split() if x != "-o"]
    assert len(processes) == 6
    wait_until(lambda: not any(map(alive, processes)))
    assert [path.name for path in folder.iterdir() if path.name != "cache"] == []


def test_a_forked_child_compiles_by_itself(nvcc, tmp_path):
    """It waits for no thread of its parent, and its exit does not end the parent's compilers."""
    nvcc.wait_for(tmp_path / "go")
    script = textwrap.dedent(COMPILES) + textwrap.dedent("""
        child = os.fork()
        if not child:
            assert not jobs._jobs.kept
            Path(os.environ["GO"]).write_text("")
            assert compile.begin(unit(0)).result(20) == b"machine code by release 1"
            assert compile.begin(unit(9)).result(20) == b"machine code by release 1"
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        for number in range(3):
            assert compile.begin(unit(number)).result(20) == b"machine code by release 1"
    """)
    done = run_script(script, tmp_path, "-W", "ignore", LOG=str(nvcc.log), GO=str(tmp_path / "go"))
    assert done.returncode == 0, done.stderr


def test_an_interrupt_does_not_reach_the_compiler(nvcc, tmp_path):
    """It ends the wait; the call that comes next finds the same compilation."""
    nvcc.wait_for(tmp_path / "go")
    script = textwrap.dedent(COMPILES) + textwrap.dedent("""
        import signal, threading
        threading.Timer(0.2, os.killpg, [os.getpgrp(), signal.SIGINT]).start()
        try:
            compile.begin(unit(1)).result()
        except KeyboardInterrupt:
            Path(os.environ["GO"]).write_text("")
            assert compile.begin(unit(1)).result(20) == b"machine code by release 1"
            sys.exit(log.read_text().count("NUMBER=1"))
    """)
    own = {"SPATTN_CACHE_DIR": str(tmp_path / "cache"), "LOG": str(nvcc.log), "GO": str(tmp_path / "go")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.returncode == 1, done.stderr
