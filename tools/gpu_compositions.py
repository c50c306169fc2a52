#!/usr/bin/env python3
"""Thousands of drawn compositions of patterns on a GPU, in minutes: both families of kernels, groups and selections.

    python3 tools/gpu_compositions.py [--count 4000] [--seconds 240] [--seed 0] [--json FILE] [--only N ...]

Composition n of a seed is the same on every machine, whichever process runs it. For each one ``tests/compositions``
draws a pattern and computes what attention over its mask must be, from the definitions and in NumPy alone; then it is
run by the Hopper kernels and by the portable ones, forward and backward, by its pattern and by a plan in tiles that are
drawn, as one of several problems of a grouped call, and with a selection of indices on the device. Several processes
share the GPU, so that planning and the expected results, which take most of the time, are made side by side.

Prints counts and failures, and writes them as JSON. ``--only N`` runs the block of composition N, which its group is
of. ``--device cpu`` does the same on the CPU's kernels, to try this program where there is no GPU. The exit status is 1
if something was wrong. Needs PyTorch, and spattn in the environment, but no Hypothesis.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before anything imports NumPy: processes keep all cores busy
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

BLOCK = 8  # compositions that a process runs one after the other: first on one family of kernels, then on the other
LONGEST = [100, 150, 150, 400]  # tokens, of most compositions
GRACE = 60  # seconds that blocks may still take when the time is over
MOST_ENDED = 40  # processes that are started anew
SHOWN = 20  # failures


class Block:
    """Some compositions, what was run of them and what of that was wrong.

    Parameters
    ----------
    say : callable
        Is told the composition and what is about to be run of it: whoever waits for this process knows then where it
        ended.
    """

    def __init__(self, number: int, seed: int, where: str, say: Callable[[int, str], None]):
        from compositions import draws

        self.number, self.where, self._say = number, where, say
        self.sources = {n: draws.Seeded(seed, n) for n in range(number * BLOCK, (number + 1) * BLOCK)}
        self.cases, self.runs, self.failures, self.fallbacks = {}, Counter(), [], 0
        for n, source in self.sources.items():
            self.cases[n] = draws.draw_case(source, source.choice(LONGEST))
            source.note(self.cases[n])

    def fail(self, n: int, what: str, text: str) -> None:
        """Notes a failure."""
        drawn = [note[:2000] for note in self.sources[n].notes]
        self.failures.append({"composition": n, "what": what, "text": text, "drawn": drawn})

    def attempt(self, n: int, what: str, steps: Iterable[Any], owner: dict[int, int] | None = None) -> Iterator[Any]:
        """What is done of these steps, whose failures are those of composition `n`, or of the owner of a problem.
        Whatever they raise is a failure, too; an error of CUDA's is the end of the process."""
        self._say(n, what)
        try:
            for one in steps:
                self.runs[one.what] += 1
                if one.wrong:
                    own = n if owner is None else owner[id(one.problem)]
                    self.fail(own, one.what, "\n".join(one.wrong))
                yield one
        except Exception as error:
            self.fail(n, what, traceback.format_exc(limit=-6))
            if "CudaError" in (type(error).__name__, type(error.__cause__).__name__) or "CUDA error" in str(error):
                raise Broken from error

    def run(self, families: list[str]) -> None:
        """All families, and what only one of them has."""
        from compositions import gpu

        for family in families:
            gpu.use(family)
            with gpu.counting_fallbacks() if family == "hopper" else contextlib.nullcontext([]) as fallbacks:
                self._run_family(family)
            self.fallbacks += len(fallbacks)

    def _run_family(self, family: str) -> None:
        from compositions import gpu

        kinds, problems = gpu.KINDS[family], {}
        of_group = kinds[self.number % len(kinds)]  # all problems of a launch are of one dtype
        for n, source in self.sources.items():
            kind = of_group if family == "hopper" else source.choice(kinds)
            steps = gpu.of_case(source, self.cases[n], family, kind, self.where)
            for one in self.attempt(n, f"{family}, {kind[0]}", steps):
                problems[n] = one.problem
        if family == "portable" or not problems:
            return
        owner, first = {id(problem): n for n, problem in problems.items()}, next(iter(problems))
        patterns = [self.cases[n].pattern for n in problems]
        plans = [gpu.draw_plan(self.sources[n], self.cases[n], family)[1] for n in problems]
        for what, given in (("patterns", patterns), ("plans", plans)):
            steps = gpu.of_group(list(problems.values()), given, self.where)
            deque(self.attempt(first, f"group of {what}", steps, owner), 0)
        for n, source in self.sources.items() if family == "hopper" else ():
            steps = gpu.of_selection(source, self.cases[n], of_group, self.where)
            deque(self.attempt(n, "selection", steps), 0)

    def report(self) -> dict[str, Any]:
        """What is counted."""
        pairs = sum(int(case.allowed().sum()) for case in self.cases.values())
        counts = {"compositions": len(self.cases), "pairs": pairs, "fallbacks": self.fallbacks}
        return {"runs": self.runs, "failures": self.failures, "counts": Counter(counts)}


