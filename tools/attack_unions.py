#!/usr/bin/env python3
"""Attack compositions of patterns with thousands of random draws, on the CPU or a GPU.

    python tools/attack_unions.py --count 4000 [--isa all] [--seed 0] [--attack ATTACK ...] [--json FILE]
    python tools/attack_unions.py --device cuda --count 4000 --seconds 240
    python tools/attack_unions.py --seed 0 --only 17            # the block of composition 17 again

``tests/compositions`` draws the compositions and computes the expected results from the patterns' definitions, in NumPy
and without spattn. Composition n of a seed is the same on every machine, in every process. Each one runs forward and
backward from its pattern and from a plan with random tiles; on a GPU also in a grouped call and with a device-side
block mask, by the Hopper and by the portable kernels. Blocks of compositions go to worker processes; on the CPU each
block uses one of the instruction sets. After the results, a block runs the attacks below:

    orders      operands in every order: a plan visits each allowed pair once
    algebra     equivalent expressions: results within the error bound
    serialized  pickled, copied and serialized patterns: equal, bitwise equal results
    lengths     one pattern at growing and shrinking KV lengths, as in decoding
    many        30 to 100 operands
    nonfinite   NaN and Inf at some keys: other rows keep their results, on the CPU every bit
    threads     concurrent calls, and numbers of threads: bitwise equal results (CPU)
    fork        a forked child computes the bits of its parent (CPU)

Prints counts and failures, and writes them as JSON; exits with 1 if there were failures. A worker that crashes or hangs
counts as a failure and is replaced. Needs PyTorch; threadpoolctl for numbers of threads.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import multiprocessing
import operator
import os
import pickle
import select
import signal
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

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # set before NumPy is imported: the workers occupy all cores
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

BLOCK = 8  # compositions that a worker runs together
LONGEST = [100, 150, 150, 400]  # tokens of most compositions
GRACE = 60  # seconds that running blocks get after the time limit
PATIENCE = 300  # seconds without a message after which a worker counts as hung
MOST_RESTARTS = 40  # workers that are replaced
SHOWN = 20  # failures that are printed


# -- attacks -----------------------------------------------------------------------------------------------------------


def results(problem: Any, pattern: Any, where: str) -> list[Any]:
    """out, lse, dq, dk, dv of a pattern or a plan, as NumPy arrays."""
    from compositions import gpu

    import spattn
    from spattn.arrays import to_host

    q, k, v, dout, *dlse = gpu.operands(problem, where)
    out, lse = spattn.attention(q, k, v, pattern, return_lse=True)
    gradients = spattn.attention_backward(dout, q, k, v, out, lse, pattern, **({"dlse": dlse[0]} if dlse else {}))
    return [to_host(x) for x in (out, lse, *gradients)]


def bits(arrays: Iterable[Any]) -> list[bytes]:
    """The bytes of each array."""
    return [x.tobytes() for x in arrays]


class Attack:
    """What an attack gets: a source of draws, a composition, and where to run it."""

    def __init__(self, source: Any, case: Any, kind: tuple[str, int], where: str):
        self.source, self.case, self.kind, self.where = source, case, kind, where

    def problem(self, case: Any = None) -> Any:
        """Random arrays for a composition, by default the attack's."""
        from compositions.problems import make_problem

        dtype, dim = self.kind
        return make_problem(self.source, self.case if case is None else case, dtype, dim, dim)

    def done(self, what: str, wrong: list[str], problem: Any) -> Any:
        """The outcome of one step."""
        from compositions.gpu import Done

        return Done(what, wrong, problem)

    def orders(self) -> Iterator[Any]:
        """Two or three operands in every order, by each operator."""
        from compositions import draws

        from spattn.schedule import compiler
        from spattn.testing import plan_pairs

        batch, heads, _, q_len, kv_len = self.case.sizes
        few = [draws.draw_term(self.source, self.case.sizes, 1, draws.SINGLE) for _ in range(self.source.integer(2, 3))]
        tile = self.source.choice([None, *draws.TILES])
        options = {"tile": tile} if tile else {}
        for order in itertools.permutations(few):
            for sign in (operator.or_, operator.and_, operator.sub) if len(few) == 2 else (operator.or_,):
                term = functools.reduce(sign, order)
                plan = compiler.plan(term.pattern, q_len, kv_len, batch=batch, heads=heads, **options)
                allowed, wrong = term.mask(q_len, kv_len), []
                visits = 0 * allowed.reshape(-1, q_len, kv_len)[0].astype(int)
                for pair in zip(*plan_pairs(plan), strict=True):
                    visits[pair] += 1
                if (differ := visits - allowed.reshape(-1, q_len, kv_len)[0]).any():
                    lost, extra = int((differ < 0).sum()), int((differ > 0).sum())
                    wrong = [f"{lost} pairs lost, {extra} visited too often: tile {tile}, {term.pattern!r}"]
                yield self.done("orders", wrong, None)

    def algebra(self) -> Iterator[Any]:
        """Expressions that are equivalent to the composition, or to its union with another term."""
        from compositions import draws

        problem, own = self.problem(), self.case.pattern
        term = draws.draw_term(self.source, self.case.sizes, 1, draws.TERMS)
        other, union = term.pattern, draws.Term(own, self.case.mask) | term
        joined = self.problem(draws.Case(*union, self.case.sizes))
        for name, pattern, expected in (
            ("~~a", ~~own, problem),
            ("a & a", own & own, problem),
            ("a - ~a", own - ~own, problem),
            ("(a - b) | (a & b)", (own - other) | (own & other), problem),
            ("b | a", other | own, joined),
            ("~(~a & ~b)", ~(~own & ~other), joined),
            ("a | b | a | b", own | other | own | other, joined),
        ):
            found = expected.wrong(results(expected, pattern, self.where))
            yield self.done("algebra", [f"{name}, b = {other!r}: {line}" for line in found], expected)

    def serialized(self) -> Iterator[Any]:
        """Copies of the pattern, and of its plan."""
        import spattn
        from spattn import patterns

        problem, own = self.problem(), self.case.pattern
        want = bits(results(problem, own, self.where))
        others = {"pickle": pickle.loads(pickle.dumps(own)), "deepcopy": copy.deepcopy(own)}
        if (text := own.to_json()) is not None:
            others["text"] = patterns.from_json(text)
            others["JSON"] = patterns.from_json(own.to_json())
        for name, other in others.items():
            equal = other == own and hash(other) == hash(own)
            wrong = [] if equal else [f"{name}: the copy differs from the pattern"]
            for again in range(2):
                if bits(results(problem, other, self.where)) != want:
                    wrong.append(f"{name}: other bits{', planned anew' * again}")
                spattn.clear_plan_cache()
            yield self.done("serialized", wrong, problem)

    def lengths(self) -> Iterator[Any]:
        """One pattern at several KV lengths, from one preallocated cache, forward only."""
        from compositions import draws, gpu
        from compositions.problems import of_arrays

        import spattn
        from spattn.testing import DTYPES

        source, (dtype, dim) = self.source, self.kind
        sizes = self.case.sizes._replace(q_len=source.choice([1, 1, source.integer(2, 9)]))
        kinds = source.choice([draws.GROWING, draws.GROWING, draws.ANYWHERE])
        case = draws.Case(*draws.draw_term(source, sizes, 4, kinds), sizes)
        source.note(case)
        steps = [sizes.kv_len + more for more in (*range(20), 64, 200, source.integer(1, 300), 0, 3)]
        cache = draws.draw_arrays(source, sizes._replace(kv_len=max(steps)), dim, dim, DTYPES[dtype])
        for n in steps:
            here = case._replace(sizes=sizes._replace(kv_len=n))
            arrays = cache._replace(k=cache.k[:, :, :n], v=cache.v[:, :, :n])
            problem = of_arrays(here, dtype, arrays, False)
            q, k, v, _ = gpu.operands(problem, self.where)
            got = spattn.attention(q, k, v, case.pattern, return_lse=True)
            found = problem.wrong(got, ("out", "lse"))
            yield self.done("lengths", [f"{n} keys: {line}" for line in found], problem)

    def many(self) -> Iterator[Any]:
        """A random tree over many operands."""
        from compositions import draws

        source, sizes = self.source, self.case.sizes
        names, number = sorted(draws.TERMS), source.integer(30, 100)
        term = draws.compose(source, lambda: draws.TERMS[source.choice(names)](source, sizes), number)
        problem = self.problem(draws.Case(*term, sizes))
        wrong = problem.wrong(results(problem, term.pattern, self.where))
        yield self.done("many", [f"{number} operands: {line}" for line in wrong], problem)

    def nonfinite(self) -> Iterator[Any]:
        """NaN or Inf in K or V at some keys: rows that do not attend to them are unchanged."""
        import numpy as np

        problem, rng = self.problem(), self.source.rng()
        clean = results(problem, self.case.pattern, self.where)
        bad = rng.permutation(self.case.sizes.kv_len)[: self.source.integer(1, 3)]
        k, v = problem.arrays.k.copy(), problem.arrays.v.copy()
        value = self.source.choice([np.nan, np.inf, -np.inf])
        (v if self.source.integer(0, 1) else k)[:, :, bad] = value
        poisoned = dataclasses.replace(problem, arrays=problem.arrays._replace(k=k, v=v))
        found = results(poisoned, self.case.pattern, self.where)
        blind = ~problem.mask[..., bad].any(-1)
        exact, wrong = self.where == "cpu", []
        for name, before, after in zip(("out", "lse", "dq"), clean, found, strict=False):
            if exact and before[blind].tobytes() != after[blind].tobytes():
                wrong.append(f"{name}: {value} at keys {bad.tolist()} changed bits of rows that do not attend to them")
        pairs = zip(clean[:3], found[:3], strict=True)
        rows = [np.where(blind.reshape(blind.shape + (1,) * (x.ndim - 3)), y, x) for x, y in pairs]
        wrong += problem.wrong(rows, ("out", "lse", "dq"))
        yield self.done("nonfinite", wrong, problem)

    def threads(self) -> Iterator[Any]:
        """Concurrent calls, and calls with one to three OpenMP threads."""
        import spattn

        problem, own = self.problem(), self.case.pattern
        want = bits(results(problem, own, self.where))
        spattn.clear_plan_cache()
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda _: bits(results(problem, own, self.where)), range(24)))
        other = sum(x != want for x in found)
        yield self.done("threads", [f"{other} of 24 concurrent calls have other bits"] if other else [], problem)
        with contextlib.suppress(ImportError):
            from threadpoolctl import threadpool_limits

            for number in (1, 2, 3):
                with threadpool_limits(number, user_api="openmp"):
                    same = bits(results(problem, own, self.where)) == want
                yield self.done("threads", [] if same else [f"other bits on {number} threads"], problem)

    def fork(self) -> Iterator[Any]:
        """A forked child with a cached plan and with a new one."""
        import spattn

        problem, own = self.problem(), self.case.pattern
        want = bits(results(problem, own, self.where))
        read, write = os.pipe()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException), os.fdopen(write, "wb") as pipe:
                first = bits(results(problem, own, self.where))
                spattn.clear_plan_cache()
                pickle.dump([first, bits(results(problem, own, self.where))], pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read() if select.select([pipe], [], [], 60)[0] else None
        if data is None:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wrong = "hangs" if data is None else "fails" if not data else ""
        wrong = wrong or ("" if pickle.loads(data) == [want, want] else "has other bits")
        yield self.done("fork", [f"a forked child {wrong}"] if wrong else [], problem)


ON_THE_CPU = ("threads", "fork")
ATTACKS = ("orders", "algebra", "serialized", "lengths", "many", "nonfinite", *ON_THE_CPU)


# -- blocks ------------------------------------------------------------------------------------------------------------


class Broken(Exception):
    """The CUDA context is unusable."""


class Block:
    """Runs some compositions and collects failures.

    Parameters
    ----------
    number, seed : int
        Compositions ``BLOCK * number`` to ``BLOCK * (number + 1) - 1`` of a seed.
    where : {"cpu", "cuda"}
    attacks : sequence of str
    report : callable
        Gets a composition and a step before it runs, so the parent knows where a worker ended.
    """

    def __init__(self, number: int, seed: int, where: str, attacks: Iterable[str], report: Callable[[int, str], None]):
        from compositions import draws

        self.number, self.where, self.attacks, self._report = number, where, list(attacks), report
        self.sources = {n: draws.Seeded(seed, n) for n in range(number * BLOCK, (number + 1) * BLOCK)}
        self.cases, self.runs, self.failures, self.fallbacks = {}, Counter(), [], 0
        for n, source in self.sources.items():
            self.cases[n] = draws.draw_case(source, source.choice(LONGEST))
            source.note(self.cases[n])

    def attempt(self, n: int, what: str, steps: Iterable[Any], owner: dict[int, int] | None = None) -> Iterator[Any]:
        """Run steps; count each, and record wrong results and exceptions for composition `n`, or a problem's owner.

        A CUDA error raises :class:`Broken`.
        """
        self._report(n, what)
        try:
            for one in steps:
                self.runs[one.what] += 1
                if one.wrong:
                    self._fail(n if owner is None else owner[id(one.problem)], one.what, "\n".join(one.wrong))
                yield one
        except Exception as error:
            self._fail(n, what, traceback.format_exc(limit=-6))
            if "CudaError" in (type(error).__name__, type(error.__cause__).__name__) or "CUDA error" in str(error):
                raise Broken from error

    def _fail(self, n: int, what: str, text: str) -> None:
        drawn = [note[:2000] for note in self.sources[n].notes]
        self.failures.append({"composition": n, "what": what, "text": text, "drawn": drawn})

    def run(self, families: list[str]) -> None:
        """Run the block on every kernel family; on the CPU, on one of the instruction sets."""
        from compositions import gpu

        import spattn

        if self.where == "cpu":
            os.environ["SPATTN_ISA"] = families[self.number % len(families)]
            spattn.clear_plan_cache()
            self._run_family("cpu")
            return
        for family in families:
            gpu.use(family)
            with gpu.counting_fallbacks() if family == "hopper" else contextlib.nullcontext([]) as fallbacks:
                self._run_family(family)
            self.fallbacks += len(fallbacks)

    def _run_family(self, family: str) -> None:
        from compositions import gpu

        kinds, problems = gpu.KINDS[family], {}
        of_group = kinds[self.number % len(kinds)]  # the problems of a grouped call have one dtype
        for n, source in self.sources.items():
            kind = of_group if family == "hopper" else source.choice(kinds)
            steps = gpu.of_case(source, self.cases[n], family, kind, self.where)
            for one in self.attempt(n, f"{family}, {kind[0]}", steps):
                problems[n] = one.problem
        if family == "hopper" and problems:
            owner, first = {id(problem): n for n, problem in problems.items()}, next(iter(problems))
            patterns = [self.cases[n].pattern for n in problems]
            plans = [gpu.draw_plan(self.sources[n], self.cases[n], family)[1] for n in problems]
            for what, given in (("patterns", patterns), ("plans", plans)):
                steps = gpu.of_group(list(problems.values()), given, self.where)
                deque(self.attempt(first, f"group of {what}", steps, owner), 0)
            for n, source in self.sources.items():
                steps = gpu.of_selection(source, self.cases[n], of_group, self.where)
                deque(self.attempt(n, "selection", steps), 0)
        if family != "portable":
            for n, source in self.sources.items():
                for name in self.attacks:
                    attack = Attack(source, self.cases[n], of_group, self.where)
                    deque(self.attempt(n, name, getattr(attack, name)()), 0)

    def report(self) -> dict[str, Any]:
        """Counts and failures."""
        pairs = sum(int(case.allowed().sum()) for case in self.cases.values())
        counts = {"compositions": len(self.cases), "pairs": pairs, "fallbacks": self.fallbacks}
        return {"runs": self.runs, "failures": self.failures, "counts": Counter(counts)}


def families_of(options: argparse.Namespace) -> list[str]:
    """Kernel families of the GPU, Hopper first, or instruction sets of the CPU."""
    if options.device == "cpu":
        from spattn import cpu

        sets = list(cpu.instruction_sets())
        return {"all": sets, "auto": sets[:1]}.get(options.isa, options.isa.split(","))
    from spattn.cuda.driver import device

    return ["hopper", "portable"] if device.get().capability == (9, 0) else ["portable"]


def work(connection: Connection, options: argparse.Namespace) -> None:
    """Main program of a worker: request blocks, run them, report."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # predicates evaluated cell by cell, inefficient plans
    if options.device == "cuda":
        share_compilers()
    families = families_of(options)
    connection.send(("ready", None))
    while (number := connection.recv()) is not None:
        block = Block(
            number, options.seed, options.device, options.attack, lambda n, what: connection.send(("at", (n, what)))
        )
        try:
            block.run(families)
        except Broken:
            connection.send(("broken", block.report()))
            return
        connection.send(("done", block.report()))


# -- kernels -----------------------------------------------------------------------------------------------------------


def share_compilers() -> None:
    """Make workers that need the same kernel wait for the one that compiles it."""
    import fcntl

    from spattn.cuda.driver.compile import Unit

    original = Unit.compile

    def compile_alone(unit: Unit, compiler: Path) -> bytes:
        folder = Path(tempfile.gettempdir()) / f"spattn-compilers-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        with open(folder / unit.name(compiler), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return original(unit, compiler)  # from the cache, if another worker has compiled it

    Unit.compile = compile_alone


def kernels() -> Iterator[tuple[str, str, dict[str, object], Any]]:
    """(source, architecture, macros, structs) of most kernels that compositions need; the rest compile on first use."""
    from compositions.gpu import KINDS

    from spattn.choose import specializations as builds
    from spattn.cuda import prebuild
    from spattn.cuda.sm90 import dynamic_masks
    from spattn.cuda.sm90.backward import params as backward_params
    from spattn.cuda.sm90.backward import specializations as backward_builds
    from spattn.cuda.sm90.forward import params
    from spattn.schedule.tensor_maps import MAPS

    for dtype, dim in KINDS["portable"]:
        for source, macros, structs in prebuild.kernels("sm_90", [dtype], [dim]):
            yield source, "sm_90", macros, structs
    arch = builds.ARCH
    for dtype, dim in KINDS["hopper"]:
        for row in builds.TABLE:
            if row[1:3] != (dim, dim):
                continue
            for cells in (builds.TILE[1], builds.FEWER) if row.step_kv == builds.TILE[1] else (builds.TILE[1],):
                for room in MAPS:
                    macros = builds.variant(row, dtype, room, cells=cells)
                    yield "sm90/forward/attention.cu", arch, macros, params.structs(room)
                for problems, room in params.GROUPS[:1]:
                    macros = builds.variant(row, dtype, room, problems, cells=cells)
                    yield "sm90/forward/attention.cu", arch, macros, params.structs(room, problems)
            macros = builds.variant(row, dtype, MAPS[0], gathers=True)
            yield "sm90/forward/attention.cu", arch, macros, params.structs(MAPS[0])
        merge = builds.variant(builds.build(builds.TILE[0], (dim, dim)), dtype, MAPS[0])
        yield "sm90/forward/merge.cu", arch, merge, params.structs(MAPS[0])
        for rows in (builds.ROWS, builds.TILE[0]):
            own = {
                **params.structs(MAPS[0]),
                "Table": dynamic_masks.TABLE,
                "Job": dynamic_masks.JOB,
                "Select": dynamic_masks.SELECT,
            }
            for name in ("table", "tiles", "masks"):
                macros = builds.variant(builds.build(rows, (1, 1)), dtype, MAPS[0])
                yield f"sm90/dynamic_masks/{name}.cu", arch, macros, own
        for one_pass in (False, True):
            table = backward_builds.builds((dim, dim), one_pass)
            for room in backward_params.MAPS:
                for row in table:
                    macros = backward_builds.variant(row, dtype, room)
                    yield "sm90/backward/backward.cu", arch, macros, backward_params.structs(room)
            room = backward_params.MAPS[0]
            for name in ("statistics", "sum", *(["convert"] if one_pass else [])):
                macros = backward_builds.variant(table[0], dtype, room)
                yield f"sm90/backward/{name}.cu", arch, macros, backward_params.structs(room)


def compile_kernels(jobs: int) -> int:
    """Compile the kernels in parallel; return their number."""
    from spattn.cuda.driver import compile

    todo = {(source, arch, repr(sorted(macros.items()))): (source, arch, macros, structs)
            for source, arch, macros, structs in kernels()}  # fmt: skip
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda one: compile.cubin(*one), todo.values()):
            pass
    return len(todo)


# -- workers -----------------------------------------------------------------------------------------------------------


class Workers:
    """Processes that run blocks until none is left or the time limit is reached.

    Parameters
    ----------
    options : Namespace
    blocks : iterable of int
        Numbers of the blocks, in order.
    """

    def __init__(self, options: argparse.Namespace, blocks: Iterable[int]):
        self._options, self._blocks = options, iter(blocks)
        self._context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self._processes: dict[Connection, Any] = {}
        self._at: dict[Connection, tuple[int, str]] = {}
        self._heard: dict[Connection, float] = {}
        self.runs, self.counts, self.failures, self.restarts = Counter(), Counter(), [], 0

    def _start(self) -> None:
        own, other = self._context.Pipe()
        process = self._context.Process(target=work, args=(other, self._options))
        process.start()
        other.close()
        self._processes[own], self._at[own], self._heard[own] = process, (-1, "start"), time.monotonic()

    def run(self) -> None:
        """Start the workers, hand out blocks, collect reports."""
        begin = said = time.monotonic()
        for _ in range(self._options.jobs):
            self._start()
        while self._processes:
            elapsed = time.monotonic() - begin
            if time.monotonic() - said > 20:
                said = time.monotonic()
                shown = f"{self.counts['compositions']} compositions, {len(self.failures)} failures"
                print(f"{elapsed:4.0f} s  {shown}", flush=True)
            late = elapsed > self._options.seconds + GRACE
            for connection in wait(list(self._processes), timeout=1):
                self._receive(connection, elapsed < self._options.seconds)
            for connection in list(self._processes):
                if late or time.monotonic() - self._heard[connection] > PATIENCE:
                    self._kill(connection, "still running after the time limit" if late else "hangs")
                    self._replace(not late)

    def _receive(self, connection: Connection, more: bool) -> None:
        """Handle a worker's message, or its end."""
        self._heard[connection] = time.monotonic()
        try:
            what, told = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes.pop(connection)
            process.join()
            n, at = self._at.pop(connection)
            if process.exitcode or at != "over":
                self._fail(n, at, f"the worker ended with exit status {process.exitcode}")
                self._replace(more)
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
            self._replace(more)
            return
        number = next(self._blocks, None) if more else None
        self._at[connection] = (-1, "over") if number is None else (number * BLOCK, "begin")
        with contextlib.suppress(BrokenPipeError):  # the worker has ended; the next message says so
            connection.send(number)

    def _replace(self, more: bool) -> None:
        self.restarts += 1
        if more and self.restarts <= MOST_RESTARTS:
            self._start()

    def _fail(self, n: int, what: str, text: str) -> None:
        self.failures.append({"composition": n, "what": what, "text": text})

    def _kill(self, connection: Connection, why: str) -> None:
        process = self._processes.pop(connection)
        self._fail(*self._at.pop(connection), why)
        process.kill()
        process.join()


def main() -> int:
    """Run the blocks, print, write; return 1 if there were failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=4000, help="number of compositions")
    parser.add_argument("--seconds", type=float, default=240, help="start no block after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for counts and failures")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="number of workers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--isa", default="all", help="CPU: all, auto, or instruction sets with commas between")
    parser.add_argument("--attack", nargs="*", choices=ATTACKS, default=list(ATTACKS), help="default: all")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of compositions whose blocks to run")
    options = parser.parse_args()
    begin, numbers = time.monotonic(), options.only
    if options.device == "cuda":
        options.attack = [name for name in options.attack if name not in ON_THE_CPU]
        made = compile_kernels(os.cpu_count() or 1)
        print(f"{time.monotonic() - begin:4.0f} s  {made} kernels compiled", flush=True)
        options.seconds -= time.monotonic() - begin
    blocks = sorted({n // BLOCK for n in numbers}) if numbers else range(-(-options.count // BLOCK))
    workers = Workers(options, blocks)
    workers.run()
    result = {
        "command": " ".join(["python", *sys.argv]),
        "seed": options.seed,
        "device": options.device,
        "seconds": round(time.monotonic() - begin, 1),
        **workers.counts,
        "failed": len(workers.failures),
        "restarted workers": workers.restarts,
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
    return int(bool(workers.failures))


if __name__ == "__main__":
    sys.exit(main())
