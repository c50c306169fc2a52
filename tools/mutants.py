"""Do the tests notice a wrong line? ``make mutants`` puts each fault of mutants.toml into a copy and runs tests.

    python tools/mutants.py [--gpu] [--workers 2] [--scratch FOLDER] [PART-OF-A-NAME ...]

One line for each mutant: ``caught`` and by which test, ``SURVIVED``, ``stale`` (the text to replace is not found, or is
not unique), ``equivalent`` and the proof (its tests have to pass: nothing can tell it from the original), ``not run``
and why. The exit status is 1 if a mutant survives, is stale, or is told from the original in spite of its proof.

A mutant is one entry of mutants.toml:

    [[mutant]]
    name = "what is wrong"
    file = "src/spattn/..."
    old = "text that occurs in the file once"
    new = "what it becomes"
    tests = ["tests/test_x.py::test_y", ...]    # those that should see it, the narrowest ones
    isa = "avx2"                                # optional: the kernels to build, besides the baseline
    equivalent = "why no test can see it"       # optional

The core is built anew, without optimisation, where the mutant is in C++ or Cython. One of a CUDA kernel needs a GPU and
nvcc, and runs only with ``--gpu``. The checkout itself is never changed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".toml")
TIME_LIMIT = 300  # seconds for the tests of one mutant; they pass in a few
BAD = "SURVIVED", "stale", "WRONG PROOF"


@dataclass(frozen=True)
class Mutant:
    """A fault and the tests that should see it."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    isa: str = "baseline"
    equivalent: str = ""

    @property
    def on_gpu(self) -> bool:
        return self.file.endswith((".cu", ".cuh"))

    @property
    def group(self) -> tuple[str, bool]:
        """What has to be the same for mutants to share a build and a run of pytest."""
        return self.isa, self.on_gpu

    def text(self, original: str) -> str | None:
        """The file with the fault in it; None if the place is not found, or not unique."""
        return original.replace(self.old, self.new) if original.count(self.old) == 1 else None