class Broken(Exception):
    """The context of CUDA is of no use any more."""


def families_of(where: str) -> list[str]:
    """The families of kernels that run there, Hopper's first."""
    if where == "cpu":
        return ["cpu"]
    from spattn.cuda.driver import device

    return ["hopper", "portable"] if device.get().capability == (9, 0) else ["portable"]


def work(connection: Connection, seed: int, where: str) -> None:
    """A process: asks for blocks, runs them, and reports."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of predicates that are evaluated cell by cell, and of inefficient plans
    if where == "cuda":
        share_compilers()
    families = families_of(where)
    connection.send(("ready", None))
    while (number := connection.recv()) is not None:
        block = Block(number, seed, where, lambda n, what: connection.send(("at", (n, what))))
        try:
            block.run(families)
        except Broken:
            connection.send(("broken", block.report()))
            return
        connection.send(("done", block.report()))


# -- kernels -----------------------------------------------------------------------------------------------------------


def share_compilers() -> None:
    """Processes that want the same kernel at the same time wait for the one that compiles it."""
    import fcntl
    import hashlib

    from spattn.cuda.driver import compile

    original = compile.cubin

    def cubin(source: str, arch: str, defines: Any, structs: Any) -> bytes:
        key = hashlib.sha256(repr((source, arch, sorted(defines.items()))).encode()).hexdigest()[:24]
        folder = Path(tempfile.gettempdir()) / f"spattn-compilers-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        with open(folder / key, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return original(source, arch, defines, structs)

    compile.cubin = cubin


def kernels() -> Iterator[tuple[str, str, dict[str, object], Any]]:
    """(source, architecture, macros, structs) of most kernels that compositions need; others are compiled when they
    are wanted."""
    from compositions.gpu import KINDS

    from spattn.choose import specializations as builds
    from spattn.cuda import prebuild
    from spattn.cuda.hopper import params, select
    from spattn.cuda.hopper_backward import builds as backward_builds
    from spattn.cuda.hopper_backward import params as backward_params

    for dtype, dim in KINDS["portable"]:
        for source, macros, structs in prebuild.kernels("sm_90", [dtype], [dim]):
            yield source, "sm_90", macros, structs
    arch = builds.ARCH
    for dtype, dim in KINDS["hopper"]:
        for row in builds.TABLE:
            if row.head_dim != dim:
                continue
            for cells in (builds.TILE[1], builds.FEWER) if row.step_kv == builds.TILE[1] else (builds.TILE[1],):
                for room in params.MAPS:
                    macros = builds.variant(row, dtype, room, cells=cells)
                    yield "hopper/attention.cu", arch, macros, params.structs(room)
                for problems, room in params.GROUPS[:1]:
                    macros = builds.variant(row, dtype, room, problems, cells=cells)
                    yield "hopper/attention.cu", arch, macros, params.structs(room, problems)
            macros = builds.variant(row, dtype, params.MAPS[0], gathers=True)
            yield "hopper/attention.cu", arch, macros, params.structs(params.MAPS[0])
        merge = builds.variant(builds.build(builds.TILE[0], dim), dtype, params.MAPS[0])
        yield "hopper/merge.cu", arch, merge, params.structs(params.MAPS[0])
        for rows in (builds.ROWS, builds.TILE[0]):
            own = {**params.structs(params.MAPS[0]), "Table": select.TABLE, "Job": select.JOB, "Select": select.SELECT}
            for name in ("select_table", "select_tiles", "select_masks"):
                macros = builds.variant(builds.build(rows, 1), dtype, params.MAPS[0])
                yield f"hopper/{name}.cu", arch, macros, own
        for one_pass in (False, True):
            table = backward_builds.builds(dim, one_pass)
            for room in backward_params.MAPS:
                for row in table:
                    macros = backward_builds.variant(row, dtype, room)
                    yield "hopper_backward/backward.cu", arch, macros, backward_params.structs(room)
            room = backward_params.MAPS[0]
            for name in ("statistics", "sum", *(["convert"] if one_pass else [])):
                macros = backward_builds.variant(table[0], dtype, room)
                yield f"hopper_backward/{name}.cu", arch, macros, backward_params.structs(room)


def compile_kernels(jobs: int) -> int:
    """Compiles them side by side, once; returns how many."""
    from spattn.cuda.driver import compile

    todo = {(source, arch, repr(sorted(macros.items()))): (source, arch, macros, structs)
            for source, arch, macros, structs in kernels()}  # fmt: skip
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda one: compile.cubin(*one), todo.values()):
            pass
    return len(todo)


# -- processes ---------------------------------------------------------------------------------------------------------


class Workers:
    """Processes that run blocks, until none is left or the time is over.

    Parameters
    ----------
    blocks : iterable of int
        Numbers of the blocks that are to be run, in this order.
    """

    def __init__(self, options: argparse.Namespace, blocks: Iterable[int]):
        self._options, self._blocks = options, iter(blocks)
        self._context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self._processes: dict[Connection, Any] = {}
        self._at: dict[Connection, tuple[int, str]] = {}
        self.runs, self.counts, self.failures, self.ended = Counter(), Counter(), [], 0

    def _start(self) -> None:
        own, other = self._context.Pipe()
        process = self._context.Process(
            target=work, args=(other, self._options.seed, self._options.device), daemon=True
        )
        process.start()
        other.close()
        self._processes[own], self._at[own] = process, (-1, "start")

    def run(self) -> None:
        """Starts them, hands out blocks, and collects what is reported."""
        begin = said = time.monotonic()
        for _ in range(self._options.jobs):
            self._start()
        while self._processes:
            elapsed = time.monotonic() - begin
            if elapsed > self._options.seconds + GRACE:
                self._stop("still running when the time was over")
                return
            if time.monotonic() - said > 20:
                said = time.monotonic()
                print(
                    f"{elapsed:4.0f} s  {self.counts['compositions']} compositions, {len(self.failures)} failures",
                    flush=True,
                )
            for connection in wait(list(self._processes), timeout=1):
                self._hear(connection, elapsed < self._options.seconds)

    def _hear(self, connection: Connection, more: bool) -> None:
        """One message of a process, or its end."""
        try:
            what, told = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes.pop(connection)
            process.join()
            n, at = self._at.pop(connection)
            if process.exitcode or at != "over":
                self.failures.append({"composition": n, "what": at, "text": f"the process ended: {process.exitcode}"})
                self._again(more)
            return
        if what == "at":
            self._at[connection] = told
            return
        if told is not None:
            self.runs += told["runs"]
            self.counts += told["counts"]
            self.failures += told["failures"]
        if what == "broken":
            self._at[connection] = (-1, "over")
            self._again(more)
            return
        number = next(self._blocks, None) if more else None
        self._at[connection] = (-1, "over") if number is None else (number * BLOCK, "begin")
        with contextlib.suppress(BrokenPipeError):  # of a process that has ended: the next message is its end
            connection.send(number)

    def _again(self, more: bool) -> None:
        self.ended += 1
        if more and self.ended <= MOST_ENDED:
            self._start()

    def _stop(self, why: str) -> None:
        for connection, process in self._processes.items():
            n, at = self._at[connection]
            self.failures.append({"composition": n, "what": at, "text": why})
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=4000, help="compositions to run at most")
    parser.add_argument("--seconds", type=float, default=240, help="no block begins later than this after the start")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--json", type=Path, help="where counts and failures are written")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of compositions whose blocks are run")
    options = parser.parse_args()
    begin, numbers = time.monotonic(), options.only
    if options.device == "cuda":
        made = compile_kernels(os.cpu_count() or 1)
        print(f"{time.monotonic() - begin:4.0f} s  {made} kernels are compiled", flush=True)
        options.seconds -= time.monotonic() - begin
    blocks = sorted({n // BLOCK for n in numbers}) if numbers else range(-(-options.count // BLOCK))
    workers = Workers(options, blocks)
    workers.run()
    result = {
        "seed": options.seed,
        "device": options.device,
        "seconds": round(time.monotonic() - begin, 1),
        **workers.counts,
        "failed": len(workers.failures),
        "processes that ended": workers.ended,
        "runs": dict(sorted(workers.runs.items())),
        "failures": workers.failures,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))
    for failure in workers.failures[:SHOWN]:
        print(f"FAILED composition {failure['composition']}, {failure['what']}\n{failure['text']}")
        print("\n".join(f"    {note[:600]}" for note in failure.get("drawn", [])), flush=True)
    print(json.dumps({name: value for name, value in result.items() if name != "failures"}, indent=1))
    sys.exit(bool(workers.failures))


if __name__ == "__main__":
    main()