class Tree:
    """A worker's copy of the checkout, with a build folder for each choice of kernels."""

    def __init__(self, folder: Path):
        self.source, self.builds = folder / "source", folder / "builds"
        self.synchronise()

    def synchronise(self) -> None:
        """Makes the copy equal to the checkout. Files that are equal keep their time, so that nothing is rebuilt."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        wanted = {name for name in listed if name and (ROOT / name).is_file()}
        for path in [p for p in self.source.rglob("*") if p.is_file()]:
            if str(path.relative_to(self.source)) not in wanted:
                path.unlink()
        for name in wanted:
            self.write(name, (ROOT / name).read_bytes())

    def write(self, name: str, content: bytes) -> None:
        path = self.source / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def build(self, isa: str) -> None:
        """Puts what is compiled, with these kernels, where Python finds it; quick when nothing changed."""
        folder = self.builds / isa
        if not (folder / "build.ninja").exists():
            options = f"-Disa={'[]' if isa == 'baseline' else isa}", f"-Damx_emulated={str(not has_amx()).lower()}"
            execute("meson", "setup", folder, self.source, "-Doptimization=0", *options)
        execute("ninja", "-C", folder)
        modules = list((folder / "src").rglob("*.so"))
        assert modules, "nothing was compiled"
        for module in modules:
            self.write(str(module.relative_to(folder)), module.read_bytes())

    def test(self, tests: list[str], on_gpu: bool) -> tuple[int, str]:
        """(exit status, output) of pytest until the first failure; after TIME_LIMIT the status is -SIGALRM."""
        marker = ["-m", "gpu"] if on_gpu else []
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *marker, *tests]
        environment = {
            "PYTHONPATH": os.pathsep.join([str(self.source / "src"), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",  # its time stamps count in seconds
            "SPATTN_HYPOTHESIS_PROFILE": "mutants",
            "SPATTN_CACHE_DIR": str(self.builds / "cubins"),
        }
        process = subprocess.Popen(
            command,
            cwd=self.source,
            env=os.environ | environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return -signal.SIGALRM, output
        return process.returncode, output


def has_amx() -> bool:
    return "amx_bf16" in Path("/proc/cpuinfo").read_text()


def execute(*command) -> None:
    """Runs a program of the build; RuntimeError with all that it said if it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # meson, ninja and cython of this environment
    done = subprocess.run(
        [str(word) for word in command], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def seen_by(status: int, output: str) -> str:
    """Which test failed, or what else ended the run."""
    if status == -signal.SIGALRM:
        return f"the time limit of {TIME_LIMIT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return failed.group(1) if failed else f"signal {signal.Signals(-status).name}" if status < 0 else f"exit {status}"


def judge(tree: Tree, mutant: Mutant) -> tuple[str, str]:
    """(verdict, what is to be said about it)."""
    original = (tree.source / mutant.file).read_bytes()
    mutated = mutant.text(original.decode())
    if mutated is None:
        return "stale", f"text found {original.decode().count(mutant.old)} times in {mutant.file}"
    tree.write(mutant.file, mutated.encode())
    try:
        tree.build(mutant.isa)
        status, output = tree.test(mutant.tests, mutant.on_gpu)
    except RuntimeError as error:
        return "stale", f"does not compile: {error}"
    finally:
        tree.write(mutant.file, original)
    if status in (4, 5):  # of pytest: no such test, no test at all
        return "stale", f"tests not found: {mutant.tests}"
    if status == 0 and " passed" not in output:
        return "not run", "all of its tests are skipped on this machine"
    if status:
        return "WRONG PROOF" if mutant.equivalent else "caught", seen_by(status, output)
    return ("equivalent", mutant.equivalent) if mutant.equivalent else ("SURVIVED", " ".join(mutant.tests))


def check_original(tree: Tree, mutants: list[Mutant]) -> None:
    """RuntimeError unless the tests of these mutants, which are of one group, pass without any fault."""
    isa, on_gpu = mutants[0].group
    tree.build(isa)
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    status, output = tree.test(tests, on_gpu)
    if status:
        raise RuntimeError(f"without a fault, the tests end with {seen_by(status, output)}\n{output}")


def spread(trees: list[Tree], jobs: list, run) -> None:
    """``run(tree, job)`` for every job, each tree taking one at a time; the first exception ends it and is raised."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    errors: list[Exception] = []

    def work(tree):
        while not errors and not waiting.empty():
            try:
                run(tree, waiting.get(block=False))
            except queue.Empty:
                return
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(tree,)) for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def read_list(parts: list[str]) -> list[Mutant]:
    """The mutants whose names contain one of `parts` (all without any), those of one build together."""
    mutants = [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]
    repeated = [name for name, times in Counter(mutant.name for mutant in mutants).items() if times > 1]
    if repeated:
        sys.exit(f"{LIST}: names that occur more than once: {repeated}")
    return sorted((m for m in mutants if not parts or any(p in m.name for p in parts)), key=lambda m: m.group)


def run_all(mutants: list[Mutant], trees: list[Tree]) -> Counter:
    """Judges every mutant; how often each verdict was given."""
    verdicts: Counter = Counter()
    printing = threading.Lock()

    def run(tree, mutant):
        begin = time.monotonic()
        verdict, reason = judge(tree, mutant)
        with printing:
            verdicts[verdict] += 1
            print(f"{verdict:10}  {mutant.name}  ({time.monotonic() - begin:.0f} s)\n            {reason}", flush=True)

    groups = {group: [m for m in mutants if m.group == group] for group in {m.group for m in mutants}}
    spread(trees, list(groups.values()), check_original)
    print(f"the tests pass without a fault, for {len(groups)} builds", flush=True)
    spread(trees, mutants, run)
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only mutants whose names contain one of these")
    parser.add_argument("--gpu", action="store_true", help="the mutants of CUDA kernels instead")
    parser.add_argument("--workers", type=int, help="how many run at once (one a core; one with --gpu)")
    parser.add_argument("--scratch", type=Path, help="keep the copies and builds here, for the next run")
    options = parser.parse_args()
    begin = time.monotonic()
    chosen = read_list(options.names)
    mutants = [m for m in chosen if m.on_gpu == options.gpu]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.scratch.resolve() if options.scratch else Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        lock = (scratch / "lock").open("w")  # until the process ends: two runs would spoil each other's copies
        fcntl.flock(lock, fcntl.LOCK_EX)
        workers = options.workers or (1 if options.gpu else os.cpu_count())
        try:
            verdicts = run_all(mutants, [Tree(scratch / f"worker-{n}") for n in range(workers)])
        except RuntimeError as error:
            sys.exit(f"mutants: {error}")
    for mutant in chosen:
        if mutant.on_gpu != options.gpu:
            verdicts["not run"] += 1
            print(f"not run     {mutant.name}: " + ("needs no GPU" if options.gpu else "needs a GPU (--gpu)"))
    totals = ", ".join(f"{verdicts[v]} {v}" for v in ("caught", *BAD, "equivalent", "not run"))
    print(f"{totals}; {time.monotonic() - begin:.0f} s")
    sys.exit(any(verdicts[verdict] for verdict in BAD))


if __name__ == "__main__":
    main()
